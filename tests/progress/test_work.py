"""Work: what awaiting, waiting, asking, cancelling and asyncio's own tools do with it."""

from __future__ import annotations

import asyncio
import gc
import re
import time
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

import mpdist
from mpdist import Communicator, Work

pytestmark = [pytest.mark.ranks(2), pytest.mark.loops]


def peer(comm: Communicator) -> int:
    return 1 - comm.rank


async def send(comm: Communicator, value: int, tag: int = 0, count: int = 1) -> None:
    await comm.send(np.full(count, value), peer(comm), tag)


# ---------------------------------------------------------------------- results


async def test_a_work_gives_the_same_result_however_often_it_is_awaited(comm: Communicator) -> None:
    await send(comm, 5)
    work = comm.recv()
    first = await work
    assert await work is first
    assert work.result() is first
    assert work.exception() is None
    assert (work.done(), work.cancelled()) == (True, False)
    reduction = comm.all_reduce(np.ones(1))
    assert await reduction is await reduction


async def test_a_work_raises_the_same_error_however_often_it_is_awaited(comm: Communicator) -> None:
    await comm.send(np.zeros(3), comm.rank)
    work = comm.recv(np.zeros(2))
    errors = []
    for _ in range(2):
        with pytest.raises(mpdist.MessageTruncated) as caught:
            await work
        errors.append(caught.value)
    with pytest.raises(mpdist.MessageTruncated):
        work.result()
    assert errors[0] is errors[1] is work.exception()
    await comm.recv()


async def test_a_pending_work_has_no_result_yet(comm: Communicator) -> None:
    work = comm.recv()
    for ask in (work.result, work.exception):
        with pytest.raises(asyncio.InvalidStateError, match="recv from any rank"):
            ask()
    assert not work.done()
    assert work.cancel()


async def test_a_name_of_the_result_asked_of_a_work_says_that_await_is_missing(comm: Communicator) -> None:
    receive: Any = comm.recv()
    with pytest.raises(AttributeError, match=r"recv gives a Work.*`\(await \.\.\.\)\.data`.*`\.wait\(\)\.data`"):
        _ = receive.data
    assert not hasattr(receive, "data")
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = receive.no_such_name
    await send(comm, 5)
    await receive
    with pytest.raises(AttributeError, match="recv gives a Work"):
        _ = receive.data
    reduction: Any = comm.all_reduce(np.ones(1))
    with pytest.raises(AttributeError, match=r"all_reduce gives a Work.*`\(await \.\.\.\)\.sum`"):
        reduction.sum()
    await reduction


async def test_several_tasks_may_await_one_work(comm: Communicator) -> None:
    work = comm.recv()

    async def wait() -> int:
        return int((await work).data[0])

    tasks = [asyncio.create_task(wait()) for _ in range(3)]
    await asyncio.sleep(0)
    await send(comm, 7)
    assert await asyncio.gather(*tasks) == [7] * 3


async def test_a_works_text_says_what_it_is(comm: Communicator) -> None:
    work = comm.recv(src=peer(comm), tag=3)
    assert repr(work) == f"<Work recv from {peer(comm)}, tag 3 on '{comm.name}' (rank {comm.rank} of 2), pending>"
    work.cancel()
    assert "cancelled" in repr(work)
    work = comm.all_reduce(np.ones(4, np.float32), "max")
    await work
    assert "all_reduce float32 x 4 max #1 on" in repr(work)
    assert "done" in repr(work)


async def test_an_await_may_be_thrown_away(comm: Communicator) -> None:
    """A coroutine that is closed in its await withdraws the receive."""

    async def receive() -> None:
        await comm.recv()

    coroutine = receive()
    waiting = coroutine.send(None)
    assert waiting is None or hasattr(waiting, "_asyncio_future_blocking")
    coroutine.close()
    await comm.barrier()
    await send(comm, 3)
    assert (await comm.recv()).data[0] == 3


# ---------------------------------------------------------------------- asyncio's tools


async def test_gather_takes_works(comm: Communicator) -> None:
    receives = [comm.recv(tag=tag) for tag in range(5)]
    sends = [comm.send(np.array([tag]), peer(comm), tag) for tag in reversed(range(5))]
    messages = await asyncio.gather(*receives, comm.all_reduce(np.ones(1)), *sends)
    assert [int(message.data[0]) for message in messages[:5]] == list(range(5))
    assert messages[5][0] == 2


async def test_gather_returns_errors_as_results(comm: Communicator) -> None:
    await comm.send(np.zeros(3), comm.rank, 1)
    await comm.send(np.zeros(3), comm.rank, 2)
    bad, good = await asyncio.gather(comm.recv(np.zeros(2), tag=1), comm.recv(tag=2), return_exceptions=True)
    assert isinstance(bad, mpdist.MessageTruncated)
    assert isinstance(good, mpdist.Message)
    await comm.recv()


async def test_wait_takes_works_and_gives_them_back(comm: Communicator) -> None:
    first, second = comm.recv(tag=1), comm.recv(tag=2)
    await send(comm, 1, tag=1)
    done, pending = await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
    assert (done, pending) == ({first}, {second})
    await comm.barrier()
    await send(comm, 2, tag=2)
    done, pending = await asyncio.wait([first, second])
    assert (done, pending) == ({first, second}, set())
    third = comm.recv(tag=3)
    done, pending = await asyncio.wait([third], timeout=0.01)
    assert (done, pending) == (set(), {third})
    assert third.cancel()


async def test_as_completed_takes_works(comm: Communicator) -> None:
    receives = [comm.recv(tag=tag) for tag in range(4)]
    for tag in reversed(range(4)):
        await send(comm, tag, tag)
    got = [int((await next_one).data[0]) for next_one in asyncio.as_completed(receives)]
    assert sorted(got) == list(range(4))


async def test_wait_for_withdraws_a_receive_that_takes_too_long(comm: Communicator) -> None:
    work = comm.recv()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(work, 0.01)
    assert work.cancelled()
    await comm.barrier()
    await send(comm, 4)
    assert (await asyncio.wait_for(comm.recv(), 10)).data[0] == 4


async def test_a_timeout_block_withdraws_a_receive_that_takes_too_long(comm: Communicator) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await comm.recv()
    await comm.barrier()
    await send(comm, 4)
    async with asyncio.timeout(10):
        assert (await comm.recv()).data[0] == 4


async def test_shield_keeps_a_receive(comm: Communicator) -> None:
    work = comm.recv()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(work), 0.01)
    assert not work.done()
    await comm.barrier()
    await send(comm, 6)
    assert (await work).data[0] == 6


async def test_a_task_group_cancels_receives_when_one_fails(comm: Communicator) -> None:
    works = [comm.recv(tag=tag) for tag in range(3)]

    async def wait(work: mpdist.Work[Any]) -> None:
        await work

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ArithmeticError

    async def run_all() -> None:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(wait(work))
            group.create_task(fail())

    with pytest.raises(ExceptionGroup) as caught:
        await run_all()
    assert [type(error) for error in caught.value.exceptions] == [ArithmeticError]
    assert all(work.cancelled() for work in works)
    await comm.barrier()
    for tag in range(3):
        await send(comm, tag, tag)
        assert (await comm.recv(tag=tag)).data[0] == tag


async def test_callbacks_run_in_the_loop_and_in_order(comm: Communicator) -> None:
    calls: list[tuple[str, object]] = []
    work = comm.recv()
    work.add_done_callback(lambda done: calls.append(("first", done)))
    work.add_done_callback(calls.append)  # type: ignore[arg-type]
    work.add_done_callback(lambda done: calls.append(("last", done)))
    assert work.remove_done_callback(calls.append) == 1  # type: ignore[arg-type]
    await send(comm, 1)
    await work
    await asyncio.sleep(0.01)
    assert calls == [("first", work), ("last", work)]
    work.add_done_callback(lambda done: calls.append(("late", done)))
    assert len(calls) == 2
    await asyncio.sleep(0.01)
    assert calls[2:] == [("late", work)]


async def test_callbacks_of_a_receive_whose_await_is_cancelled_run_at_once(comm: Communicator) -> None:
    """Not when the next operation happens to be driven."""
    for _ in range(20):
        work = comm.recv()
        calls: list[object] = []
        work.add_done_callback(calls.append)
        task = asyncio.ensure_future(work)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert calls == [work]


async def test_a_callback_that_raises_hurts_nobody_else(comm: Communicator) -> None:
    told: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context))
    try:
        work = comm.recv()
        work.add_done_callback(lambda done: 1 / 0)
        await send(comm, 1)
        assert (await work).data[0] == 1
        await asyncio.sleep(0.01)
    finally:
        loop.set_exception_handler(None)
    assert [type(context["exception"]) for context in told] == [ZeroDivisionError]


async def test_finished_sends_are_works_of_their_own(comm: Communicator) -> None:
    """Sets, dicts and asyncio's tools must not merge two."""
    sends = [comm.send(np.zeros(1), dst, 1) for dst in (peer(comm), comm.rank) for _ in range(20)]
    assert len(set(sends)) == 40
    done, _ = await asyncio.wait(sends)
    assert len(done) == 40
    assert len([await each for each in asyncio.as_completed(sends)]) == 40
    calls: list[object] = []
    for work in sends[:2]:
        work.add_done_callback(calls.append)
    await asyncio.sleep(0.01)
    assert calls == sends[:2]
    for _ in range(40):
        await comm.recv(tag=1)


async def test_sends_may_be_waited_for_in_any_way(comm: Communicator) -> None:
    for count in (1, 100_000):
        works = [comm.send(np.full(count, number), peer(comm)) for number in range(5)]
        receives = [comm.recv() for _ in range(5)]
        await asyncio.wait(works)
        assert all(work.done() for work in works)
        await asyncio.gather(*works)
        for work in works:
            assert await asyncio.wait_for(work, 10) is None
            assert work.result() is None
            assert not work.cancel()
        for number, receive in enumerate(receives):
            assert (await receive).data[0] == number


# ---------------------------------------------------------------------- cancelling


async def test_cancel_of_an_unmatched_receive_withdraws_it(comm: Communicator) -> None:
    for work in (comm.recv(), comm.recv(np.zeros(3)), comm.recv_object(), comm.probe()):
        assert work.cancel()
        assert (work.done(), work.cancelled()) == (True, True)
        assert not work.cancel()
        with pytest.raises(asyncio.CancelledError):
            work.result()
        with pytest.raises(asyncio.CancelledError):
            work.exception()
    await comm.barrier()
    await send(comm, 8)
    assert (await comm.recv()).data[0] == 8


async def test_cancel_of_a_finished_receive_does_nothing(comm: Communicator) -> None:
    await send(comm, 1)
    work = comm.recv()
    await work
    assert not work.cancel()
    assert work.result().data[0] == 1


async def test_cancel_of_a_send_or_a_collective_is_refused_and_it_goes_on(comm: Communicator) -> None:
    x = np.full(200_000, comm.rank)
    sent = comm.send(x, peer(comm))
    assert not sent.cancel()
    reduction = comm.all_reduce(np.ones(1)) if comm.rank == 0 else None
    if reduction is not None:
        assert not reduction.cancel()
    message = await comm.recv()
    assert (message.data == peer(comm)).all()
    await sent
    assert (await (reduction or comm.all_reduce(np.ones(1))))[0] == 2


async def test_a_cancelled_await_of_a_collective_leaves_it_pending(comm: Communicator) -> None:
    if comm.rank == 0:
        x = np.ones(1)
        work = comm.all_reduce(x)
        task = asyncio.ensure_future(work)
        await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not work.done()
        await send(comm, 1)
        assert (await work)[0] == 2
        return
    await comm.recv()
    await comm.all_reduce(np.ones(1))


async def test_a_cancelled_await_of_a_send_leaves_it_on_its_way(comm: Communicator) -> None:
    if comm.rank == 0:
        work = comm.send(np.arange(500_000), 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(work, 0.01)
        assert not work.done()
        await send(comm, 1, tag=9)
        await work
        return
    await comm.recv(tag=9)
    assert (await comm.recv()).data.tolist() == list(range(500_000))


async def test_cancelling_sendrecv_withdraws_its_receive(comm: Communicator) -> None:
    work = comm.sendrecv(np.array([comm.rank]), peer(comm), None, peer(comm), tag=1)
    if not work.cancel():  # the other's message was here already
        assert (await work).data[0] == peer(comm)
        await comm.barrier()
        return
    with pytest.raises(asyncio.CancelledError):
        await work
    assert work.cancelled()
    message = await comm.recv(tag=1)
    assert message.data[0] == peer(comm)
    await comm.barrier()


async def test_a_sendrecv_says_of_what_it_is_made(comm: Communicator) -> None:
    sizes = {1: "from 1, tag 1 (its send is done)", 500_000: "to 1, tag 1, and from 1, tag 1"}
    for count, details in sizes.items():
        if comm.rank == 0:
            work = comm.sendrecv(np.zeros(count), 1, tag=1)
            if count == 1:
                await work._send  # type: ignore[attr-defined]  # a SendReceive
            assert work.describe() == f"sendrecv {details} on {comm._channel.where()}"
        await comm.barrier()
        if comm.rank == 0:
            await work
        elif comm.rank == 1:
            await comm.sendrecv(np.zeros(1), 0, tag=1)


async def test_a_cancelled_sendrecv_is_over_at_once_where_only_its_send_is_on_its_way(comm: Communicator) -> None:
    if comm.rank == 1:
        await comm.send(np.arange(3), 0, 1)
        await comm.barrier()
        assert (await comm.recv(tag=1)).count == 500_000
        return
    work = comm.sendrecv(np.zeros(500_000), 1, tag=1)
    has_come = asyncio.Event()
    work._receive.add_done_callback(lambda _: has_come.set())  # type: ignore[attr-defined]  # a SendReceive
    waiting = asyncio.ensure_future(work)
    await has_come.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert work.cancelled()
    assert (await comm.recv(tag=1)).data.tolist() == [0, 1, 2]
    await comm.barrier()


async def test_a_cancelled_sendrecv_gives_back_what_came_into_its_array(comm: Communicator) -> None:
    """Small and large; in its old place, as a copy: the array may be used again at once."""
    for count in (3, 2000):
        if comm.rank == 1:
            await comm.barrier()
            for value in range(2):
                await comm.send(np.full(count, value), 0, 1)
            await comm.barrier()
            assert (await comm.recv(tag=1)).count == 500_000
            continue
        out = np.zeros(count, int)
        work = comm.sendrecv(np.zeros(500_000), 1, out, tag=1)
        await comm.barrier()
        waiting = asyncio.ensure_future(work)
        receive = work._receive  # type: ignore[attr-defined]  # a SendReceive
        while not receive.done():  # noqa: ASYNC110  # with a callback of ours it would not go the latency path
            await asyncio.sleep(0)
        assert not work.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert work.cancelled()
        out[:] = 7
        for value in range(2):
            assert (await comm.recv(tag=1)).data.tolist() == [value] * count
        await comm.barrier()


async def test_all_who_wait_for_a_sendrecv_are_told(comm: Communicator) -> None:
    for count in (3, 2000, 50_000):
        work = comm.sendrecv(np.full(count, comm.rank), peer(comm), np.zeros(count, int))
        told: list[object] = []
        work.add_done_callback(told.append)
        first, second, third = await asyncio.gather(work, work, work)
        assert first is second is third is await work
        assert (first.data == peer(comm)).all()
        await asyncio.sleep(0)
        assert told == [work]


async def test_a_sendrecv_is_done_once_both_are_though_nobody_waits_for_it(comm: Communicator) -> None:
    for count in (3, 50_000):
        work = comm.sendrecv(np.full(count, comm.rank), peer(comm), np.zeros(count, int))
        await comm.barrier()
        while not work.done():  # noqa: ASYNC110  # that asking is enough is what is tested
            await asyncio.sleep(0)
        assert (work.result().data == peer(comm)).all()
        await comm.barrier()


async def test_a_sendrecv_fails_with_its_receive(comm: Communicator) -> None:
    """Whether the message is here or comes; it stays queued, and the send goes on."""
    for is_here in (True, False):
        if is_here:
            await comm.send(np.arange(4), peer(comm))
            await comm.barrier()
        work = comm.sendrecv(np.arange(4), peer(comm), np.zeros(3, int))
        for _ in range(2):
            with pytest.raises(mpdist.MessageTruncated, match=r"recv from .* 3 elements"):
                await work
        assert repr(work).startswith("<Work sendrecv from ")
        assert repr(work).endswith(", failed>")
        for _ in range(1 + is_here):
            assert (await comm.recv()).data.tolist() == [0, 1, 2, 3]
        await comm.barrier()


async def test_a_sendrecv_that_failed_and_at_which_nobody_looked_is_reported(
    comm: Communicator, capfd: pytest.CaptureFixture[str]
) -> None:
    comm.sendrecv(np.arange(4), peer(comm), np.zeros(3, int))
    await comm.barrier()
    assert (await comm.recv()).count == 4
    gc.collect()
    told = capfd.readouterr().err
    assert told.count("nobody looked at it") == 1
    assert "mpdist: sendrecv " in told
    await comm.barrier()


async def test_a_message_that_came_while_its_await_was_cancelled_keeps_its_place(comm: Communicator) -> None:
    """It was matched at once, a later one was kept, and only then the task that should get it is cancelled."""
    me = comm.rank
    work = comm.recv(src=me, tag=1)
    other = comm.recv(src=me, tag=2)

    async def wait() -> int:
        return int((await work).data[0])

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    for value in range(3):
        await comm.send(np.array([value]), me, 1)
    assert work.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [int((await comm.recv(src=me, tag=1)).data[0]) for _ in range(3)] == [0, 1, 2]
    assert other.cancel()


@pytest.mark.parametrize("nbytes", [8, 8_000_000])
async def test_who_asks_again_and_again_whether_it_is_done_gets_there(comm: Communicator, nbytes: int) -> None:
    called: list[Work[Any]] = []
    received = comm.recv(src=(comm.rank - 1) % comm.size)
    works = [
        comm.send(np.full(nbytes // 8, comm.rank), (comm.rank + 1) % comm.size),
        comm.all_reduce(np.ones(nbytes // 8)),
        received,
    ]
    works[1].add_done_callback(lambda work: called.append(work.done() and work))
    while not all(work.done() for work in works):
        assert not called  # a turn of the loop is for that
    assert (received.result().data == (comm.rank - 1) % comm.size).all()
    assert (works[1].result() == comm.size).all()
    await asyncio.sleep(0)
    assert called == [works[1]]


async def test_callbacks_may_ask_for_the_state_of_each_other(comm: Communicator) -> None:
    """One asks while another is run because somebody has asked."""
    count, answers = 400, []
    pending = comm.recv(tag=7)
    works = [comm.recv(np.zeros(1, int), tag=1) for _ in range(count)]
    for work in works:
        work._callbacks = [(lambda _: answers.append(pending.done()), None, None)]
    for _ in range(count):
        await send(comm, 1, tag=1)
    while not all(work.done() for work in works):
        pass
    while len(answers) < count:
        comm._channel.engine.drive()
    assert answers == [False] * count
    assert pending.cancel()


async def test_a_work_in_place_of_its_result_is_a_clear_error(comm: Communicator) -> None:
    work = comm.all_reduce(np.ones(3))
    for use in (
        lambda: work / 2.0,
        lambda: 2.0 * work,
        lambda: work < 1e-6,
        lambda: -work,
        lambda: float(work),
        lambda: work[0],
        lambda: np.sum(work),
        lambda: np.ones(3) + work,
    ):
        with pytest.raises(TypeError, match="all_reduce gives a Work, which has a result"):
            use()
    assert (await work == comm.size).all()


async def test_of_two_tasks_that_await_a_work_one_may_be_cancelled_when_it_is_done(comm: Communicator) -> None:
    """The message is given once: to the task that goes on, not to the next receive as well."""
    for first in (0, 1):
        work = comm.recv(src=comm.rank, tag=1)

        async def wait(work: mpdist.Work[Any] = work) -> int:
            return int((await work).data[0])

        tasks = [asyncio.create_task(wait()) for _ in range(2)]
        await asyncio.sleep(0.01)
        await comm.send(np.array([5]), comm.rank, 1)
        assert work.done()
        tasks[first].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        next_one = comm.recv(src=comm.rank, tag=1)
        await asyncio.sleep(0.01)
        given = [result for result in results if result == 5]
        assert len(given) + next_one.done() == 1, (first, results, next_one)
        next_one.cancel()


async def test_a_cancelled_receive_into_an_array_leaves_the_message_for_the_next(comm: Communicator) -> None:
    """Small and large, cancelled after the message has been matched."""
    for count in (3, 300_000):
        sent = comm.send(np.arange(count), peer(comm), 1)
        x = np.zeros(count, int)
        task = asyncio.ensure_future(comm.recv(x, tag=1))
        await comm.barrier()
        await asyncio.sleep(0)
        task.cancel()
        try:
            message = await task
        except asyncio.CancelledError:
            out = np.zeros(count, int)
            message = await comm.recv(out, tag=1)
        assert (message.data == np.arange(count)).all()
        await sent
        await comm.barrier()


# ---------------------------------------------------------------------- limits


async def test_a_receive_that_takes_longer_than_its_limit_is_withdrawn(comm: Communicator) -> None:
    work = comm.recv(src=peer(comm), tag=4).within(0.05)
    with pytest.raises(mpdist.WorkTimeout, match=f"recv from {peer(comm)}, tag 4") as caught:
        await work
    assert caught.value.work is work
    assert isinstance(work.exception(), TimeoutError)
    assert comm._channel.unfinished() == []
    await comm.barrier()
    await send(comm, 4, tag=4)
    assert (await comm.recv(tag=4).within(20)).data[0] == 4


async def test_a_limit_that_is_kept_changes_nothing(comm: Communicator) -> None:
    works = [comm.recv(tag=1).within(20), comm.all_reduce(np.ones(1)).within(20), comm.barrier().within(20)]
    await comm.send(np.ones(1), peer(comm), 1).within(20)
    message, total, nothing = await asyncio.gather(*works)
    assert (message.count, total[0], nothing) == (1, 2, None)


@pytest.mark.parametrize("seconds", ["x", None, 0, -1, float("nan"), [1], Decimal(1)])
async def test_a_limit_that_is_no_time_is_refused(comm: Communicator, seconds: float) -> None:
    work = comm.recv(tag=5)
    with pytest.raises(mpdist.UsageError, match=re.escape(f"needs a positive number of seconds, got {seconds!r}")):
        work.within(seconds)
    assert work.limit is None
    assert work.cancel()


@pytest.mark.parametrize("seconds", ["x", -1, float("nan"), [1], Decimal(1)])
async def test_a_wait_for_no_time_is_refused(comm: Communicator, seconds: float) -> None:
    work = comm.recv(tag=5)
    words = re.escape(f"timeout is a number of seconds >= 0, or None, got {seconds!r}")
    with pytest.raises(mpdist.UsageError, match=words):
        await asyncio.to_thread(work.wait, seconds)
    with pytest.raises(mpdist.UsageError, match=words):
        await asyncio.to_thread(mpdist.average(comm, np.ones(1)).wait, seconds)
    with pytest.raises(mpdist.UsageError, match=words):
        comm.timeout = seconds
    assert work.cancel()


@pytest.mark.parametrize("seconds", [10**400, 10**5000], ids=["long", "too long to be shown"])
async def test_an_integer_that_no_clock_holds_is_no_time(comm: Communicator, seconds: int) -> None:
    work = comm.recv(tag=5)
    with pytest.raises(mpdist.UsageError, match=rf"got an integer of {seconds.bit_length()} bits"):
        await asyncio.to_thread(work.wait, seconds)
    with pytest.raises(mpdist.UsageError, match=rf"got an integer of {seconds.bit_length()} bits"):
        work.within(seconds)
    with pytest.raises(mpdist.UsageError, match=rf"got an integer of {seconds.bit_length()} bits"):
        comm.timeout = seconds
    assert (work.limit, comm.timeout) == (None, None)
    assert work.cancel()


# ---------------------------------------------------------------------- failures that nobody sees


async def test_a_failure_that_nobody_looked_at_is_reported(
    comm: Communicator, capfd: pytest.CaptureFixture[str]
) -> None:
    await comm.send(np.zeros(3), comm.rank)
    work = comm.recv(np.zeros(2))
    await asyncio.sleep(0)
    assert work.done()
    del work
    gc.collect()
    told = capfd.readouterr().err
    for word in ("recv", comm.name, f"rank {comm.rank} of 2", "nobody looked at it", "MessageTruncated", "float64 x 3"):
        assert word in told, told
    await comm.recv()


async def test_a_failure_that_somebody_looked_at_is_not_reported(
    comm: Communicator, capfd: pytest.CaptureFixture[str]
) -> None:
    for look in range(3):
        await comm.send(np.zeros(3), comm.rank)
        work = comm.recv(np.zeros(2))
        if look == 0:
            with pytest.raises(mpdist.MessageTruncated):
                await work
        elif look == 1:
            assert isinstance(work.exception(), mpdist.MessageTruncated)
        else:
            work.forget()
        await comm.recv()
        del work
    cancelled = comm.recv()
    cancelled.cancel()
    del cancelled
    gc.collect()
    await asyncio.sleep(0.01)
    assert capfd.readouterr().err == ""


# ---------------------------------------------------------------------- fairness


@pytest.mark.limit(120)
async def test_a_heartbeat_beats_beside_a_hundred_thousand_awaited_messages(comm: Communicator) -> None:
    """Messages of both ranks are always there: without turns for the loop the other task would stand still.

    In time of this thread's processor: how long others have that is not its doing. But it is not to sleep either.
    """
    late: list[float] = []
    passed: list[float] = []

    async def beat() -> None:
        while True:
            start, begin = time.thread_time(), time.monotonic()
            await asyncio.sleep(0.001)
            late.append(time.thread_time() - start)
            passed.append(time.monotonic() - begin)

    heart = asyncio.create_task(beat())
    start = time.thread_time()
    out = np.zeros(1)
    for _ in range(50_000):
        sent = comm.send(out, peer(comm))
        await comm.recv(out)
        await sent
    elapsed = time.thread_time() - start
    heart.cancel()
    late.sort()
    assert len(late) > elapsed / 0.02, f"{len(late)} beats in {elapsed:.2f} s"
    assert late[len(late) // 2] < 0.01, f"median lateness {late[len(late) // 2]:.4f} s"
    assert late[-1] < 0.5, f"largest lateness {late[-1]:.4f} s"
    assert sorted(passed)[len(passed) // 2] < 0.1


async def test_awaits_of_finished_operations_give_others_their_turn(comm: Communicator) -> None:
    """Sends that are complete when posted, messages that are here already."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counter = asyncio.create_task(count())
    for _ in range(2000):
        await comm.send(np.zeros(1), comm.rank)
    after_sends = turns
    for _ in range(2000):
        await comm.recv()
    counter.cancel()
    assert after_sends >= 10
    assert turns - after_sends >= 10
