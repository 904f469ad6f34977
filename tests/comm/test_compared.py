"""Calls of a node's ranks that differ, where MPI compares nothing: the rank that comes later hears of it at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from algorithms.forcing import NATIVE, PAIRS, forced
from memory.simulated import Simulated

import mpdist
from mpdist import Communicator
from mpdist.algorithms.choose import Thresholds

pytestmark = pytest.mark.ranks(2, 3, 4)

Call = Callable[[Communicator, Any], mpdist.Work[Any]]

CALLS: dict[str, Call] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "reduce": lambda comm, x: comm.reduce(x, 0),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "scan": lambda comm, x: comm.scan(x),
    "exscan": lambda comm, x: comm.exscan(x),
    "broadcast": lambda comm, x: comm.broadcast(x, 0),
    "gather": lambda comm, x: comm.gather(x, 0),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
}


async def differing(comm: Communicator, usual: Call, other: Call, match: str) -> None:
    """Let the last rank call `other` after all have called `usual`, and then what the others wait for."""
    last = comm.size - 1
    if comm.rank != last:
        work = usual(comm, np.ones(12 * comm.size, np.float32))
        await comm.send(np.ones(1), last, tag=7)
        await work
        return
    for rank in range(last):
        await comm.recv(src=rank, tag=7)
    before = comm._channel.sequence
    with pytest.raises(mpdist.CollectiveMismatch, match=match) as raised:
        other(comm, np.ones(12 * comm.size, np.float32))
    assert sorted(raised.value.calls)[-1] == last
    assert comm._channel.sequence == before
    await usual(comm, np.ones(12 * comm.size, np.float32))


@pytest.mark.parametrize("op", CALLS)
async def test_another_size(comm: Communicator, op: str) -> None:
    call, count = CALLS[op], 12 * comm.size
    async with forced(comm, NATIVE) as made:
        for _ in range(3):
            await differing(
                made,
                call,
                lambda comm, x: call(comm, np.ones(24 * comm.size, np.float32)),
                rf"this rank calls {op} float32 x {2 * count}.*has called {op} float32 x {count}.*waits for the same",
            )
        assert (await made.all_reduce(np.ones(3)) == made.size).all()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("op", CALLS)
async def test_another_size_where_other_nodes_are_met_first(comm: Communicator, op: str) -> None:
    call = CALLS[op]
    async with forced(comm, PAIRS) as made:
        await differing(
            made,
            call,
            lambda comm, x: call(comm, np.ones(24 * comm.size, np.float32)),
            rf"this rank calls {op} float32 x 96.*has called {op} float32 x 48.*waits for the same",
        )
        assert (await made.all_reduce(np.ones(3)) == made.size).all()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("op", ["broadcast", "reduce"])
async def test_another_root_where_other_nodes_are_met_first(comm: Communicator, op: str) -> None:
    async with forced(comm, PAIRS) as made:
        await differing(made, CALLS[op], lambda comm, x: getattr(comm, op)(x, 1), "(to|from) 1,.*(to|from) 0")


@pytest.mark.any_mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("op", CALLS)
async def test_another_size_on_a_device(comm: Communicator, fake_gpu: Simulated, op: str) -> None:
    call = CALLS[op]

    def usual(comm: Communicator, x: Any) -> mpdist.Work[Any]:
        return call(comm, fake_gpu.array(x))

    def twice(comm: Communicator, x: Any) -> mpdist.Work[Any]:
        return usual(comm, np.concatenate([x, x]))

    async with forced(comm, NATIVE) as made:
        for _ in range(3):
            await differing(made, usual, twice, f"this rank calls {op} float32 x {24 * comm.size}")
        assert (await made.all_reduce(np.ones(3)) == made.size).all()


@pytest.mark.parametrize("op", CALLS)
async def test_another_type_of_as_many_bytes(comm: Communicator, op: str) -> None:
    call = CALLS[op]
    async with forced(comm, NATIVE) as made:
        await differing(made, call, lambda comm, x: call(comm, x.view(np.int32)), "int32 x .*float32 x ")


async def test_another_op_root_or_operation(comm: Communicator) -> None:
    async with forced(comm, NATIVE) as made:
        await differing(made, CALLS["all_reduce"], lambda comm, x: comm.all_reduce(x, "prod"), " prod,.* sum")
        await differing(made, CALLS["broadcast"], lambda comm, x: comm.broadcast(x, 1), "from 1,.*from 0")
        await differing(made, CALLS["reduce"], lambda comm, x: comm.reduce(x, 1), "to 1,.*to 0")
        await differing(made, CALLS["all_gather"], lambda comm, x: comm.barrier(), "barrier,.*all_gather")
        await differing(made, lambda comm, x: comm.barrier(), lambda comm, x: comm.all_gather_object(1), "object")


def scattered(comm: Communicator, x: Any, src: int) -> mpdist.Work[Any]:
    return comm.scatter(x if comm.rank == src else None, src)


def handed_out(comm: Communicator, src: int) -> mpdist.Work[Any]:
    return comm.scatter_object([1] * comm.size if comm.rank == src else None, src)


FROM_OR_TO: dict[str, Callable[[Communicator, Any, int], mpdist.Work[Any]]] = {
    "scatter": scattered,
    "gather": lambda comm, x, root: comm.gather([x], root),
    "broadcast_object": lambda comm, x, root: comm.broadcast_object(1, root),
    "gather_object": lambda comm, x, root: comm.gather_object(1, root),
    "scatter_object": lambda comm, x, root: handed_out(comm, root),
}


@pytest.mark.parametrize("op", FROM_OR_TO)
async def test_another_root_where_headers_go_before(comm: Communicator, op: str) -> None:
    call = FROM_OR_TO[op]
    for root in (0, comm.size - 1):

        def usual(comm: Communicator, x: Any, root: int = root) -> mpdist.Work[Any]:
            return call(comm, x, root)

        def other(comm: Communicator, x: Any, root: int = root) -> mpdist.Work[Any]:
            return call(comm, x, comm.size - 1 - root)

        await differing(comm, usual, other, rf"{op} .*(from|to) \d.* has called {op} .*(from|to) {root}")


OF_SEVERAL_STEPS: dict[str, Call] = {
    "dup": lambda comm, x: comm.dup(),
    "all_gather_object": lambda comm, x: comm.all_gather_object(1),
    "all_to_all_object": lambda comm, x: comm.all_to_all_object([1] * comm.size),
    "all_gather list": lambda comm, x: comm.all_gather([x]),
    "all_to_all list": lambda comm, x: comm.all_to_all([x] * comm.size),
}


@pytest.mark.filterwarnings("ignore:communicator .* was never closed:ResourceWarning")
@pytest.mark.parametrize("op", OF_SEVERAL_STEPS)
async def test_what_compares_nothing_in_its_steps(comm: Communicator, op: str) -> None:
    def other(comm: Communicator, x: Any) -> mpdist.Work[Any]:
        return comm.split(0)

    made = await comm.dup()
    async with made:
        await differing(made, OF_SEVERAL_STEPS[op], other, f"this rank calls split, rank .* has called {op}")


async def test_one_that_is_to_be_in_order_alone(comm: Communicator) -> None:
    def other(comm: Communicator, x: Any) -> mpdist.Work[Any]:
        return comm.all_reduce(x, deterministic=True)

    async with forced(comm, NATIVE) as made:
        await differing(made, CALLS["all_reduce"], other, r"sum in order,.*has called all_reduce float32 x \d+ sum\.")


async def test_a_large_array_where_the_others_have_a_small_one(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The large one goes another way than MPI's, where it would wait for ever."""
    monkeypatch.setattr(comm._channel.engine, "thresholds", Thresholds({"all_reduce": 8192}))
    made = await comm.dup()
    async with made:
        await differing(
            made,
            CALLS["all_reduce"],
            lambda comm, x: comm.all_reduce(np.ones(1 << 20, np.float32)),
            "all_reduce float32 x 1048576 sum",
        )


async def test_many_that_agree_on_several_communicators_in_flight(comm: Communicator) -> None:
    """More than are remembered, of many texts, with ranks that run ahead."""
    async with await comm.dup() as first, await comm.dup() as second:
        for turn in range(6):
            works = [
                each.all_reduce(np.full(1 + (number + turn) % 70, comm.rank, np.float32))
                for number in range(150)
                for each in (first, second)
            ]
            for number in range(400):
                first.broadcast(np.ones(1 + number % 3), src=0)
            total = comm.size * (comm.size - 1) / 2
            assert all((x == total).all() for x in await asyncio.gather(*works))
            await second.barrier()
            await first.barrier()


class Adding:
    """It has no name, and says of itself what is this rank's own."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, a: Any, b: Any) -> Any:
        return a + b

    def __repr__(self) -> str:
        return f"<Adding of rank {self.rank}>"


async def test_functions_as_op_and_colors_may_differ_in_what_says_nothing(comm: Communicator) -> None:
    """Two functions of one name; each rank has its own color."""
    added = await comm.all_reduce(np.ones(3), (lambda a, b: a + b) if comm.rank else (lambda a, b: b + a))
    assert (added == comm.size).all()
    for op in (Adding(comm.rank), partial(np.add, dtype=np.float64), partial(Adding(comm.rank))):
        for deterministic in (False, True):
            assert (await comm.all_reduce(np.ones(3), op, deterministic=deterministic) == comm.size).all()
        assert (await comm.reduce_scatter(np.ones(comm.size), op) == comm.size).all()
        assert (await comm.scan(np.ones(2), op) == comm.rank + 1).all()
    async with comm.split(color=comm.rank % 2) as half:
        assert (await half.all_reduce(np.ones(1)))[0] == half.size
