"""Program for the job tests: rank 1 fails in the way that is asked for, the others wait in the way that is asked for.

    failing.py HOW WHERE STYLE

STYLE is how the program is made: `run` (mpdist.run), `uvloop` (the same under uvloop), `loop` (asyncio.run and init),
`plain` (init, no loop), `main` (the status of a main function is raised at the end of the script).
"""

import asyncio
import concurrent.futures
import contextlib
import ctypes
import errno
import hashlib
import io
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback

import numpy as np

import mpdist

FAILING = int(os.environ.get("MPDIST_TEST_FAILING", "1"))
PAUSE_SECONDS = 0.3
LONG_SECONDS = 60


class Stop(BaseException):
    """Not an Exception."""


def break_the_heap():
    """An overrun in C code that the C library finds, while it holds the lock of its heap."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    blocks = [libc.malloc(5000) for _ in range(8)]
    ctypes.memset(blocks[2], 0x41, 5400)
    libc.free(blocks[3])
    libc.free(blocks[2])
    for number in range(50):
        libc.malloc(5000 + 16 * number)


def fail(how):
    """What a plain function can do."""
    if how == "exception":
        raise ValueError("boom")
    if how == "hook":
        sys.excepthook = traceback.print_exception
        raise ValueError("boom")
    if how == "memory":
        raise MemoryError
    if how == "exit":
        exit(4)
    if how.startswith("sysexit"):
        sys.exit(int(how.removeprefix("sysexit")))
    if how == "exittext":
        sys.exit("no more data")
    if how == "raise":
        raise SystemExit(5)
    if how == "thread":
        threading.Thread(target=fail, args=("exception",), name="loader").start()
        time.sleep(LONG_SECONDS)
    if how == "pool":
        receive = mpdist.init().recv(src=0, tag=9)
        concurrent.futures.ThreadPoolExecutor(1).submit(receive.wait)
        sys.exit(3)
    if how == "hidden":
        with contextlib.redirect_stderr(io.StringIO()):
            fail("thread")
    if how == "closed_files":
        os.closerange(3, 400)
        fail("exception")
    if how == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LONG_SECONDS)
    if how == "sigsegv":
        ctypes.string_at(0)
    if how == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "heap":
        break_the_heap()
    if how == "sigabrt":
        os.abort()
    if how == "thread_crash":
        threading.Thread(target=fail, args=("sigsegv",)).start()
        time.sleep(LONG_SECONDS)
    if how == "overflow":
        overflow()
    if how == "_exit0":
        os._exit(0)
    if how == "wait":
        time.sleep(LONG_SECONDS)
    if how == "compute":
        compute()


def post(world, where):
    """The operation in which the other ranks wait; None for idling."""
    if where == "recv":
        return world.recv(src=FAILING, tag=7)
    if where == "barrier":
        return world.barrier()
    if where == "all_reduce":
        return world.all_reduce(np.ones(4))
    if where == "compute":
        compute()
    return None


def compute():
    """A long call of C code, without the GIL."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 25)


def overflow():
    """Fill the stack with calls from Python to C and back."""
    sys.setrecursionlimit(1 << 30)
    compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    numbers = (ctypes.c_int * 2)(2, 1)

    def again(a, b):
        ctypes.CDLL(None).qsort(numbers, 2, 4, compare(again))
        return 0

    again(0, 0)


def say_ready(world):
    print(f"rank {world.rank} of {world.size} is ready", flush=True)


def plain_main(world, how, where):
    world.barrier().wait()
    say_ready(world)
    time.sleep(PAUSE_SECONDS)
    try:
        if world.rank == FAILING:
            fail(how)
            return
        work = post(world, where)
        if work is None:
            time.sleep(LONG_SECONDS)
        else:
            work.wait()
    finally:
        print(f"rank {world.rank} cleaned up", flush=True)


async def async_main(world, how, where):
    await world.barrier()
    say_ready(world)
    await asyncio.sleep(PAUSE_SECONDS)
    try:
        if world.rank == FAILING:
            await async_fail(world, how)
            return
        work = post(world, where)
        if work is None:
            await asyncio.sleep(LONG_SECONDS)
        else:
            await work
    finally:
        print(f"rank {world.rank} cleaned up", flush=True)


async def async_fail(world, how):
    """What only a coroutine can do, and the rest."""
    if how == "task":
        asyncio.create_task(async_fail(world, "exception"))  # noqa: RUF006  # nobody looks at it
        await asyncio.sleep(LONG_SECONDS)
    if how == "callback":
        asyncio.get_running_loop().call_soon(fail, "exception")
        await asyncio.sleep(LONG_SECONDS)
    if how == "group":
        async with asyncio.TaskGroup() as group:
            group.create_task(async_fail(world, "exception"))
            group.create_task(asyncio.sleep(LONG_SECONDS))
    if how.startswith("finally-"):
        task = asyncio.create_task(wait_in_finally(world))
        await asyncio.sleep(0)
        how = how.removeprefix("finally-") if task else ""
    if how == "exit_callback":
        asyncio.get_running_loop().call_soon(sys.exit, 3)
        await asyncio.sleep(LONG_SECONDS)
    if how == "stop":
        raise Stop
    if how == "cancelled":
        raise asyncio.CancelledError
    if how == "wait":
        await asyncio.sleep(LONG_SECONDS)
    fail(how)


async def wait_in_finally(world):
    """A `finally` block that waits for ranks which wait for this one."""
    try:
        await asyncio.sleep(LONG_SECONDS)
    finally:
        await world.recv(src=0, tag=99)


def start(how, where, style):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if how == "import":
        world = mpdist.init()
        if world.rank == FAILING:
            import no_such_module  # noqa: F401
        plain_main(world, how, where)
    elif style == "uvloop":
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
        mpdist.run(async_main, how, where)
    elif style == "run":
        mpdist.run(async_main, how, where)
    elif style == "loop":
        asyncio.run(async_main(mpdist.init(), how, where))
    else:
        plain_main(mpdist.init(), how, where)


def start_without_files():
    """Rank 1 has no files left for mpdist's sockets; MPI is there already, and mpi4py would finalize it."""
    from mpi4py import MPI

    def refuse(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    if MPI.COMM_WORLD.rank == FAILING:
        socket.socket = refuse
    mpdist.init()


def main():
    """What many scripts do: the status is returned, and raised."""
    world = mpdist.init()
    try:
        plain_main(world, *sys.argv[1:3])
    except SystemExit as exit:
        return exit.code
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "start":
        start_without_files()
    if sys.argv[3] == "main":
        caught = SystemExit(9)  # an older one, that is no matter
        raise SystemExit(main())
    start(*sys.argv[1:4])
