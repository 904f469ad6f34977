"""More than 2**31 elements: beyond MPI's 32-bit counts."""

from __future__ import annotations

import numpy as np
import pytest

from mpdist import Communicator

pytestmark = [pytest.mark.ranks(2), pytest.mark.large, pytest.mark.limit(300)]

COUNT = 2**31 + 16


def pattern(comm: Communicator, rank: int) -> np.ndarray:
    """Elements that differ by rank and place, also at the ends of slices and pieces."""
    x = np.zeros(COUNT, np.uint8)
    x[:16] = rank + 1
    x[2**30 - 8 : 2**30 + 8] = rank + 11
    x[2**31 - 8 :] = rank + 21
    return x


async def test_send_and_receive(comm: Communicator) -> None:
    if comm.rank == 0:
        x = pattern(comm, 0)
        await comm.send(x, 1, 3)
        return
    message = await comm.recv(tag=3)
    assert message.count == COUNT
    assert np.array_equal(message.data, pattern(comm, 0))


async def test_broadcast(comm: Communicator) -> None:
    x = pattern(comm, comm.rank)
    await comm.broadcast(x, 1)
    assert np.array_equal(x, pattern(comm, 1))


async def test_all_reduce(comm: Communicator) -> None:
    x = pattern(comm, comm.rank)
    await comm.all_reduce(x, "max")
    assert np.array_equal(x, pattern(comm, 1))
