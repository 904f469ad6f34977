"""Collective: what its error says."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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
