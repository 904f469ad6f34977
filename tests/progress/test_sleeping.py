"""Sleeping: what wakes a loop that has slept beside a message that does not come, and how long its timer is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpdist
from mpdist import Communicator
from mpdist.progress.backoff import Backoff
from mpdist.progress.ticking import Ticking

# What other modules leave pending would be looked at, too.
pytestmark = [pytest.mark.ranks(2), pytest.mark.apart]

LARGE = 1 << 20


def peer(comm: Communicator) -> int:
    return 1 - comm.rank


async def asleep(comm: Communicator) -> Ticking:
    """When the loop sleeps; the next await of the caller may find it awake again."""
    ticking = comm._channel.engine.ticking
    while not (ticking.is_asleep and ticking._timer_seconds):  # noqa: ASYNC110  nothing tells it
        await asyncio.sleep(0.001)
    return ticking


async def send_and_receive(comm: Communicator, listener: mpdist.Work[Any]) -> None:
    await comm.barrier()
    await comm.send(np.ones(1), peer(comm), 9)
    await listener


@pytest.mark.parametrize(
    "post",
    [
        lambda comm: comm.barrier(),
        lambda comm: comm.all_reduce(np.ones(LARGE)),
        lambda comm: comm.all_gather(np.ones(LARGE)),
        lambda comm: comm.all_gather_object({}),
        lambda comm: comm.send(np.ones(LARGE), peer(comm), 5),
    ],
    ids=["barrier", "all_reduce", "all_gather", "object", "send"],
)
async def test_a_loop_that_sleeps_beside_a_receive_is_up_for_what_is_posted(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, post: Callable[[Communicator], mpdist.Work[Any]]
) -> None:
    listener = comm.recv(src=peer(comm), tag=9)
    ticking = await asleep(comm)
    work = post(comm)
    assert not ticking._timer_seconds
    engine = comm._channel.engine
    monkeypatch.setattr(engine, "backoff", replace(engine.backoff, hot_seconds=10))  # however slow the machine is
    await asyncio.sleep(0)
    assert not ticking.is_asleep
    monkeypatch.undo()
    if work.describe().startswith("send"):
        await comm.recv(np.empty(LARGE), src=peer(comm), tag=5)
    await work
    await send_and_receive(comm, listener)


async def test_it_sleeps_on_beside_another_receive(comm: Communicator) -> None:
    listener = comm.recv(src=peer(comm), tag=9)
    ticking = await asleep(comm)
    other = comm.recv(src=peer(comm), tag=10)
    assert ticking._timer_seconds
    parked = ticking.park(other)
    next(parked)
    assert ticking._timer_seconds
    parked.close()
    assert other.cancel()
    await send_and_receive(comm, listener)


async def test_it_is_up_once_for_all_that_is_posted(comm: Communicator) -> None:
    listener = comm.recv(src=peer(comm), tag=9)
    ticking = await asleep(comm)
    first = comm.send(np.ones(LARGE), peer(comm), 5)
    assert not ticking._timer_seconds
    turn = ticking._next
    second = comm.send(np.ones(LARGE), peer(comm), 5)
    assert ticking._next is turn
    for work in (first, second):
        await comm.recv(np.empty(LARGE), src=peer(comm), tag=5)
        await work
    await send_and_receive(comm, listener)


async def test_its_timer_stays_where_a_handler_raises_as_it_is_woken(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    listener = comm.recv(src=peer(comm), tag=9)
    ticking = await asleep(comm)
    monkeypatch.setattr(ticking, "loop", SimpleNamespace(call_soon=interrupted))
    with pytest.raises(KeyboardInterrupt):
        ticking._stay_up()
    monkeypatch.undo()
    assert ticking._timer_seconds
    assert ticking._next is not None
    assert not ticking._next.cancelled()
    await send_and_receive(comm, listener)


@pytest.mark.parametrize("is_long", [False, True], ids=["short", "long"])
async def test_another_thread_wakes_it_from_a_long_sleep_only(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    listener = comm.recv(src=peer(comm), tag=9)
    ticking = await asleep(comm)
    called: list[object] = []
    monkeypatch.setattr("mpdist.progress.ticking.call_in", lambda _, fn: called.append(fn))
    if is_long:
        ticking._timer_seconds = 2 * comm._channel.engine.backoff.cap_seconds
    sent: list[mpdist.Work[Any]] = []
    thread = threading.Thread(target=lambda: sent.append(comm.send(np.ones(LARGE), peer(comm), 5)))
    thread.start()
    thread.join()
    assert ticking._timer_seconds  # not from that thread
    assert called == [ticking._stay_up] * is_long
    monkeypatch.undo()
    await comm.recv(np.empty(LARGE), src=peer(comm), tag=5)
    await sent[0]
    await send_and_receive(comm, listener)


async def test_it_is_up_for_a_few_numbers_that_others_have_not_shown(comm: Communicator) -> None:
    for _ in range(3):  # from the second on words in shared memory may do
        await comm.all_reduce(np.ones(1))
    listener = comm.recv(src=peer(comm), tag=9)
    if comm.rank == 0:
        ticking = await asleep(comm)
        work = comm.all_reduce(np.ones(1))
        assert not work._done
        assert not ticking._timer_seconds
        await comm.send(np.ones(1), 1, 4)
        await work
    else:
        await comm.recv(src=0, tag=4)
        await comm.all_reduce(np.ones(1))
    await send_and_receive(comm, listener)


async def test_no_timer_is_left_to_a_loop_that_drives_no_more(comm: Communicator) -> None:
    listener = comm.recv(src=peer(comm), tag=9)
    ticking = await asleep(comm)
    timer = ticking._next
    assert timer is not None
    ticking.detach()
    assert timer.cancelled()
    assert not ticking._timer_seconds
    await send_and_receive(comm, listener)


async def test_peers_ring_for_it_when_another_thread_has_slept(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = comm.recv(src=peer(comm), tag=9)
    ticking = await asleep(comm)
    doorbell = comm._channel.engine.doorbell
    told: list[str] = []
    sleep, wake = doorbell.sleep, doorbell.wake
    monkeypatch.setattr(doorbell, "sleep", lambda: told.append("asleep") or sleep())
    monkeypatch.setattr(doorbell, "wake", lambda: told.append("awake") or wake())
    other = comm.recv(src=peer(comm), tag=10)

    def wait() -> None:
        with pytest.raises(mpdist.WorkTimeout):
            other.wait(0.2)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert ticking.is_asleep
    assert "awake" in told
    assert told[-1] == "asleep"
    monkeypatch.undo()
    await send_and_receive(comm, listener)


async def test_it_is_up_for_a_message_that_was_kept(comm: Communicator) -> None:
    await comm.send(np.ones(1), peer(comm), 3)
    await comm.send(np.ones(1), peer(comm), 4)
    await comm.recv(src=peer(comm), tag=4)  # the other has come before it
    listener = comm.recv(src=peer(comm), tag=9)
    ticking = await asleep(comm)
    kept = comm.recv(src=peer(comm), tag=3)
    assert not ticking._timer_seconds
    await kept
    await send_and_receive(comm, listener)


async def test_it_is_up_where_a_task_waits_beside_what_mpi_has(comm: Communicator) -> None:
    listener = comm.recv(src=peer(comm), tag=9)
    large = comm.send(np.ones(LARGE), peer(comm), 5)
    ticking = await asleep(comm)
    assert comm._channel.engine.active
    parked = ticking.park(listener)
    next(parked)
    assert not ticking._timer_seconds
    parked.close()
    await comm.barrier()  # until here nobody receives it
    await comm.recv(np.empty(LARGE), src=peer(comm), tag=5)
    await large
    await send_and_receive(comm, listener)


class Recorder(Backoff):
    """A Backoff that keeps what it was asked."""

    asked: list[bool]

    def delay(self, idle_seconds: float, has_requests: bool = False, is_rung: bool = False) -> float:
        self.asked.append(is_rung)
        return super().delay(idle_seconds, has_requests, is_rung)


@pytest.mark.parametrize("rings_all", [True, False])
async def test_it_sleeps_long_only_where_no_ring_is_lost(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, rings_all: bool
) -> None:
    engine = comm._channel.engine
    assert engine.doorbell.rings_all
    monkeypatch.setattr(engine.doorbell, "rings_all", rings_all)
    recorder = Recorder()
    object.__setattr__(recorder, "asked", [])
    monkeypatch.setattr(engine, "backoff", recorder)
    listener = comm.recv(src=peer(comm), tag=9)
    await asleep(comm)
    await send_and_receive(comm, listener)
    assert set(recorder.asked) == {rings_all}
