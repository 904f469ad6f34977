"""Program for the job tests: a job that ends in the way that is asked for, none of them by a failure of a rank.

ending.py HOW
"""

import asyncio
import contextlib
import gc
import os
import resource
import sys
import tempfile
import threading
import time

if sys.argv[1] == "mpi4py_first":
    from mpi4py import MPI

import numpy as np

import mpdist

LATE_SECONDS = 2.0
LARGE = 4 * 1024**2


async def add(world):
    x = np.full(4, world.rank + 1.0)
    await world.all_reduce(x)
    assert x[0] == world.size * (world.size + 1) / 2
    return x[0]


def loop():
    """An event loop of one's own."""
    asyncio.run(add(mpdist.init()))


def before():
    """Before init() nothing communicates, and the refusal starts nothing."""
    for call in (lambda: mpdist.Communicator.from_mpi4py(None), lambda: mpdist.run(add(None))):
        try:
            call()
        except mpdist.UsageError as error:
            if "mpdist.init()" not in str(error) and "write mpdist.run(add)" not in str(error):
                raise
        else:
            raise AssertionError("no error")
    mpdist.finalize()
    assert "mpi4py.MPI" not in sys.modules
    mpdist.run(add)


def many_files():
    """Whatever mpdist opens has a number that select() does not take."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit if limit < 4096 else 4096, limit))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    world = mpdist.init()
    if world.rank == 0:
        time.sleep(0.2)  # the others' naps
    assert world.all_gather_object(len(files)).wait() == [1100] * world.size


def finalize():
    """finalize() can be called twice, and the program may go on for itself."""
    world = mpdist.init()
    world.barrier().wait()
    mpdist.finalize()
    mpdist.finalize()
    assert mpdist.runtime.describe_pending() == []
    for call in (mpdist.init, lambda: mpdist.run(add), world.barrier):
        try:
            call()
        except (mpdist.UsageError, mpdist.ClosedError) as error:
            if "was finalized" not in str(error):
                raise
        else:
            raise AssertionError("no error")
    sys.exit(0)


def finalize_in_threads():
    """Several threads call finalize() at once: all come back when it is over, and the end of the program is none."""
    world = mpdist.init()
    world.barrier().wait()
    start = threading.Barrier(4)
    closed = []

    def end():
        start.wait()
        mpdist.finalize()
        closed.append(world._channel.is_closed)

    threads = [threading.Thread(target=end) for _ in range(3)]
    for thread in threads:
        thread.start()
    end()
    for thread in threads:
        thread.join()
    assert closed == [True] * 4


def twice(world):
    """run() may be called several times, also beside init()."""
    assert mpdist.init() is world
    first = mpdist.run(add)
    world.barrier().wait()
    assert mpdist.run(add) == first


def failed_run(world):
    """A program may catch what leaves run(), and sys.exit."""

    async def main(world):
        await world.barrier()
        raise KeyError("mine")

    try:
        mpdist.run(main)
    except KeyError:
        mpdist.run(add)
    try:
        sys.exit(3)
    except SystemExit:
        gc.collect()


def node(world):
    """The node's communicator is there from the start: no rank waits for another."""
    assert world.node.size == world.size
    if world.rank:
        assert world.node.rank == world.local_rank
    world.node.barrier().wait()


def thread_exit(world):
    """sys.exit in a thread ends the thread, as always."""
    thread = threading.Thread(target=sys.exit, args=(3,))
    thread.start()
    thread.join()


def receive(world):
    """A receive that nobody waits for is dropped."""
    world.recv(src=0, tag=1)
    world.barrier().wait()


def various():
    """The program ends without finalize(), after a number of things that must not disturb that."""
    world = mpdist.init()
    for thing in (twice, failed_run, node, thread_exit, receive):
        thing(world)


def late():
    """One rank takes longer than the others."""
    world = mpdist.init()
    world.barrier().wait()
    if world.rank == world.size - 1:
        time.sleep(LATE_SECONDS)
        print("the last rank is done", flush=True)


def needed():
    """A rank that has finished still delivers what it has posted."""

    async def main(world):
        if world.rank == 0:
            world.all_reduce(np.ones(LARGE))
            for dst in range(1, world.size):
                world.send(np.arange(LARGE), dst)
            return
        await asyncio.sleep(1.5)
        message = await world.recv(src=0)
        assert message.data[-1] == LARGE - 1
        x = np.ones(LARGE)
        await world.all_reduce(x)
        assert x[-1] == world.size

    mpdist.run(main)


async def begin_two(world, waits_for):
    """Rank 0 leaves a communicator when it has begun a second collective, the others before they have."""
    async with world.dup() as comm:
        works = [comm.all_reduce(np.ones(LARGE)) for _ in range(2)]
        if world.rank == 0:
            await works[waits_for]
            await asyncio.sleep(0.3)
        raise KeyError


def left():
    """All ranks have left, and wait for nothing."""

    async def main(world):
        with contextlib.suppress(KeyError):
            await begin_two(world, 0)
        await add(world)

    mpdist.run(main)


def left_with_sends():
    """All ranks have left, one after the other; of two messages each receives the second before."""

    async def main(world):
        comm = await world.dup()
        after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        with contextlib.suppress(KeyError):
            async with comm:
                for tag in (1, 2):
                    comm.send(np.arange(LARGE), after, tag)
                if world.rank == 0:
                    raise KeyError
                await world.recv(src=before)
                assert (await comm.recv(src=before, tag=2)).data[-1] == LARGE - 1
                raise KeyError
        await world.send(np.ones(1), after)
        if world.rank == 0:
            await world.recv(src=before)

    mpdist.run(main)


def left_by_others():
    """One rank waits for what the others have dropped."""

    async def main(world):
        with contextlib.suppress(KeyError):
            await begin_two(world, 1)

    mpdist.run(main)


def mpi4py_first():
    """mpi4py finalizes what it has started itself."""
    mpdist.run(add)
    assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size


def mpi4py_later():
    """mpi4py beside mpdist."""
    mpdist.run(add)
    from mpi4py import MPI

    assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size


def unclaimed():
    """Messages that nobody has received are told of."""
    world = mpdist.init()
    if world.rank == 0:
        world.send(np.ones(3), world.size - 1, tag=8).wait()
    world.barrier().wait()


def progress_thread():
    """Operations advance while Python computes."""
    world = mpdist.init()
    x = np.ones(LARGE)
    work = world.all_reduce(x)
    end = time.monotonic() + 20
    while not work.done() and time.monotonic() < end:
        sum(range(1000))
    assert work.done()
    assert x[-1] == world.size


def lost_send():
    """A message that nobody will receive, at the end of every program."""
    world = mpdist.init()
    if world.rank == 1:
        world.send(np.ones(LARGE), 0, tag=3)


def lost_receive():
    """The main thread has ended, and of two threads one waits in vain."""
    world = mpdist.init()
    if world.rank == 1:
        for tag in (3, 4):
            threading.Thread(target=lambda tag=tag: world.recv(src=0, tag=tag).wait()).start()
    if world.rank == 0:
        time.sleep(1.5)
        world.send(np.ones(1), 1, tag=4)


def daemon():
    """A rank whose program has ended leaves a daemon thread that is to send something later."""
    world = mpdist.init()
    if world.rank == 1:
        threading.Thread(target=time.sleep, args=(60,), daemon=True, name="idle").start()
        threading.Thread(target=lambda: time.sleep(60), daemon=True, name="server").start()
    if world.rank == 0:
        world.recv(src=1).wait()


def nowhere():
    """A rank waits in vain in a folder that is gone, and its stderr is closed."""
    world = mpdist.init()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
    sys.stderr.close()
    if world.rank == 0:
        world.recv(src=1).wait()


def crossed():
    """The end of a program that has sent with another tag than its peer waits for."""
    world = mpdist.init()
    if world.rank == 1:
        world.send(np.ones(LARGE), 0, tag=3)
    if world.rank == 0:
        world.recv(src=1, tag=4).wait()


def crossed_at_the_end():
    """The same, where nobody waits for the message any more, and another receive is left."""
    world = mpdist.init()
    if world.rank == 1:
        world.send(np.ones(LARGE), 0, tag=3)
    if world.rank == 0:
        world.recv(src=1, tag=4)


def many_tags():
    """More tags than one answer lists, and the one that is waited for is among them."""
    world = mpdist.init()
    if world.rank == 1:
        for tag in range(100):
            world.send(np.ones(LARGE // 16), 0, tag=tag)
    if world.rank == 0:
        time.sleep(LATE_SECONDS)
        for tag in range(99, -1, -1):
            assert world.recv(src=1, tag=tag).wait().tag == tag


TASKS = []


async def fails():
    raise ValueError("boom")


def forgotten_task():
    """A task fails, and the program refers to it without looking."""

    async def main(world):
        if world.rank == 1:
            TASKS.append(asyncio.create_task(fails(), name="loader"))
            await asyncio.sleep(0.01)
        await world.barrier()

    mpdist.run(main)


def seen_task():
    """The same, but the program looks at it, after run."""

    async def main(world):
        TASKS.append(asyncio.create_task(fails()))
        await asyncio.sleep(0.01)
        await world.barrier()

    mpdist.run(main)
    assert isinstance(TASKS[0].exception(), ValueError)


def forgotten_task_of_another_loop():
    """asyncio's own rules hold in a loop that is not ours."""

    async def main(world):
        TASKS.append(asyncio.create_task(fails()))
        await asyncio.sleep(0.01)
        await world.barrier()

    asyncio.run(main(mpdist.init()))
    TASKS[0]._log_traceback = False  # asyncio itself would print it when the interpreter ends


KEPT = []


def exits():
    """An exit that is caught and kept, then one that ends the program well."""
    mpdist.init()
    try:
        sys.exit(5)
    except SystemExit as error:
        KEPT.append(error)
    sys.exit(0)


async def nothing(world):
    """A short main."""


def beside():
    """A loop that waits for a message goes on when another thread has run one of its own."""

    async def main(world):
        await world.barrier()
        if world.rank == 0:
            receiving = asyncio.ensure_future(asyncio.wait([world.recv(src=1)], timeout=10))
            await asyncio.sleep(0.2)
            await asyncio.to_thread(mpdist.run, nothing)
            start = time.monotonic()
            await receiving
            assert time.monotonic() < start + 5
        if world.rank == 1:
            await asyncio.sleep(1)
            await world.send(np.ones(1), 0)

    mpdist.run(main)


def servants():
    """Daemon threads send and receive, in a loop and without one, when the program ends."""
    threading.excepthook = lambda args: None  # they are refused in the midst of it
    world = mpdist.init()

    def exchange(comm):
        x = np.ones(100)
        return [comm.send(x, (comm.rank + 1) % comm.size), comm.recv(src=(comm.rank - 1) % comm.size)]

    async def serve(comm):
        while True:
            await asyncio.gather(*exchange(comm))

    def serve_without_a_loop(comm):
        while True:
            for work in exchange(comm):
                work.wait()

    comms = [world.dup().wait() for _ in range(4)]
    for comm in comms[1:]:
        threading.Thread(target=serve_without_a_loop, args=(comm,), daemon=True).start()
    threading.Thread(target=lambda: asyncio.run(serve(comms[0])), daemon=True).start()
    time.sleep(0.5)


def dup_that_timed_out():
    """On all ranks, which do nothing meanwhile, and come to the end one after the other."""
    making_that_times_out(lambda world: world.dup())


def subgroup_that_timed_out():
    making_that_times_out(lambda world: world.subgroup(range(world.size)))


def making_that_times_out(make):
    world = mpdist.init()
    work = make(world).within(0.1)
    time.sleep(1)
    if work.done():
        work.exception()
    time.sleep(0.2 * world.rank)


def iterator_in_a_thread():
    """Over messages; it ends, and what comes after it is done."""
    world = mpdist.init()
    ended = []

    async def serve():
        async for message in world.messages(tag=7):
            await world.send(10 * message.data, message.src, tag=8)
        ended.append(True)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    other = (world.rank + 1) % world.size
    world.send(np.ones(2), other, tag=7).wait()
    assert world.recv(src=other, tag=8).wait().data[0] == 10
    mpdist.finalize()
    thread.join()
    assert ended == [True], ended


def sends_after_finalize():
    world = mpdist.init()
    known, new = ((world.rank + step) % world.size for step in (1, 2))
    world.sendrecv(np.ones(2), known, src=(world.rank - 1) % world.size).wait()
    mpdist.finalize()
    for x in (np.ones(3), bytearray(3)):
        for dst in (known, new):
            try:
                world.send(x, dst)
            except mpdist.ClosedError:
                continue
            raise AssertionError("it was not refused")


def thread_that_waits():
    """A daemon thread waits for a message that nobody sends, and goes on when the program has called finalize()."""
    world = mpdist.init()
    errors = []

    def wait():
        try:
            world.recv(src=world.rank).wait()
        except BaseException as error:
            errors.append(type(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.2)
    mpdist.finalize()
    thread.join()
    assert errors == [asyncio.CancelledError], errors


if __name__ == "__main__":
    globals()[sys.argv[1]]()
