"""Uneven blocks that are too large for an MPI with 32-bit counts: all ranks refuse, and stay in step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np
import pytest

import mpdist

pytestmark = pytest.mark.ranks(2, 3)

# In the place of 2**31 - 1.
LIMIT = 10

Call = Callable[[mpdist.Communicator, int], Awaitable[object]]


def blocks(comm: mpdist.Communicator, count: int) -> list[np.ndarray]:
    """One for each rank; rank 1 is sent `count`, others 1."""
    return [np.ones(count if rank == 1 else 1) for rank in range(comm.size)]


CALLS: dict[str, Call] = {
    "gather": lambda c, n: c.gather([np.ones(n if c.rank == 1 else 1)], 0),
    "all_gather": lambda c, n: c.all_gather([np.ones(n if c.rank == 1 else 1)]),
    "scatter": lambda c, n: c.scatter(blocks(c, n) if c.rank == 0 else None, 0),
    "all_to_all, too much sent": lambda c, n: c.all_to_all(blocks(c, n if c.rank == 0 else 1)),
    "all_to_all, too much received": lambda c, n: c.all_to_all(blocks(c, n // c.size)),
}


@pytest.mark.parametrize("what", CALLS)
async def test_all_ranks_refuse_what_is_too_large_for_one(comm: mpdist.Communicator, what: str) -> None:
    transport = comm._channel.transport
    await CALLS[what](comm, LIMIT - comm.size)
    transport.max_total = LIMIT
    await CALLS[what](comm, LIMIT - comm.size)
    with pytest.raises(
        (mpdist.Unavailable, mpdist.UsageError), match=r"uneven blocks of \d+ elements on one rank: this"
    ):
        await CALLS[what](comm, 2 * LIMIT + comm.size)
    await CALLS[what](comm, LIMIT - comm.size)
    x = np.ones(3)
    assert (await comm.all_reduce(x))[0] == comm.size
