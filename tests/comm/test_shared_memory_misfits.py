"""Ranks that give arrays of different sizes: an error, and nothing is written outside anybody's array."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from algorithms.forcing import CHANGING, SHARED, SLOTS, Way, forced, replaced, skip_without_reach

import mpdist
from mpdist import Communicator

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.either_mpi]

COUNT = 210_000

REDUCING: dict[str, Callable[..., mpdist.Work[Any]]] = {
    "all_reduce": lambda comm, x, op="sum": comm.all_reduce(x, op),
    "reduce": lambda comm, x, op="sum": comm.reduce(x, 0, op),
    "reduce_scatter": lambda comm, x, op="sum": comm.reduce_scatter(x, op),
}
CALLS: dict[str, Callable[..., mpdist.Work[Any]]] = {
    **REDUCING,
    "broadcast": lambda comm, x: comm.broadcast(x, 0),
    "gather": lambda comm, x: comm.gather(x, 0),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
}


def arrays(comm: Communicator, is_resident: bool, count: int) -> tuple[Any, Any]:
    """The array of this rank, half as long on the last one, and what lies behind it."""
    make = comm.empty if is_resident else np.empty
    whole = make(2 * count, np.float32)
    whole[:] = 0
    count = count // 2 if comm.rank == comm.size - 1 else count
    whole[:count] = comm.rank + 1
    return whole[:count], whole[count:]


async def left(comm: Communicator, made: Communicator) -> None:
    """It is out of step: leaving by an exception waits for nobody."""
    await comm.barrier()
    with pytest.raises(ZeroDivisionError):
        async with made:
            raise ZeroDivisionError


@pytest.mark.parametrize("count", [COUNT, 2 * COUNT, 4 * COUNT], ids=["requests", "both", "programs"])
@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("is_resident", [False, True], ids=["private", "resident"])
@pytest.mark.parametrize("way", [SHARED, pytest.param(CHANGING, marks=pytest.mark.ranks(2))], ids=str)
async def test_all_ranks_hear_of_it_and_stay_in_step(
    comm: Communicator, way: Way, op: str, is_resident: bool, count: int
) -> None:
    skip_without_reach(comm)
    async with forced(comm, way) as made:
        for _ in range(3):
            x, behind = arrays(made, is_resident, count)
            short, long = made.size - 1, count * 4
            with pytest.raises(mpdist.SizeMismatch, match=rf"{op} .*rank 0: {long}.*rank {short}: {long // 2}\)"):
                await CALLS[op](made, x)
            assert (x == made.rank + 1).all()
            assert not behind.any()
            assert (await made.all_reduce(np.ones(COUNT)) == made.size).all()


async def test_all_ranks_hear_of_small_arrays_and_stay_in_step(comm: Communicator) -> None:
    """What an earlier collective left in a slot is not taken for the rest of a shorter array."""
    async with forced(comm, SHARED) as made:
        for _ in range(3):
            await made.all_reduce(np.full(400, 1000.0))
        short = made.size - 1
        for _ in range(3):
            x = np.ones(300 if made.rank == short else 400)
            with pytest.raises(mpdist.SizeMismatch, match=rf"all_reduce on .*rank 0: 3200.*rank {short}: 2400\)"):
                await made.all_reduce(x)
            assert (x == 1).all()
        works = [made.all_reduce(np.ones(300 if made.rank == short and number == 1 else 400)) for number in range(4)]
        for number, work in enumerate(works):
            if number == 1:
                with pytest.raises(mpdist.SizeMismatch):
                    await work
            else:
                assert (await work == made.size).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", [SHARED, CHANGING], ids=str)
async def test_ranks_whose_types_take_different_ways_hear_of_it(comm: Communicator, way: Way) -> None:
    """As many bytes, but of 16-bit numbers on one rank, which two members never move through slots."""
    skip_without_reach(comm)
    async with forced(comm, way) as made:
        for number in range(6):
            is_half = made.rank == number % 2
            x = np.ones(2 * COUNT, np.float16) if is_half else np.ones(COUNT, np.float32)
            with pytest.raises(mpdist.CollectiveMismatch, match="all_reduce of 16-bit numbers"):
                await made.all_reduce(x)
            assert (await made.all_reduce(np.ones(COUNT)) == made.size).all()


@pytest.mark.parametrize("count", [1000, 16_000, 100_000, COUNT * 4])
@pytest.mark.parametrize(("call", "differs"), [*((op, "type") for op in CALLS), *((op, "op") for op in REDUCING)])
@pytest.mark.parametrize("is_resident", [False, True], ids=["private", "resident"])
async def test_all_ranks_hear_of_other_types_and_ops_and_stay_in_step(
    comm: Communicator, is_resident: bool, call: str, differs: str, count: int
) -> None:
    """Of as many bytes."""
    count -= count % comm.size
    async with forced(comm, SHARED) as made:
        make = made.empty if is_resident else np.empty
        for number in range(3):
            is_other = made.rank == number % made.size
            x = make(count, np.int32 if is_other and differs == "type" else np.float32)
            x[:] = made.rank
            named = "(sum of )?int32" if differs == "type" else "max of float32"
            with pytest.raises(mpdist.CollectiveMismatch, match=f"rank {number % made.size}: {named}"):
                await (REDUCING[call](made, x, "max") if is_other and differs == "op" else CALLS[call](made, x))
            assert (x == made.rank).all()
            assert (await made.all_reduce(np.ones(count)) == made.size).all()


@pytest.mark.parametrize("count", [1000, 100_000])
async def test_ranks_whose_ops_take_different_ways_hear_of_it(comm: Communicator, count: int) -> None:
    """As many bytes: premul_sum is a program, which reads what a request does not tell, and would write there."""
    skip_without_reach(comm)
    async with forced(comm, SHARED) as made:
        kept = [np.full(count, 7.0, np.float32) for _ in range(4)]
        for x in kept:
            await made.broadcast(x, 0)
        for number in range(4):
            op = "sum" if made.rank == number % made.size else mpdist.premul_sum(3.0)
            with pytest.raises(mpdist.CollectiveMismatch, match="ops or element types differ"):
                await made.all_reduce(np.ones(count, np.float32), op)
            assert (await made.all_reduce(np.ones(count, np.float32)) == made.size).all()
        assert all((x == 7).all() for x in kept)


@pytest.mark.parametrize("before", [3, 4])
async def test_a_rank_whose_array_is_small_enough_for_another_way(comm: Communicator, before: int) -> None:
    """It takes the algorithm for small arrays, which has one round like that for large ones."""
    skip_without_reach(comm)
    async with forced(comm, SHARED) as made:
        for number in range(before):
            await made.all_reduce(np.ones(COUNT + number))
        for number in range(3):
            is_small = made.rank == made.size - 1
            x = np.ones(20 + number if is_small else COUNT + number)
            with pytest.raises(mpdist.SizeMismatch, match=rf"rank 0: {8 * COUNT + 8 * number}, .*{160 + 8 * number}\)"):
                await made.all_reduce(x)
            assert (x == 1).all()
            assert (await made.all_reduce(np.ones(COUNT)) == made.size).all()


@pytest.mark.parametrize("before", [3, 4])
async def test_a_rank_whose_array_is_so_small_that_it_has_one_round(comm: Communicator, before: int) -> None:
    """The others have several, so the ranks are out of step: nobody may use the communicator again."""
    with replaced(comm, SLOTS):
        made = await comm.dup()
        for number in range(before):
            await made.all_reduce(np.ones(COUNT + number))
        x = np.ones(20 if made.rank == made.size - 1 else COUNT)
        works = [made.all_reduce(x)]
        if made.rank == made.size - 1:
            works.append(made.all_reduce(x))  # it is under way when the first fails
        for work in works:
            with pytest.raises(mpdist.SizeMismatch, match=f"rank 0: {8 * COUNT}, .*: 160\\)"):
                await work
        assert (x == 1).all()
        with pytest.raises(mpdist.ClosedError, match="out of step"):
            made.all_reduce(x)
        await left(comm, made)


async def test_ranks_that_call_different_operations_hear_of_it(comm: Communicator) -> None:
    skip_without_reach(comm)
    async with forced(comm, SHARED) as made:
        for _ in range(3):
            x = np.ones(COUNT)
            with pytest.raises(mpdist.CollectiveMismatch, match=r"rank 0: all_reduce, rank 1: broadcast") as caught:
                await (made.broadcast(x, 0) if made.rank else made.all_reduce(x))
            assert caught.value.calls == {rank: "broadcast" if rank else "all_reduce" for rank in range(made.size)}
            assert (x == 1).all()
            assert (await made.all_reduce(x) == made.size).all()


async def test_through_slots_all_hear_of_it_where_there_is_a_root(comm: Communicator) -> None:
    with replaced(comm, SLOTS):
        made = await comm.dup()
        x, behind = arrays(made, False, COUNT)
        with pytest.raises(mpdist.SizeMismatch, match=r"gather .*rank 0: 840000, .*rank \d: 420000"):
            await made.gather(x, 0)
        with pytest.raises(mpdist.ClosedError, match="out of step"):
            made.barrier()
        assert not behind.any()
        await left(comm, made)


@pytest.mark.parametrize("op", ["broadcast", "gather"])
@pytest.mark.parametrize("is_resident", [False, True], ids=["private", "resident"])
async def test_through_slots_those_that_wait_for_readers_hear_of_it(
    comm: Communicator, op: str, is_resident: bool
) -> None:
    """So many rounds that the root can't be done before all have come; who has read all of it may be."""
    with replaced(comm, SLOTS):
        made = await comm.dup()
        x = (comm.empty if is_resident else np.empty)(8 * COUNT, np.float32)
        short = made.size - 1
        mine = x[: len(x) // 2] if made.rank == short else x
        if op == "broadcast" and made.rank not in (0, short):
            with contextlib.suppress(mpdist.SizeMismatch):
                await CALLS[op](made, mine)
        else:
            with pytest.raises(mpdist.SizeMismatch, match=rf"{op} on .*rank {short}: {x.nbytes // 2}"):
                await CALLS[op](made, mine)
            with pytest.raises(mpdist.ClosedError, match="out of step"):
                made.barrier()
        await left(comm, made)


ROOTED: dict[str, Callable[[Communicator, Any, int], mpdist.Work[Any]]] = {
    "broadcast": lambda comm, x, root: comm.broadcast(x, root),
    "reduce": lambda comm, x, root: comm.reduce(x, root),
    "gather": lambda comm, x, root: comm.gather(x, root),
}
ROOTS = {"each another": lambda rank: 0 if rank else 1, "the second by itself": lambda rank: int(rank == 1)}


@pytest.mark.parametrize("way", [SHARED, pytest.param(CHANGING, marks=pytest.mark.ranks(2))], ids=str)
@pytest.mark.parametrize("count", [1000, COUNT])
@pytest.mark.parametrize("roots", ROOTS)
@pytest.mark.parametrize("op", ROOTED)
async def test_ranks_that_take_different_roots_hear_of_it(
    comm: Communicator, op: str, roots: str, count: int, way: Way
) -> None:
    skip_without_reach(comm)
    async with forced(comm, way) as made:
        for _ in range(3):
            x = np.full(count, made.rank)
            with pytest.raises(mpdist.CollectiveMismatch, match=rf"{op} on .*differ in src or dst"):
                await ROOTED[op](made, x, ROOTS[roots](made.rank))
            assert (x == made.rank).all()
            assert (await made.all_reduce(np.ones(count)) == made.size).all()


@pytest.mark.parametrize("roots", ROOTS)
@pytest.mark.parametrize("op", ROOTED)
async def test_through_slots_ranks_that_take_different_roots_hear_of_it(
    comm: Communicator, op: str, roots: str
) -> None:
    with replaced(comm, SLOTS):
        made = await comm.dup()
        x = np.full(2 * COUNT, made.rank)
        with pytest.raises(mpdist.CollectiveMismatch, match=rf"{op} on .*differ in src or dst"):
            await ROOTED[op](made, x, ROOTS[roots](made.rank))
        assert (x == made.rank).all()
        with pytest.raises(mpdist.ClosedError, match="out of step"):
            made.barrier()
        await left(comm, made)
