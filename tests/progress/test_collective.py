"""Collective: what its error says, and that it keeps nothing alive when it is over."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

import mpdist
from mpdist import Communicator
from mpdist.progress.collective import Collective

pytestmark = pytest.mark.ranks(1)


NO_RANK = -77


@dataclass
class Failing:
    """A request whose test fails in C, as MPI's does."""

    Test: Callable[[], bool]


def direct(comm: Communicator, request: Failing) -> Collective[Any]:
    return comm._channel.post_direct("broadcast", (str,), None, lambda: request)


def program(comm: Communicator, request: Failing) -> Collective[Any]:
    return comm._channel.post("broadcast", lambda _: (yield request), str)


@pytest.mark.parametrize("post", [direct, program])
async def test_mpis_error_asks_whether_the_calls_are_the_same(comm: Communicator, post: Any) -> None:
    failing = Failing(partial(comm._channel.transport.comm.Probe, NO_RANK))
    with pytest.raises(mpdist.CommunicationError, match=r"(?s)broadcast #1 .*same count, type and op\? MPDIST_DEBUG=1"):
        await post(comm, failing)


@pytest.mark.parametrize("post", [direct, program])
async def test_another_error_does_not(comm: Communicator, post: Any) -> None:
    with pytest.raises(mpdist.CommunicationError, match=r"broadcast #1 .*FileNotFoundError: .*nowhere'$") as caught:
        await post(comm, Failing(partial(os.stat, "/nowhere")))
    assert isinstance(caught.value.__cause__, OSError)


def reduce(comm: Communicator, x: np.ndarray[Any, Any]) -> mpdist.Work[np.ndarray[Any, Any]]:
    return comm.all_reduce(x)


def broadcast(comm: Communicator, x: np.ndarray[Any, Any]) -> mpdist.Work[np.ndarray[Any, Any]]:
    return comm.broadcast(x, 0)


def average(comm: Communicator, x: np.ndarray[Any, Any]) -> mpdist.Work[np.ndarray[Any, Any]]:
    return comm.all_reduce(x, "avg")


@pytest.mark.parametrize("post", [reduce, broadcast, average])
@pytest.mark.parametrize("count", [1, 300_000])
async def test_the_last_collectives_array_goes_with_its_last_reference(
    comm: Communicator, post: Any, count: int
) -> None:
    """Whatever the order in which several were awaited."""
    arrays = [np.zeros(count) for _ in range(3)]
    references = [weakref.ref(x) for x in arrays]
    works = [post(comm, x) for x in arrays]
    while works:
        await works.pop()
    del arrays
    gc.collect()
    assert all(reference() is None for reference in references)
