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
    while not (ticking.is_asleep and ticking._is_timed):  # noqa: ASYNC110  nothing tells it
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
    assert not ticking._is_timed
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
    assert ticking._is_timed
    parked = ticking.park(other)
    next(parked)
    assert ticking._is_timed
    parked.close()
    assert other.cancel()
    await send_and_receive(comm, listener)


async def test_it_is_up_once_for_all_that_is_posted(comm: Communicator) -> None:
    listener = comm.recv(src=peer(comm), tag=9)
    ticking = await asleep(comm)
    first = comm.send(np.ones(LARGE), peer(comm), 5)
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
    assert ticking._is_timed
    assert ticking._next is not None
    assert not ticking._next.cancelled()
    await send_and_receive(comm, listener)


async def test_another_thread_leaves_it_asleep(comm: Communicator) -> None:
    listener = comm.recv(src=peer(comm), tag=9)
    ticking = await asleep(comm)
    sent: list[mpdist.Work[Any]] = []
    thread = threading.Thread(target=lambda: sent.append(comm.send(np.ones(LARGE), peer(comm), 5)))
    thread.start()
    thread.join()
    assert ticking._is_timed
    await comm.recv(np.empty(LARGE), src=peer(comm), tag=5)
    await sent[0]
    await send_and_receive(comm, listener)


async def test_it_is_up_for_a_message_that_was_kept(comm: Communicator) -> None:
    await comm.send(np.ones(1), peer(comm), 3)
    await comm.send(np.ones(1), peer(comm), 4)
    await comm.recv(src=peer(comm), tag=4)  # the other has come before it
    listener = comm.recv(src=peer(comm), tag=9)
    ticking = await asleep(comm)
    kept = comm.recv(src=peer(comm), tag=3)
    assert not ticking._is_timed
    await kept
    await send_and_receive(comm, listener)


async def test_it_is_up_where_a_task_waits_beside_what_mpi_has(comm: Communicator) -> None:
    listener = comm.recv(src=peer(comm), tag=9)
    large = comm.send(np.ones(LARGE), peer(comm), 5)
    ticking = await asleep(comm)
    assert comm._channel.engine.active
    parked = ticking.park(listener)
    next(parked)
    assert not ticking._is_timed
    parked.close()
    await comm.recv(np.empty(LARGE), src=peer(comm), tag=5)
    await large
    await send_and_receive(comm, listener)


class Recorder(Backoff):
    """A Backoff that keeps what it was asked."""

    asked: list[bool]

    def delay(self, idle_seconds: float, has_requests: bool = False, is_rung: bool = False) -> float:
        self.asked.append(is_rung)
        return super().delay(idle_seconds, has_requests, is_rung)


@pytest.mark.parametrize("has_loop", [True, False])
async def test_a_sleep_that_a_peer_ends_is_asked_for_as_such(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, has_loop: bool
) -> None:
    engine = comm._channel.engine
    recorder = Recorder()
    object.__setattr__(recorder, "asked", [])
    monkeypatch.setattr(engine, "backoff", recorder)
    if has_loop:
        listener = comm.recv(src=peer(comm), tag=9)
        await asleep(comm)
        await send_and_receive(comm, listener)
    else:
        with pytest.raises(mpdist.WorkTimeout):
            await asyncio.to_thread(comm.recv(src=peer(comm), tag=9).wait, 0.05)
    assert recorder.asked
    assert all(recorder.asked)
