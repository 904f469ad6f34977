"""Loops and threads: no loop, one after the other, two at once; posting and waiting from several threads."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mpdist
from mpdist import Communicator
from mpdist.progress.engine import ALGORITHM_SECONDS, WAITED_FOR_SECONDS

pytestmark = pytest.mark.ranks(2)


def peer(comm: Communicator) -> int:
    return 1 - comm.rank


def in_threads(*functions: Callable[[], None]) -> None:
    """Run each in a thread of its own, and raise what one of them raised."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# ---------------------------------------------------------------------- beside other processes


async def test_a_loop_that_looks_again_at_once_gives_way_to_other_processes(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [0]
    monkeypatch.setattr(os, "sched_yield", lambda: turns.__setitem__(0, turns[0] + 1))
    engine = comm._channel.engine
    monkeypatch.setattr(engine, "backoff", replace(engine.backoff, hot_seconds=10))  # however slow the machine is
    work = comm.recv(src=peer(comm))
    seen = turns[0]
    for _ in range(8):
        await asyncio.sleep(0)
    assert turns[0] > seen  # on cores that others use too, for which MPI's launcher counts none
    await comm.barrier()  # what has come before the first look would end the loop
    comm.send(np.ones(1), peer(comm))
    await work


# ---------------------------------------------------------------------- without a loop


def test_wait_gives_result_and_error(comm: Communicator) -> None:
    comm.send(np.arange(3), peer(comm)).wait()
    with pytest.raises(mpdist.MessageTruncated):
        comm.recv(np.zeros(2, int)).wait()
    work = comm.recv()
    assert work.wait() is work.wait() is work.result()


@pytest.mark.parametrize("has_loop", [False, True])
def test_an_algorithm_has_longer_turns_where_no_loop_waits_for_its_own(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, has_loop: bool
) -> None:
    engine = comm._channel.engine
    loop = asyncio.new_event_loop()
    monkeypatch.setattr(engine.ticking, "loop", loop if has_loop else None)
    seen: list[float] = []
    work = comm.all_reduce(np.ones(100))
    monkeypatch.setattr(engine, "drive_while", lambda *_: seen.append(engine.turn_seconds) or True)
    work.wait(0)
    assert seen == [ALGORITHM_SECONDS if has_loop else WAITED_FOR_SECONDS]
    assert engine.turn_seconds == ALGORITHM_SECONDS
    monkeypatch.undo()
    assert work.wait()[0] == 2
    loop.close()


def test_wait_with_a_timeout_withdraws_a_receive(comm: Communicator) -> None:
    for timeout in (0, 0.01, 0.2):
        work = comm.recv(src=peer(comm), tag=4)
        with pytest.raises(mpdist.WorkTimeout, match=rf"recv from {peer(comm)}, tag 4 on .* {timeout:g} s") as caught:
            work.wait(timeout)
        assert caught.value.work is work
        assert isinstance(caught.value, TimeoutError)
        assert work.cancelled()
    comm.barrier().wait()
    comm.send(np.ones(1), peer(comm), 4).wait()
    assert comm.recv(tag=4).wait(20).data[0] == 1


def test_wait_with_a_timeout_leaves_a_collective_pending(comm: Communicator) -> None:
    if comm.rank == 0:
        work = comm.all_reduce(np.ones(1))
        with pytest.raises(mpdist.WorkTimeout, match="all_reduce"):
            work.wait(0.01)
        assert not work.done()
        comm.send(np.ones(1), 1).wait()
        assert work.wait()[0] == 2
        return
    comm.recv().wait()
    comm.all_reduce(np.ones(1)).wait()


def test_callbacks_without_a_loop_run_where_the_end_is_noticed(comm: Communicator) -> None:
    calls: list[object] = []
    work = comm.recv()
    work.add_done_callback(calls.append)
    comm.send(np.ones(1), peer(comm)).wait()
    work.wait()
    assert calls == [work]
    work.add_done_callback(calls.append)
    assert calls == [work, work]


def test_a_callback_that_raises_is_reported_and_disturbs_nobody(
    comm: Communicator, capfd: pytest.CaptureFixture[str]
) -> None:
    """In somebody else's wait() to stderr, in somebody else's await to the loop's exception handler."""
    calls: list[object] = []

    def fail(work: mpdist.Work[mpdist.Message]) -> None:
        raise ArithmeticError("on purpose")

    def bystander_and_bad() -> list[mpdist.Work[mpdist.Message]]:
        bad, good = comm.recv(src=comm.rank, tag=1), comm.recv(src=comm.rank, tag=2)
        for callback in (fail, calls.append):
            bad.add_done_callback(callback)
        return [bad, good]

    bad, good = bystander_and_bad()
    for tag in (1, 2):
        comm.send(np.ones(1), comm.rank, tag).wait()
    assert good.wait().count == 1
    assert calls == [bad]
    told = capfd.readouterr().err
    for word in ("ArithmeticError: on purpose", "fail", f"recv from {comm.rank}, tag 1", "Traceback"):
        assert word in told, told

    bad, good = bystander_and_bad()
    contexts: list[dict[str, object]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))
        for tag in (1, 2):
            await comm.send(np.ones(1), comm.rank, tag)
        assert (await good).count == 1

    asyncio.run(main())
    assert calls[1:] == [bad]
    assert [type(context["exception"]) for context in contexts] == [ArithmeticError]
    assert "recv from" in str(contexts[0]["message"])
    assert capfd.readouterr().err == ""


# ---------------------------------------------------------------------- several loops


def test_loops_follow_each_other_and_alternate_with_wait(comm: Communicator) -> None:
    async def exchange(number: int) -> None:
        sent = comm.send(np.full(number * 1000, number), peer(comm))
        await asyncio.sleep(0)
        assert ((await comm.recv()).data == number).all()
        await sent
        await comm.barrier()

    for number in range(1, 6):
        asyncio.run(exchange(number))
        comm.send(np.full(3, number), peer(comm)).wait()
        assert comm.recv().wait().data[0] == number
        comm.all_reduce(np.ones(1)).wait()


def test_what_was_posted_in_one_loop_can_be_awaited_in_the_next(comm: Communicator) -> None:
    """Also by an await that has to be parked, and where the first loop left things pending behind."""

    async def post() -> tuple[mpdist.Work[mpdist.Message], ...]:
        works = comm.recv(tag=1), comm.recv(tag=2)
        await asyncio.sleep(0.02)  # long enough to fall asleep
        return works

    async def get(work: mpdist.Work[mpdist.Message]) -> int:
        async with asyncio.timeout(20):
            return int((await work).data[0])

    first, second = asyncio.run(post())
    comm.barrier().wait()

    async def later(value: int, tag: int) -> None:
        await asyncio.sleep(0.05)
        await comm.send(np.array([value]), peer(comm), tag)

    async def both(work: mpdist.Work[mpdist.Message], tag: int) -> int:
        return (await asyncio.gather(get(work), later(tag * 10, tag)))[0]

    assert asyncio.run(both(first, 1)) == 10
    assert asyncio.run(both(second, 2)) == 20


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_later_loop_drives_though_an_earlier_one_left_something_pending(comm: Communicator, is_closed: bool) -> None:
    """The data come though nobody awaits them; after a loop that was not even closed, if somebody asks."""
    loops = [asyncio.new_event_loop(), asyncio.new_event_loop()]
    left: list[mpdist.Work[mpdist.Message]] = []
    x = np.zeros(1)

    async def leave_behind() -> None:
        left.append(comm.recv(src=peer(comm), tag=1))
        await asyncio.sleep(0.02)  # long enough to fall asleep

    async def post() -> None:
        work = comm.recv(x, peer(comm), 2)
        comm.send(np.ones(1), peer(comm), 2)
        for _ in range(20_000):
            if x[0] if is_closed else work.done():
                return
            await asyncio.sleep(0.001)

    loops[0].run_until_complete(leave_behind())
    if is_closed:
        loops[0].close()
    loops[1].run_until_complete(post())
    assert x[0] == 1
    left[0].cancel()
    for loop in loops:
        loop.close()


def test_what_was_posted_in_a_loop_can_be_waited_for_after_it(comm: Communicator) -> None:
    async def post() -> list[mpdist.Work[mpdist.Message]]:
        return [comm.recv(tag=1), comm.sendrecv(np.full(50_000, 3), peer(comm), None, peer(comm), 2)]

    received, exchanged = asyncio.run(post())
    comm.send(np.ones(1), peer(comm), 1).wait()
    assert received.wait(20).data[0] == 1
    assert (exchanged.wait(20).data == 3).all()


@pytest.mark.parametrize("is_busy", [True, False])
def test_two_running_loops_are_refused_and_nothing_is_lost(comm: Communicator, is_busy: bool) -> None:
    def second_loop() -> None:
        async def misuse() -> None:
            with pytest.raises(mpdist.UsageError, match="two running event loops"):
                await comm.recv(tag=1)

        asyncio.run(misuse())

    async def main() -> None:
        parked = comm.recv(tag=2)
        waiting = asyncio.ensure_future(parked)
        await asyncio.sleep(0.01)
        if not is_busy:
            parked.cancel()
        await asyncio.to_thread(second_loop)
        parked.cancel()
        await asyncio.wait([waiting])
        await comm.barrier()
        await comm.send(np.array([5]), peer(comm), 1)
        async with asyncio.timeout(10):
            assert (await comm.recv(tag=1)).data[0] == 5

    asyncio.run(main())


def test_a_receive_awaited_in_a_second_running_loop_goes_on_in_the_first(comm: Communicator) -> None:
    async def misuse(work: mpdist.Work[mpdist.Message]) -> None:
        with pytest.raises(mpdist.UsageError, match="two running event loops"):
            await work

    async def main() -> None:
        work = comm.recv(src=peer(comm))
        waiting = asyncio.ensure_future(work)
        await asyncio.sleep(0.01)
        await asyncio.to_thread(lambda: asyncio.run(misuse(work)))
        await comm.barrier()
        await comm.send(np.array([5]), peer(comm))
        async with asyncio.timeout(20):
            assert (await waiting).data[0] == 5

    asyncio.run(main())


# ---------------------------------------------------------------------- threads


def test_a_callback_that_exits_does_not_end_the_progress_thread(
    comm: Communicator, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is reported there: nobody would hear of it, and nothing would go on."""
    engine = comm._channel.engine
    is_called, is_received = threading.Event(), threading.Event()

    def leave(_: object) -> None:
        is_called.set()
        raise SystemExit("on purpose")

    first, second = comm.recv(src=peer(comm), tag=1), comm.recv(src=peer(comm), tag=2)
    first.add_done_callback(leave)
    second.add_done_callback(lambda _: is_received.set())
    engine.start_thread()
    try:
        comm.send(np.zeros(1), peer(comm), 1)
        assert is_called.wait(20)
        comm.send(np.zeros(1), peer(comm), 2)
        assert is_received.wait(20)
    finally:
        engine.stop_thread()
    assert "SystemExit: on purpose" in capsys.readouterr().err


def test_a_loop_that_is_closed_as_it_is_told_of_an_end_disturbs_nobody(comm: Communicator) -> None:
    """By its own thread, while another one has found the end: that would be a progress thread's end, too."""

    class Closing(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *arguments: Any, **options: Any) -> asyncio.Handle:
            self.close()
            return super().call_soon_threadsafe(*arguments, **options)

    loop = Closing()
    work = comm.recv(src=peer(comm))

    async def ask_for_a_call() -> None:
        work.add_done_callback(print)

    def find_it() -> None:
        comm.barrier().wait(20)  # else it may come while the other rank's loop still runs
        comm.send(np.ones(1), peer(comm)).wait(20)
        work.wait(20)

    loop.run_until_complete(ask_for_a_call())
    in_threads(find_it)
    assert loop.is_closed()
    assert work.result().count == 1


@pytest.mark.limit(120)
def test_threads_send_and_wait_at_once(comm: Communicator) -> None:
    """Each thread has a tag: order holds within it, and every message arrives once."""
    number = 300

    def talk(tag: int) -> Callable[[], None]:
        def run() -> None:
            random = np.random.default_rng([comm.rank, tag])
            sends = []
            for turn in range(number):
                size = 30_000 if random.random() < 0.05 else 1
                sends.append(comm.send(np.full(size, turn), peer(comm), tag))
                if random.random() < 0.2:
                    sends.pop(0).wait()
            for send in sends:
                send.wait()

        return run

    def listen(tag: int) -> Callable[[], None]:
        def run() -> None:
            for turn in range(number):
                data = comm.recv(src=peer(comm), tag=tag).wait(60).data
                assert (data == turn).all()

        return run

    in_threads(*map(talk, range(4)), *map(listen, range(4)))


@pytest.mark.limit(120)
def test_threads_post_beside_a_running_loop(comm: Communicator) -> None:
    """The loop awaits messages that threads send, and threads wait for what the loop sends."""
    number = 200

    def thread(tag: int) -> None:
        for turn in range(number):
            comm.send(np.full(1 if turn % 10 else 20_000, turn), peer(comm), tag).wait(60)
            assert comm.recv(src=peer(comm), tag=100 + tag).wait(60).data[0] == turn

    async def task(tag: int) -> None:
        for turn in range(number):
            message = await comm.recv(src=peer(comm), tag=tag)
            assert (message.data == turn).all()
            await comm.send(np.array([turn]), peer(comm), 100 + tag)

    async def main() -> None:
        await asyncio.gather(*(task(tag) for tag in range(3)), *(asyncio.to_thread(thread, tag) for tag in range(3)))

    asyncio.run(main())


def test_threads_with_a_communicator_each_do_collectives(comm: Communicator) -> None:
    parts = [comm.dup().wait() for _ in range(3)]

    def use(number: int) -> Callable[[], None]:
        def run() -> None:
            for turn in range(60):
                x = np.full(3, number * 100 + turn)
                assert (parts[number].all_reduce(x).wait(60) == 2 * (number * 100 + turn)).all()
                assert parts[number].all_gather_object(turn).wait(60) == [turn] * 2

        return run

    in_threads(*map(use, range(3)))
    for part in parts:
        part.close().wait()


def test_callbacks_are_called_once_whichever_threads_find_the_ends(comm: Communicator, quick_switches: None) -> None:
    work = comm.barrier()
    work.wait()
    calls: list[int] = []

    def add(numbers: range) -> Callable[[], None]:
        def run() -> None:
            for number in numbers:
                work.add_done_callback(lambda _, number=number: calls.append(number))

        return run

    in_threads(*(add(range(first, 20_000, 4)) for first in range(4)))
    assert sorted(calls) == list(range(20_000))


def test_a_collective_waits_for_one_that_another_thread_has_begun_meanwhile(comm: Communicator) -> None:
    """The one of several steps is posted when the barrier has seen none, and waits for the lock."""
    comm.barrier().wait()  # the next is of a single step
    if comm.rank == 1:
        comm.recv(src=0).wait()
        assert comm.all_gather_object(1).wait(20) == [0, 1]
        comm.barrier().wait(20)
        return
    seen = threading.Event()

    class Watched(deque[Any]):
        def __len__(self) -> int:
            seen.set()
            return super().__len__()

    channel = comm._channel
    channel._queue = Watched()
    barriers: list[mpdist.Work[None]] = []
    thread = threading.Thread(target=lambda: barriers.append(comm.barrier()))
    with channel.engine.lock:
        thread.start()
        assert seen.wait(20)
        gathering = comm.all_gather_object(0)
    thread.join()
    assert channel.queued() == barriers
    comm.send(np.zeros(1), 1).wait()
    assert gathering.wait(20) == [0, 1]
    barriers[0].wait(20)


def test_several_threads_may_hand_out_what_is_finished(comm: Communicator, quick_switches: None) -> None:
    engine = comm._channel.engine
    work = comm.barrier()
    work.wait()

    def run() -> None:
        for _ in range(10_000):
            engine.finished.extend([work] * 3)
            engine.flush()

    in_threads(*[run] * 4)
    assert not engine.finished


@pytest.mark.ranks(1, 2)
def test_a_callback_of_what_ends_with_its_communicator_may_wait_for_another_thread(comm: Communicator) -> None:
    part = comm.dup().wait()
    ended: list[bool] = []

    def send_in_a_thread(_: object) -> None:
        thread = threading.Thread(target=lambda: comm.send(np.zeros(1), comm.rank).wait(), daemon=True)
        thread.start()
        thread.join(10)
        ended.append(not thread.is_alive())

    part.recv(tag=7).add_done_callback(send_in_a_thread)

    async def leave() -> None:
        async with part:
            pass

    asyncio.run(leave())
    assert ended == [True]
    comm.recv().wait()


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads are switched wherever they may be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_an_op_that_waits_for_another_operation_is_told_that_it_may_not(comm: Communicator) -> None:
    other = comm.dup().wait()

    posted: list[mpdist.Work[Any]] = []

    def waits(a: Any, b: Any) -> Any:
        posted.append(other.all_reduce(np.ones(1)))
        return a + b + posted[0].wait(20)

    with pytest.raises(
        mpdist.UsageError, match=r"all_reduce float64 x 1 .*called by an op.*may only compute there; wait"
    ):
        comm.all_reduce(np.ones(4), waits).wait(20)
    assert comm.all_reduce(np.ones(1)).wait(20) == posted[0].wait(20) == [2]
    other.close().wait(20)


def test_what_a_thread_posts_as_the_loop_finds_nothing_to_do_goes_on(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread sees that the loop drives, and the loop that nothing is pending."""
    engine = comm._channel.engine
    left = set(map(id, engine.pending()))  # by other tests, for good
    works: list[mpdist.Work[mpdist.Message]] = []

    async def main() -> None:
        loop, has_come = asyncio.get_running_loop(), asyncio.Event()

        def post() -> None:
            works.append(comm.recv(src=peer(comm), tag=1))
            works[0].add_done_callback(lambda _: loop.call_soon_threadsafe(has_come.set))

        def look() -> bool:
            found = left.issuperset(map(id, engine.pending()))
            if found and not works and threading.get_ident() == engine.ticking.thread:  # the control thread looks, too
                in_threads(post)
            return found

        monkeypatch.setattr(engine, "is_idle", look)
        comm.recv(src=comm.rank, tag=2)  # from now on the loop drives
        await comm.send(np.ones(1), comm.rank, 2)
        while not works:  # noqa: ASYNC110  # no event of this loop tells it
            await asyncio.sleep(0)
        await comm.send(np.ones(1), peer(comm), 1)
        await asyncio.wait_for(has_come.wait(), 10)

    asyncio.run(main())


async def test_a_thread_may_post_for_the_loop_to_await(comm: Communicator) -> None:
    """The loop may be asleep meanwhile."""
    for _ in range(3):
        work = await asyncio.to_thread(comm.recv)
        await asyncio.sleep(0.01)
        await asyncio.to_thread(lambda: comm.send(np.ones(2), peer(comm)).wait(20))
        assert (await asyncio.wait_for(work, 20)).count == 2
        await comm.barrier()
