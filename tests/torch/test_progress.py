"""Operations that nobody waits for, where the ranks compute on all cores: who looks at them, and when."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpdist
from mpdist.progress.backoff import Backoff
from mpdist.torch import progress

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.limit(60)]

COUNTS = [1, 1000, 3 * 1024**2]


@pytest.fixture(autouse=True)
def _crowded(world: mpdist.Communicator, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No core is free, and patience longer than a test."""
    monkeypatch.setattr(world._channel.engine, "crowd", (world.size, 1))
    monkeypatch.setattr(progress, "LONG_PATIENCE_SECONDS", 1000.0)
    yield
    dist.barrier()


def until_done(*works: Any) -> None:
    """Without waiting: nothing here drives."""
    while not all(work._posted._done for work in works):
        time.sleep(0.001)


@pytest.mark.parametrize("count", COUNTS)
def test_a_collective_goes_on_when_another_rank_waits(group: dist.ProcessGroup, count: int) -> None:
    x = torch.full((count,), float(group.rank()))
    work: Any = dist.all_reduce(x, async_op=True)
    if group.rank() == 0:
        work.wait()
    else:
        until_done(work)
    assert x.unique().tolist() == [group.size() * (group.size() - 1) / 2]


def test_a_collective_is_left_alone_while_all_compute(
    group: dist.ProcessGroup, world: mpdist.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = world._channel.engine
    monkeypatch.setattr(engine.doorbell, "is_awaited", lambda: False)  # by one that has gone ahead
    before: Any = dist.all_reduce(torch.ones(1), async_op=True)
    before.wait()
    engine.active.append(before._posted)  # as what has failed is listed
    monkeypatch.setattr(progress.Driver, "until", 0.0)  # which was left alone for long enough
    x = torch.ones(COUNTS[-1])
    work: Any = dist.all_reduce(x, async_op=True)
    time.sleep(0.2)
    assert not work._posted._done
    work.wait()
    assert x.unique().tolist() == [group.size()]


def test_messages_are_not_left_alone(group: dist.ProcessGroup) -> None:
    """What a rank sends may be all that another one has to compute with."""
    size, rank = group.size(), group.rank()
    x, room = torch.full((COUNTS[-1],), float(rank)), torch.zeros(COUNTS[-1])
    until_done(dist.isend(x, (rank + 1) % size), dist.irecv(room, (rank - 1) % size))
    assert room.unique().tolist() == [(rank - 1) % size]


def test_a_message_wakes_the_thread_that_leaves_a_collective_alone(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LONG_NAP_SECONDS", 1000.0)
    work: Any = dist.all_reduce(y := torch.ones(COUNTS[-1]), async_op=True)
    time.sleep(0.05)  # it sleeps
    test_messages_are_not_left_alone(group)
    work.wait()
    assert y.unique().tolist() == [group.size()]


def test_a_future_outside_of_a_backward_is_not_left_alone(group: dist.ProcessGroup) -> None:
    """C++ may wait for what is made of it, where nobody drives."""
    x = torch.ones(COUNTS[-1])
    future = dist.all_reduce(x, async_op=True).get_future()
    assert torch.futures.collect_all([future]).wait() is not None
    assert x.unique().tolist() == [group.size()]


@pytest.mark.parametrize(
    ("nodes", "idle", "expected"), [((0, 1), 0.1, 0.001), ((0, 1), 2.0, 0.01), ((0, 0), 0.1, 0.01)]
)
def test_what_may_move_between_hosts_is_looked_at_each_millisecond(
    nodes: tuple[int, ...], idle: float, expected: float
) -> None:
    engine: Any = SimpleNamespace(nodes=nodes, backoff=Backoff())
    assert progress.Driver(engine, set(), deque())._delay(idle) == expected
