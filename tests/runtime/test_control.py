"""The control thread on ranks: limits, reports, and waits for what finished ranks could give."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import re
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

import mpdist
from mpdist.config import Config
from mpdist.progress.receive import Receive
from mpdist.runtime import describe_pending, diagnosis
from mpdist.runtime.control import MOST_FAILURES, Control
from mpdist.runtime.mail import Mail

# Most of these tests wait; on 2 ranks: test_control_jobs.py
pytestmark = [pytest.mark.ranks(3), pytest.mark.either_mpi]

TOKEN = 77
Start = Callable[..., Control]


Stuck = list[str]


@pytest.fixture
def stuck() -> Stuck:
    """Reasons for which a control thread would have ended the job."""
    return []


async def until(condition: Callable[[], object], seconds: float = 10) -> None:
    """Poll: what is waited for happens in another thread."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:  # noqa: ASYNC110  # no event of this loop tells it
        await asyncio.sleep(0.01)


@pytest.fixture
async def start(comm: mpdist.Communicator, world: mpdist.Communicator, stuck: Stuck) -> AsyncIterator[Start]:
    """Starts this rank's control thread with these settings, instead of the job's own."""
    engine = comm._channel.engine
    before = engine.on_limit
    world.timeout = 0  # it ends the tests, also those of late ranks
    transport = comm._channel.transport.dup()
    controls = []

    def start(**settings: float) -> Control:
        controls.append(Control(engine, transport, Config(**settings), stuck.append))
        controls[0].start()
        return controls[0]

    yield start
    await world.barrier()
    for control in controls:
        control.stop()
    await world.barrier()
    # Not freed: MPICH gives its number to the next communicator, which would get letters that came to an ended thread.
    engine.on_limit = before
    world.timeout = None


@pytest.fixture
async def lost(comm: mpdist.Communicator) -> AsyncIterator[mpdist.Communicator]:
    """A communicator on which ranks get out of step; nobody waits for its end."""
    lost = await comm.dup()
    yield lost
    if not lost._channel.is_closed:
        lost._closed("the test is over")


def line_of(text: str) -> int:
    """The number of the line of this file that has the text."""
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def load_batch(seconds: float) -> None:
    time.sleep(seconds)  # the late line


# ---------------------------------------------------------------------- limits


async def test_a_collective_past_its_limit_names_who_came_and_where_the_late_rank_is(
    lost: mpdist.Communicator, start: Start
) -> None:
    start()
    await lost.barrier()
    if lost.rank == 1:
        load_batch(2)
        await lost.all_reduce(np.ones(4))
        return
    begin = time.monotonic()
    with pytest.raises(mpdist.WorkTimeout) as caught:
        await lost.all_reduce(np.ones(4)).within(0.5)
    assert 0.5 <= time.monotonic() - begin < 0.9
    assert caught.value.waiting_for == (1,)
    text = str(caught.value)
    assert re.search(rf"all_reduce float64 x 4 sum #2 on '.*' \(rank {lost.rank} of {lost.size}\)", text)
    assert "is not done after 0.5 s, waiting for rank 1\n" in text
    assert re.search(r"arrived: rank(s)? 0", text)
    assert re.search(
        rf"not arrived: rank 1: last collective barrier #1 \(.*test_control.py:\d+\), now at "
        rf".*test_control.py:{line_of('# the ' + 'late line')} in load_batch: time.sleep\(seconds\)",
        text,
    )
    with pytest.raises(mpdist.ClosedError, match="was given up"):
        lost.barrier()


async def test_after_a_collective_past_its_limit_messages_are_refused_too_and_it_can_be_closed(
    comm: mpdist.Communicator, lost: mpdist.Communicator, start: Start
) -> None:
    start()
    if lost.rank == 1:
        await comm.barrier()
        await lost.barrier()
        return
    pending, x = lost.recv(tag=5), np.zeros(3)
    listener = aiter(lost.messages())
    with pytest.raises(mpdist.WorkTimeout):
        await lost.barrier().within(0.1)
    calls = [
        lambda: lost.send(x, 1), lambda: lost.send(x, lost.rank), lambda: lost.send(np.zeros(0), 1),
        lambda: lost.send_object(1, 1), lambda: lost.send_object(1, lost.rank), lambda: lost.recv(),
        lambda: lost.recv(x), lambda: lost.recv_object(), lambda: lost.probe(), lambda: lost.sendrecv(x, 1),
        lambda: lost.barrier(), lambda: lost.all_reduce(x), lambda: lost.dup(), lambda: lost.subgroup([lost.rank]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(mpdist.ClosedError, match="was given up"):
            call()
    with pytest.raises(mpdist.ClosedError, match="was given up"):
        await anext(listener)
    assert not pending.done()
    await lost.close()
    with pytest.raises(mpdist.ClosedError, match="closed"):
        await pending
    with pytest.raises(mpdist.ClosedError, match="closed"):
        lost.close()
    await comm.barrier()


async def test_limits_are_kept_where_the_diagnosis_fails_and_it_goes_on(
    comm: mpdist.Communicator, start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object) -> str:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(diagnosis, "timeout_text", fail)
    start()
    for _ in range(MOST_FAILURES + 1):
        with pytest.raises(mpdist.WorkTimeout, match=r"^recv from any rank, tag 5 .* is not done after 0.1 s$"):
            await comm.recv(tag=5).within(0.1)
    told = capsys.readouterr().err
    assert told.count("the diagnosis has failed, limits are kept without it") == MOST_FAILURES
    assert told.count("nothing is said of it any more") == 1
    assert "ZeroDivisionError: on purpose" in told
    monkeypatch.undo()
    with pytest.raises(mpdist.WorkTimeout, match=r"waiting for rank"):
        await comm.recv(tag=5).within(0.1)


@pytest.mark.parametrize("whose", ["job", "communicator"])
async def test_timeouts_of_the_job_and_the_communicator_end_collectives_only(
    lost: mpdist.Communicator, start: Start, whose: str
) -> None:
    start(timeout=0.4 if whose == "job" else 100.0)
    lost.timeout = 0.4 if whose == "communicator" else None
    if lost.rank == 1:
        await asyncio.sleep(1.2)
        await lost.barrier()
        await lost.send(np.zeros(1), 0)
        return
    receive = lost.recv(src=1) if lost.rank == 0 else None
    begin = time.monotonic()
    with pytest.raises(mpdist.WorkTimeout, match=r"in test_timeouts.*asyncio.sleep"):
        await lost.barrier()
    assert 0.4 <= time.monotonic() - begin < 0.9
    if receive is not None:
        assert (await receive).src == 1


async def test_timeout_0_waits_for_ever(comm: mpdist.Communicator, start: Start) -> None:
    start(timeout=0.2)
    comm.timeout = 0
    await asyncio.sleep(0.8 * comm.rank)
    await comm.barrier()


@pytest.mark.parametrize("how", ["await", "wait"])
async def test_a_receive_past_its_limit_is_withdrawn_and_all_stays_usable(
    comm: mpdist.Communicator, start: Start, how: str
) -> None:
    start()
    peer = (comm.rank + 1) % comm.size
    begin = time.monotonic()
    work = comm.recv(src=peer, tag=5).within(0.5)  # others have as long to answer
    waiting = work if how == "await" else asyncio.to_thread(work.wait)
    words = rf"recv from {peer}, tag 5.*\n.*rank {peer}: (no|last) collective .*, now at"
    with pytest.raises(mpdist.WorkTimeout, match=words):
        await waiting
    assert 0.5 <= time.monotonic() - begin < 0.9
    await comm.barrier()
    message = await comm.sendrecv(np.full(3, comm.rank), peer, src=(comm.rank - 1) % comm.size, tag=5)
    assert message.data.tolist() == [(comm.rank - 1) % comm.size] * 3


async def test_a_sendrecv_past_its_limit_withdraws_its_receive(comm: mpdist.Communicator, start: Start) -> None:
    start()
    peer, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with pytest.raises(mpdist.WorkTimeout):
        await comm.sendrecv(np.ones(2), peer, src=before, tag=comm.rank + 1).within(0.1)
    assert not comm._channel.unfinished()
    await comm.barrier()
    assert (await comm.recv(src=before, tag=before + 1)).count == 2


async def test_different_collectives_are_named(lost: mpdist.Communicator, start: Start) -> None:
    lost._channel.signer = None  # as between nodes, where they are not compared when they are called
    start()
    src = 1 if lost.rank == 0 else 0  # so all of them wait for data
    with pytest.raises(mpdist.WorkTimeout) as caught:
        await lost.broadcast(np.ones(4), src).within(0.4)
    assert caught.value.waiting_for == ()
    text = str(caught.value)
    assert re.search(r"call 1 on '.*' differs between ranks:", text)
    assert re.search(r"rank 0: +broadcast float64 x 4 from 1 +\(.*test_control.py:\d+\)", text)
    assert re.search(r"ranks? 1.*: +broadcast float64 x 4 from 0 +\(.*test_control.py:\d+\)", text)


async def test_different_collectives_fail_when_they_are_reported(
    lost: mpdist.Communicator, start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody waits for the timeout of what can never end."""
    lost._channel.signer = None  # as above
    start(report_after=0.4)
    with pytest.raises(mpdist.CollectiveMismatch, match="differs between ranks") as caught:
        await (lost.barrier() if lost.rank == 0 else lost.broadcast(np.ones(4), 0))
    assert "barrier" in caught.value.calls[0]
    assert "broadcast float64 x 4" in caught.value.calls[lost.rank or 2]
    assert capfd.readouterr().err.count("differs between ranks") == (lost.rank == 0)
    with pytest.raises(mpdist.ClosedError, match="out of step"):
        lost.barrier()


# ---------------------------------------------------------------------- reports


@pytest.mark.parametrize("late", [0, 2])
async def test_a_long_wait_is_reported_once_by_the_lowest_rank_that_waits(
    comm: mpdist.Communicator, world: mpdist.Communicator, start: Start, capfd: pytest.CaptureFixture[str], late: int
) -> None:
    await world.barrier()  # those that wait begin at nearly the same time: within a tenth of what is reported
    start(report_after=2.5)
    if comm.rank == late:
        await asyncio.sleep(4)
    await comm.barrier()
    text = capfd.readouterr().err
    lowest = 1 if late == 0 else 0
    assert text.count("mpdist: rank") == (comm.rank == lowest)
    if comm.rank == lowest:
        assert re.search(r"barrier #1 on '.*' \(rank \d of \d\) \(.*test_control.py:\d+\), for \d\.\d+ s\n", text)
        assert f"arrived: ranks {lowest}-{lowest + 1}" in text
        assert f"not arrived: rank {late}: no collective on it yet, now at " in text
        assert "asyncio.sleep(4)" in text


async def test_a_report_costs_few_letters(
    comm: mpdist.Communicator,
    world: mpdist.Communicator,
    start: Start,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who knows a rank that reports asks no other."""
    asked: list[int] = []
    send = Mail.send

    def counted(mail: Mail, rank: int, record: dict[str, object]) -> None:
        asked.extend([rank] if "ask" in record else [])
        send(mail, rank, record)

    monkeypatch.setattr(Mail, "send", counted)
    await world.barrier()  # ranks 0 and 2 begin to wait at nearly the same time
    start(report_after=1.0)
    if comm.rank == 1:
        await asyncio.sleep(2.0)
    await comm.barrier()
    assert sorted(asked) == {0: [1, 2], 1: [], 2: [0]}[comm.rank]
    assert ("mpdist: rank 0" in capfd.readouterr().err) == (comm.rank == 0)


async def test_a_stopped_rank_is_told_of_as_mute_and_is_not_given_up(
    comm: mpdist.Communicator, start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    start(report_after=0.3)
    pids = await comm.all_gather_object(os.getpid())
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if comm.rank == 0:
        waker = asyncio.get_running_loop().call_later(2.5, os.kill, pids[1], signal.SIGCONT)
    x = np.ones(2)
    await comm.all_reduce(x)
    assert x.tolist() == [comm.size] * 2
    if comm.rank == 0:
        assert waker.when() < asyncio.get_running_loop().time()
        assert "no answer (dead, stopped, or cut off): rank 1" in capfd.readouterr().err


async def test_a_rank_that_has_left_is_told_to_who_waits_for_it(comm: mpdist.Communicator, start: Start) -> None:
    start()
    try:
        async with comm.dup() as part:
            if comm.rank == 1:
                raise KeyError
            with pytest.raises(mpdist.WorkTimeout, match=r"not arrived: rank 1: has closed it, now at"):
                await part.all_reduce(np.ones(3)).within(0.5)
    except KeyError:
        assert comm.rank == 1
    await comm.barrier()


async def test_messages_of_a_meeting_are_not_listed(comm: mpdist.Communicator) -> None:
    part = await comm.dup()
    await comm.barrier()
    if comm.rank == 0:
        closing = part.close()
        lines = describe_pending()
        assert any("close #" in line for line in lines)
        assert not any("meeting" in line for line in lines)
        assert any(isinstance(work, Receive) for work in part._channel.engine.meeting.pending())
        await comm.barrier()
        await closing
    else:
        await comm.barrier()
        await part.close()


async def test_a_pending_operation_is_described(comm: mpdist.Communicator, start: Start) -> None:
    receive = comm.recv(src=0, tag=3)
    assert any(line.startswith("recv from 0, tag 3 on '") for line in describe_pending())
    receive.cancel()
    if comm.rank == 0:
        await asyncio.sleep(0.05)
    work = comm.barrier()
    if comm.rank != 0:
        assert any(re.search(r"barrier #1 on .*called at .*test_control.py:\d+", line) for line in describe_pending())
    await work


# ---------------------------------------------------------------------- finished ranks


async def test_ranks_that_end_together_tell_nobody(comm: mpdist.Communicator, start: Start) -> None:
    control = start()
    control.announce_finished()
    control.stop()  # the job is over before it is due
    await comm.barrier()
    assert control.finished == {}


async def others_finish(comm: mpdist.Communicator, control: Control) -> bool:
    """All ranks but 0 announce their end; True on rank 0, the others wait for it to say that the test is over."""
    if comm.rank == 0:
        await until(lambda: len(control.finished) == comm.size - 1)
        return True
    control.announce_finished()
    await comm.recv(src=0, tag=TOKEN)
    return False


async def release(comm: mpdist.Communicator) -> None:
    for rank in range(1, comm.size):
        await comm.send(np.zeros(1), rank, TOKEN)


WAITS = {
    "collective": (lambda c: c.all_reduce(np.ones(4)), r"all_reduce float64 x 4 sum #1 on '.*' \(.*\) for ranks? 1"),
    "receive": (lambda c: c.recv(src=1, tag=2), r"recv from 1, tag 2 on '.*' \(.*\) for rank 1, which has finished"),
    "any source": (lambda c: c.recv(tag=2), r"recv from any rank, tag 2 on '.*' \(.*\) for ranks? 1"),
}


@pytest.mark.parametrize("what", WAITS)
async def test_a_wait_for_finished_ranks_ends_the_job(
    comm: mpdist.Communicator, start: Start, stuck: Stuck, what: str
) -> None:
    control = start()
    if not await others_finish(comm, control):
        if what == "collective":
            await comm.all_reduce(np.ones(4))
        return
    post, words = WAITS[what]
    task = asyncio.create_task(waiter(post(comm)))
    begin = time.monotonic()
    await asyncio.wait([task, asyncio.create_task(until(lambda: stuck, 4))], return_when="FIRST_COMPLETED")
    assert 0.8 <= time.monotonic() - begin < 4 or what != "collective"
    if what == "collective":
        assert re.match(rf"rank 0 waits in {words}", stuck[0])
    else:
        assert not stuck, "while a task sleeps, it might do something about it"
    await release(comm)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def waiter(work: mpdist.Work[object]) -> None:
    await work


@pytest.mark.parametrize("what", WAITS)
async def test_the_main_thread_that_waits_for_finished_ranks_ends_the_job(
    comm: mpdist.Communicator, start: Start, stuck: Stuck, what: str
) -> None:
    control = start()
    if not await others_finish(comm, control):
        if what == "collective":
            await comm.all_reduce(np.ones(4))
        return
    post, words = WAITS[what]
    work = post(comm)

    def end_the_wait(text: str) -> None:
        stuck.append(text)
        engine = work._channel.engine
        with engine.lock:
            work._fail(mpdist.WorkTimeout(text))  # only this: the communicator is used on
        engine.flush()

    control._stuck._on_stuck = end_the_wait
    begin = time.monotonic()
    with pytest.raises(mpdist.WorkTimeout):
        await work
    assert 0.8 <= time.monotonic() - begin < 4  # counted from the last move, which came a little before
    assert re.match(rf"rank 0 waits in {words}", stuck[0])
    await release(comm)


async def test_what_a_finished_rank_has_posted_is_still_carried_out(
    comm: mpdist.Communicator, start: Start, stuck: Stuck
) -> None:
    control = start()
    if comm.rank != 0:
        early = comm.all_reduce(np.ones(3)), comm.send(np.ones(2**20), 0, 4)
        await others_finish(comm, control)
        for work in early:
            await work
        return
    await others_finish(comm, control)
    await asyncio.sleep(1.5)
    assert (await comm.all_reduce(np.ones(3))).tolist() == [comm.size] * 3
    for _ in range(1, comm.size):
        assert (await comm.recv(tag=4)).count == 2**20
    assert not stuck
    await release(comm)


async def test_a_wait_that_a_program_limits_does_not_end_the_job(
    comm: mpdist.Communicator, start: Start, stuck: Stuck
) -> None:
    control = start()
    if not await others_finish(comm, control):
        return
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.5):
            await comm.recv(src=1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(comm.recv(src=1), 2.5)
    with pytest.raises(mpdist.WorkTimeout):
        await comm.recv(src=1).within(2.5)
    assert not stuck
    await release(comm)


async def test_a_computing_rank_with_a_receive_in_the_background_does_not_end_the_job(
    comm: mpdist.Communicator, start: Start, stuck: Stuck
) -> None:
    control = start()
    if not await others_finish(comm, control):
        return
    receive = comm.recv(src=1, tag=9)
    load_batch(2.5)
    listener = asyncio.create_task(waiter(receive))
    await asyncio.sleep(2.5)
    assert not stuck
    listener.cancel()
    await release(comm)


# ---------------------------------------------------------------------- cost


async def test_the_thread_sleeps_nearly_all_the_time(comm: mpdist.Communicator, start: Start) -> None:
    control = start()
    receive = comm.recv(src=(comm.rank + 1) % comm.size, tag=1)
    await asyncio.sleep(0.3)
    clock = time.pthread_getcpuclockid(control._thread.ident or 0)
    before = time.clock_gettime(clock)
    await asyncio.sleep(3)
    assert time.clock_gettime(clock) - before < 0.05 * 3  # it takes 0.01; a slow machine three times that
    receive.cancel()


async def test_a_handler_that_raises_loses_its_letter_only(
    comm: mpdist.Communicator, start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    control = start()
    handled = []

    def handle(sender: int, letter: dict[str, object]) -> None:
        if letter["test"] == "bad":
            raise ZeroDivisionError
        handled.append(sender)

    control.handlers["test"] = handle
    for content in ("bad", "good"):
        control.mail((comm.rank + 1) % comm.size, {"test": content})
    sender = (comm.rank - 1) % comm.size
    await until(lambda: handled)
    assert handled == [sender]
    assert control._thread.is_alive()
    error = capfd.readouterr().err
    assert f"a letter of rank {sender} is dropped" in error
    assert "ZeroDivisionError" in error


@pytest.mark.parametrize("op", ["recv", "sendrecv"])
def test_a_callback_of_what_timed_out_holds_nobody_up(comm: mpdist.Communicator, op: str) -> None:
    """The control thread calls it, and not under the lock that whoever drives needs."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    called, exchanged = threading.Event(), threading.Event()
    answers: list[bool] = []

    def callback(_: object) -> None:
        called.set()
        answers.append(exchanged.wait(20))

    if op == "recv":
        work = comm.recv(src=left, tag=comm.rank)
    else:  # what its neighbour sends has another tag
        work = comm.sendrecv(np.ones(2), right, src=left, tag=comm.rank)
    work.within(0.1).add_done_callback(callback)
    assert called.wait(20)
    comm.sendrecv(np.ones(1 << 18), right, src=left, tag=9).wait()
    exchanged.set()
    assert isinstance(work.exception(), mpdist.WorkTimeout)
    if op == "sendrecv":
        comm.recv(src=left, tag=left).wait()
    while not answers:
        time.sleep(0.001)
    assert answers == [True]
