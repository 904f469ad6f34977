"""Every collective, wherever its arrays lie, by every algorithm: against a reference, over types x sizes x roots."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import lru_cache
from itertools import count as counter
from typing import Any

import numpy as np
import pytest
from algorithms.forcing import (
    ALONE,
    ALONE_CHOSEN,
    CHANGING,
    CHOSEN,
    PAIRS,
    PAIRS_SLOTS,
    SHARED,
    SLOTS,
    TRIPLES,
    Way,
    forced,
)
from comm import arrays
from comm.arrays import NUMPY_TYPES, Values, assert_values, kind_of, torch_library
from comm.reference import HALVES, ops_for, reduced, rounded
from comm.residency import RESIDENCIES, Placed, place

import mpdist
from mpdist import Communicator
from mpdist.algorithms.shared import spread
from mpdist.algorithms.shared.team import LARGE_SLOT_BYTES, ROUND_BYTES, SLOT_BYTES
from mpdist.memory.arena import Block

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.either_mpi, pytest.mark.limit(180)]

# Bytes around the slots' size and beyond what they hold together.
LARGE_BYTES = (
    ROUND_BYTES - 8,
    ROUND_BYTES,
    ROUND_BYTES + 24,
    SLOT_BYTES + 40,
    3 * ROUND_BYTES + 1000,
    2 * SLOT_BYTES + 24,
)
COUNTS = (0, 1, 7, 999)

PERIOD = 4099

WAYS = (
    SHARED,
    SLOTS,
    pytest.param(CHANGING, marks=pytest.mark.ranks(2)),
    pytest.param(PAIRS, marks=pytest.mark.ranks(3, 4)),
    pytest.param(PAIRS_SLOTS, marks=pytest.mark.ranks(4)),
    pytest.param(TRIPLES, marks=pytest.mark.ranks(4)),
    pytest.param(ALONE, marks=pytest.mark.ranks(3, 4)),
)


@lru_cache(maxsize=16)
def numbers(count: int, dtype: str, seed: int) -> Values:
    """As of `arrays`, of a prime period: so nothing that is moved as a piece looks the same elsewhere."""
    values = np.resize(arrays.numbers(min(count, PERIOD), dtype, seed), count)
    values.flags.writeable = False
    return values


def everyone(comm: Communicator, count: int, dtype: str) -> list[Values]:
    """The inputs of all ranks."""
    return [numbers(count, dtype, rank) for rank in range(comm.size)]


@pytest.fixture(params=WAYS, ids=str)
async def way(request: pytest.FixtureRequest, comm: Communicator) -> AsyncIterator[Communicator]:
    """A communicator on which one algorithm is forced."""
    way: Way = request.param
    async with forced(comm, way) as made:
        yield made


# ---------------------------------------------------------------------- one case of each operation


class Case:
    """One call: what it moves, from and to where, and in which words a failure names it."""

    def __init__(self, comm: Communicator, residency: str, count: int, dtype: str, op: str, root: int) -> None:
        self.comm = comm
        self.residency = residency
        self.count = count
        self.dtype = dtype
        self.op = op
        self.root = root

    def __repr__(self) -> str:
        return f"{self.dtype} x {self.count}, {self.op}, root {self.root}, {self.residency}"

    def x(self, count: int) -> Placed:
        return place(self.comm, self.residency, 0, numbers(count, self.dtype, self.comm.rank), self.dtype)

    def out(self, count: int) -> Placed:
        return place(self.comm, self.residency, 1, numbers(count, self.dtype, 77), self.dtype)

    def reduced(self, count: int) -> Values:
        return reduced(self.op, everyone(self.comm, count, self.dtype), self.dtype)

    def mine(self, values: Values, count: int) -> Values:
        return values[self.comm.rank * count : (self.comm.rank + 1) * count]

    def check(self, x: Placed, out: Placed | None, wanted: Any) -> None:
        """The result is right, the input and what lies around both as before."""
        if out is not None:
            assert_values(out.array, wanted, self)
            out.check_guards(self)
            assert_values(x.array, numbers(x.array.size, self.dtype, self.comm.rank), f"{self}, input")
        else:
            assert_values(x.array, wanted, self)
        x.check_guards(self)


async def all_reduce(case: Case) -> None:
    x = case.x(case.count)
    assert await case.comm.all_reduce(x.array, case.op) is x.array
    case.check(x, None, case.reduced(case.count))


async def all_reduce_into(case: Case) -> None:
    x, out = case.x(case.count), case.out(case.count)
    assert await case.comm.all_reduce(x.array, case.op, out=out.array) is out.array
    case.check(x, out, case.reduced(case.count))


async def reduce(case: Case) -> None:
    x, out = case.x(case.count), case.out(case.count)
    is_root = case.comm.rank == case.root
    result = await case.comm.reduce(x.array, case.root, case.op, out=out.array if is_root else None)
    assert result is (out.array if is_root else None)
    case.check(x, out, case.reduced(case.count) if is_root else numbers(case.count, case.dtype, 77))


async def reduce_scatter(case: Case) -> None:
    count = case.count // case.comm.size
    x, out = case.x(count * case.comm.size), case.out(count)
    await case.comm.reduce_scatter(x.array, case.op, out=out.array)
    case.check(x, out, case.mine(case.reduced(count * case.comm.size), count))


async def broadcast(case: Case) -> None:
    x = case.x(case.count)
    assert await case.comm.broadcast(x.array, case.root) is x.array
    case.check(x, None, numbers(case.count, case.dtype, case.root))


async def gather(case: Case) -> None:
    x, out = case.x(case.count), case.out(case.count * case.comm.size)
    is_root = case.comm.rank == case.root
    await case.comm.gather(x.array, case.root, out=out.array if is_root else None)
    untouched = numbers(case.count * case.comm.size, case.dtype, 77)
    case.check(x, out, everyone(case.comm, case.count, case.dtype) if is_root else untouched)


async def all_gather(case: Case) -> None:
    x, out = case.x(case.count), case.out(case.count * case.comm.size)
    await case.comm.all_gather(x.array, out=out.array)
    case.check(x, out, everyone(case.comm, case.count, case.dtype))


async def scatter(case: Case) -> None:
    count = case.count // case.comm.size
    x, out = case.x(count * case.comm.size), case.out(count)
    await case.comm.scatter(x.array if case.comm.rank == case.root else None, case.root, out=out.array)
    case.check(x, out, case.mine(numbers(count * case.comm.size, case.dtype, case.root), count))


async def all_to_all(case: Case) -> None:
    count = case.count // case.comm.size
    x, out = case.x(count * case.comm.size), case.out(count * case.comm.size)
    await case.comm.all_to_all(x.array, out=out.array)
    blocks = [case.mine(each, count) for each in everyone(case.comm, count * case.comm.size, case.dtype)]
    case.check(x, out, blocks)


Call = Callable[[Case], Awaitable[None]]
REDUCING: tuple[Call, ...] = (all_reduce, all_reduce_into, reduce, reduce_scatter)
MOVING: tuple[Call, ...] = (broadcast, gather, all_gather, scatter, all_to_all)


def cases(comm: Communicator, call: Call) -> Iterator[Case]:
    """Every place of the arrays; types, operations and roots take turns."""
    turn = counter(len(call.__name__))
    for residency in RESIDENCIES:
        for count in COUNTS:
            yield case_of(comm, residency, count, next(turn))


def large_cases(comm: Communicator, call: Call) -> Iterator[Case]:
    """The same with sizes in bytes, of which each place takes two."""
    turn = counter(len(call.__name__))
    for number, residency in enumerate(RESIDENCIES):
        for size in (LARGE_BYTES[number % 5], LARGE_BYTES[(number + 3) % 5]):
            place = next(turn)
            itemsize = np.dtype(NUMPY_TYPES[place % len(NUMPY_TYPES)]).itemsize
            yield case_of(comm, residency, size // itemsize, place)


def case_of(comm: Communicator, residency: str, count: int, turn: int) -> Case:
    dtype = NUMPY_TYPES[turn % len(NUMPY_TYPES)]
    ops = ops_for(dtype)
    return Case(comm, residency, count, dtype, ops[turn // 3 % len(ops)], turn % comm.size)


@pytest.mark.parametrize("call", [*REDUCING, *MOVING], ids=lambda call: call.__name__)
async def test_small_arrays(way: Communicator, call: Call) -> None:
    for case in cases(way, call):
        await call(case)


@pytest.mark.parametrize("call", [*REDUCING, *MOVING], ids=lambda call: call.__name__)
async def test_arrays_larger_than_the_slots(way: Communicator, call: Call) -> None:
    for case in large_cases(way, call):
        await call(case)


@pytest.mark.parametrize("call", [*REDUCING, *MOVING], ids=lambda call: call.__name__)
@pytest.mark.parametrize("chosen", [CHOSEN, ALONE_CHOSEN], ids=str)
async def test_sizes_around_the_thresholds(comm: Communicator, chosen: Way, call: Call) -> None:
    """Small and large ones follow each other on one communicator."""
    async with forced(comm, chosen) as made:
        for nbytes in (8, 20_000, 16 * 1024, 8, 33_000, 32 * 1024, 130_000, 8, 64 * 1024 * comm.size, 24, 800_000, 40):
            await call(Case(made, "mixed", nbytes // 8, "float64", "sum", nbytes % comm.size))


@pytest.mark.parametrize(
    ("dtype", "op", "takes_more"),
    [
        ("float32", "sum", False),
        ("int32", "max", False),
        ("float32", mpdist.premul_sum(2.0), False),
        ("float32", "max", True),
        ("float32", "avg", True),
        ("float16", "sum", True),
    ],
    ids=str,
)
@pytest.mark.parametrize("call", ["all_reduce", "reduce_scatter"])
async def test_what_takes_more_than_mpis_call_goes_through_memory(
    comm: Communicator, call: str, dtype: str, op: mpdist.ReduceOp | str, takes_more: bool
) -> None:
    """From the first byte on, and all where cores are scarce; for premul_sum shared memory has several steps, too."""
    async with forced(comm, CHOSEN) as made:
        await getattr(made, call)(np.ones(100 * made.size, dtype), op)
        is_scarce = made._channel.engine.thresholds.shared[call] == 0  # type: ignore[attr-defined]  # a table
        is_scaled = isinstance(op, mpdist.ReduceOp)
        assert (made._channel.team is not None) is (takes_more or (is_scarce and not is_scaled))


@pytest.mark.parametrize("gain", [0, 100], ids=["slots", "large slots"])
@pytest.mark.parametrize("is_scarce", [False, True], ids=["", "scarce on one"])
@pytest.mark.parametrize("forcing", [CHOSEN, SHARED, SLOTS, CHANGING], ids=str)
async def test_rounds_in_any_place_of_their_slots(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, forcing: Way, is_scarce: bool, gain: float
) -> None:
    """Also where one rank has no memory for larger slots."""
    monkeypatch.setattr(spread, "GAIN", gain)
    monkeypatch.setattr(spread, "CYCLE", 40)
    arena = comm._channel.engine.shared.arena  # type: ignore[union-attr]  # ranks of one node share
    allocate = arena.allocate

    def scarce(nbytes: int) -> Block | None:
        return None if nbytes == 2 * LARGE_SLOT_BYTES else allocate(nbytes)

    if is_scarce and comm.rank == comm.size - 1:
        monkeypatch.setattr(arena, "allocate", scarce)
    async with forced(comm, forcing) as made:
        for turn in range(50):
            nbytes = (16 * 1024, 100_000, 70_008, SLOT_BYTES + 8)[turn % 4]
            call = REDUCING[turn // 4 % len(REDUCING)] if turn % 3 else all_reduce
            await call(Case(made, "private", nbytes // 8, "float64", "sum", turn % comm.size))
        team: Any = made._channel.team
        assert len(team._blocks) == (1 if is_scarce and comm.rank == comm.size - 1 else 2)


@pytest.mark.parametrize("call", REDUCING, ids=lambda call: call.__name__)
async def test_every_operation_on_every_type(way: Communicator, call: Call) -> None:
    turn = counter()
    for dtype in NUMPY_TYPES:
        for op in ops_for(dtype):
            place = next(turn)
            residency = tuple(RESIDENCIES)[place % len(RESIDENCIES)]
            await call(Case(way, residency, (131, 70_001)[place % 5 == 0], dtype, op, place % way.size))


async def test_torch_tensors_on_memory_that_the_node_reads(way: Communicator) -> None:
    library = torch_library()
    if library is None:
        pytest.skip("torch is not installed")
    import torch

    for dtype in ("float32", "bfloat16", "float16", "int64", "bool"):
        for count in (5, 300_007):
            values = numbers(count, dtype, way.rank)
            op = "lor" if dtype == "bool" else "sum"
            storage = {"bfloat16": "uint16"}.get(dtype, dtype)
            x = torch.from_numpy(way.empty(count, storage)).view(getattr(torch, dtype))
            x.copy_(torch.from_numpy(values.copy()))
            out = torch.from_numpy(way.empty(count, storage)).view(getattr(torch, dtype))
            wanted = reduced(op, everyone(way, count, dtype), dtype)
            assert await way.all_reduce(x, op, out=out) is out
            assert_values(library.read(out), wanted, f"all_reduce {dtype} x {count}")
            assert_values(library.read(x), values, f"input of all_reduce {dtype} x {count}")
            rows = await way.all_gather(x)
            assert_values(library.read(rows), everyone(way, count, dtype), f"all_gather {dtype} x {count}")
            assert await way.all_reduce(x[1:], op) is not None
            assert_values(library.read(x), [values[0], *wanted[1:]], f"a part, all_reduce {dtype} x {count}")


@pytest.mark.parametrize("dtype", ["int8", "uint64", "int64", "float16", "float32", "complex64"])
async def test_premul_sum_takes_each_ranks_factor(way: Communicator, dtype: str) -> None:
    """Also factors that a float cannot hold."""
    factors: list[Any] = [(rank + 1) / 2 for rank in range(way.size)]
    if kind_of(dtype) in "iu":
        factors = [3 if dtype == "int8" else 2**53 + rank for rank in range(way.size)]
    if dtype == "uint64":
        factors[0] = 2**63 + 1
    if dtype == "complex64":
        factors = [1 + rank * 1j for rank in range(way.size)]
    exact = dtype if kind_of(dtype) in "iu" else np.complex128
    for count in (1, 9, 200_003):
        inputs = everyone(way, count * way.size, dtype)
        scaled = [np.array(factor, exact) * each.astype(exact) for factor, each in zip(factors, inputs, strict=True)]
        total = np.sum(scaled, axis=0, dtype=exact)
        wanted = rounded(total if dtype == "complex64" else total.real, dtype)
        op = mpdist.premul_sum(factors[way.rank])
        x = inputs[way.rank].copy()
        assert_values(await way.all_reduce(x, op), wanted, f"all_reduce {dtype} x {count}")
        x = inputs[way.rank].copy()
        mine = wanted[way.rank * count : (way.rank + 1) * count]
        assert_values(await way.reduce_scatter(x, op), mine, f"reduce_scatter {dtype} x {count}")
        result = await way.reduce(x, way.size - 1, op)
        assert_values(x, inputs[way.rank], f"input {dtype} x {count}")
        if result is not None:
            assert_values(result, wanted, f"reduce {dtype} x {count}")


@pytest.mark.parametrize("dtype", HALVES[:1])
async def test_sums_of_half_precision_are_rounded_once(way: Communicator, dtype: str) -> None:
    """The error against float64 is at most half of the last place of the result."""
    for count in (1000, 400_001):
        generator = np.random.default_rng(count)
        inputs = [generator.uniform(0.5, 2, count * way.size).astype(dtype) for _ in range(way.size)]
        exact = np.sum([each.astype(np.float64) for each in inputs], axis=0)
        bound = 0.5001 * np.spacing(exact.astype(dtype)).astype(np.float64)
        x = inputs[way.rank].copy()
        await way.all_reduce(x)
        assert (np.abs(x - exact) <= bound).all(), f"all_reduce x {count}"
        mine = slice(way.rank * count, (way.rank + 1) * count)
        block = await way.reduce_scatter(inputs[way.rank])
        assert (np.abs(block - exact[mine]) <= bound[mine]).all(), f"reduce_scatter x {count}"


async def test_the_barrier_holds_until_the_last_has_come(way: Communicator) -> None:
    for number in range(200):
        here = np.full(1, number)
        if number % 50 == 0:
            works = [way.barrier() for _ in range(3)]
            for work in reversed(works):
                await work
        last = number % way.size
        if way.rank == last:
            await way.send(here, (last + 1) % way.size)
        await way.barrier()
        if way.rank == (last + 1) % way.size:  # sent before the barrier, so it is here after it
            message = await way.recv(src=last)
            assert message.data[0] == number


async def test_a_team_of_one_and_groups_of_some(way: Communicator) -> None:
    """Groups take their algorithms from where their own members are."""
    async with way.split(way.rank % 2) as half:
        x = numbers(300_000, "float32", way.rank).copy()
        await half.all_reduce(x, deterministic=True)
        members = range(way.rank % 2, way.size, 2)
        assert_values(x, sum(numbers(300_000, "float32", rank) for rank in members), "halves")
    reverse = list(range(way.size))[::-1]
    async with way.subgroup(reverse) as group:
        rows = await group.all_gather(np.full(100_000, way.rank))
        assert rows[:, 0].tolist() == reverse
        assert (rows == rows[:, :1]).all()
        x = np.full(100_000, way.rank)
        await group.broadcast(x, 0)
        assert (x == way.size - 1).all()
