"""Ranks that give arrays of different sizes: an error, and nothing is written outside anybody's array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from algorithms.forcing import SHARED, SLOTS, forced, replaced

import mpdist
from mpdist import Communicator

pytestmark = pytest.mark.ranks(2, 3)

COUNT = 210_000

CALLS: dict[str, Callable[[Communicator, Any], mpdist.Work[Any]]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "reduce": lambda comm, x: comm.reduce(x, 0),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "broadcast": lambda comm, x: comm.broadcast(x, 0),
    "gather": lambda comm, x: comm.gather(x, 0),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
}


def arrays(comm: Communicator, is_resident: bool) -> tuple[Any, Any]:
    """The array of this rank, half as long on the last one, and what lies behind it."""
    make = comm.empty if is_resident else np.empty
    whole = make(2 * COUNT, np.float32)
    whole[:] = 0
    count = COUNT // 2 if comm.rank == comm.size - 1 else COUNT
    whole[:count] = comm.rank + 1
    return whole[:count], whole[count:]


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("is_resident", [False, True], ids=["private", "resident"])
async def test_all_ranks_hear_of_it_and_stay_in_step(comm: Communicator, op: str, is_resident: bool) -> None:
    if comm._channel.engine.shared.reach is None:  # type: ignore[union-attr]  # ranks of one node share
        pytest.skip("the kernel keeps processes from each other's memory here")
    async with forced(comm, SHARED) as made:
        for _ in range(3):
            x, behind = arrays(made, is_resident)
            short, long = made.size - 1, COUNT * 4
            with pytest.raises(mpdist.SizeMismatch, match=rf"{op} .*rank 0: {long}.*rank {short}: {long // 2}\)"):
                await CALLS[op](made, x)
            assert (x == made.rank + 1).all()
            assert not behind.any()
            assert (await made.all_reduce(np.ones(COUNT)) == made.size).all()


async def test_a_rank_whose_array_is_small_enough_for_another_way(comm: Communicator) -> None:
    """It takes the algorithm for small arrays, where sizes are not told."""
    if comm._channel.engine.shared.reach is None:  # type: ignore[union-attr]  # ranks of one node share
        pytest.skip("the kernel keeps processes from each other's memory here")
    with replaced(comm, SHARED):
        made = await comm.dup()
        for number in range(4):
            await made.all_reduce(np.ones(COUNT + number))
        x = np.ones(5 if made.rank == made.size - 1 else COUNT)
        if made.rank < made.size - 1:
            with pytest.raises(mpdist.SizeMismatch, match=rf"rank {made.size - 1}: another operation, or fewer"):
                await made.all_reduce(x)
            assert (x == 1).all()
        else:
            made.all_reduce(x).forget()
        await comm.barrier()
        with pytest.raises(ZeroDivisionError):
            async with made:
                raise ZeroDivisionError  # it is out of step: leaving by an exception waits for nobody


async def test_through_slots_the_readers_hear_of_it(comm: Communicator) -> None:
    """The root of a broadcast may be done by then."""
    with replaced(comm, SLOTS):
        made = await comm.dup()
        x, behind = arrays(made, False)
        if made.rank == made.size - 1:
            with pytest.raises(mpdist.SizeMismatch, match=r"broadcast .*rank 0: 840000, rank \d: 420000"):
                await made.broadcast(x, 0)
            with pytest.raises(mpdist.ClosedError, match="out of step"):
                made.barrier()
        else:
            await made.broadcast(x, 0)
        assert not behind.any()
        await comm.barrier()
        with pytest.raises(ZeroDivisionError):
            async with made:
                raise ZeroDivisionError
