"""The bits of results: equal on every rank, and with `deterministic` equal by every algorithm."""

from __future__ import annotations

import itertools
from functools import lru_cache, reduce
from typing import Any

import numpy as np
import pytest
from algorithms.forcing import ALONE, CHANGING, CHOSEN, NATIVE, PAIRS, PAIRS_SLOTS, SHARED, SLOTS, TRIPLES, Way, forced
from comm.arrays import torch_library
from comm.reference import rounded

import mpdist
from mpdist import Communicator

pytestmark = [pytest.mark.ranks(1, 2, 4), pytest.mark.either_mpi, pytest.mark.limit(120)]

COUNTS = (1, 13, 1000, 16_411, 200_001)
TYPES = ("float16", "bfloat16", "float32", "float64", "complex64")


@lru_cache(maxsize=64)
def random(count: int, dtype: str, rank: int) -> np.ndarray[Any, Any]:
    """Numbers whose sum depends on the order; not to be written."""
    generator = np.random.default_rng([count, rank])
    values = generator.standard_normal(count) * 10.0 ** generator.integers(-2, 3, count)
    is_complex = dtype == "complex64"
    numbers = (values + 1j * generator.standard_normal(count)).astype(dtype) if is_complex else rounded(values, dtype)
    numbers.flags.writeable = False
    return numbers


def in_rank_order(arrays: list[np.ndarray[Any, Any]], dtype: str, how: str) -> np.ndarray[Any, Any]:
    """NumPy's fold: 16-bit types in float32, rounded at the end."""
    wide = [array.astype(np.float32) if dtype in ("float16", "bfloat16") else array for array in arrays]
    if how == "premul_sum":
        wide = [array * array.dtype.type(rank + 0.7) for rank, array in enumerate(wide)]
    total = reduce(np.add, wide)
    if how == "avg":
        parts = total.view(total.real.dtype)
        total = (parts / parts.dtype.type(len(arrays))).view(total.dtype)
    return rounded(total, dtype)


def op_of(how: str, rank: int) -> Any:
    return mpdist.premul_sum(rank + 0.7) if how == "premul_sum" else how


class Library:
    """Arrays of a type: of NumPy, and of torch for bfloat16."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self._torch = torch_library() if dtype == "bfloat16" else None

    def make(self, values: np.ndarray[Any, Any]) -> Any:
        return values.copy() if self._torch is None else self._torch.make(values, self.dtype)

    def read(self, x: Any) -> np.ndarray[Any, Any]:
        return x if self._torch is None else self._torch.read(x)


def assert_same_bits(x: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], case: object) -> None:
    assert x.dtype == wanted.dtype
    bits, wanted_bits = x.view(np.uint8), wanted.view(np.uint8)
    if not np.array_equal(bits, wanted_bits):  # in a tenth of the time
        np.testing.assert_array_equal(bits, wanted_bits, err_msg=f"in case {case}")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("how", ["sum", "avg", "premul_sum"])
async def test_deterministic_folds_in_rank_order_by_every_algorithm(comm: Communicator, dtype: str, how: str) -> None:
    if dtype == "bfloat16" and torch_library() is None:
        pytest.skip("torch is not installed")
    library = Library(dtype)
    for way in (NATIVE, SHARED, CHANGING, SLOTS, PAIRS, TRIPLES, ALONE):
        async with forced(comm, way) as made:
            for count in COUNTS:
                case = f"{way} {dtype} {how} x {count}"
                inputs = [random(count, dtype, rank) for rank in range(comm.size)]
                wanted = in_rank_order(inputs, dtype, how)
                op = op_of(how, comm.rank)
                x = library.make(inputs[comm.rank])
                await made.all_reduce(x, op, deterministic=True)
                assert_same_bits(library.read(x), wanted, f"all_reduce {case}")
                x, out = library.make(inputs[comm.rank]), library.make(np.zeros_like(wanted))
                await made.all_reduce(x, op, out=out, deterministic=True)
                assert_same_bits(library.read(out), wanted, f"all_reduce into out {case}")
                assert_same_bits(library.read(x), inputs[comm.rank], f"input {case}")
                result = await made.reduce(x, comm.size - 1, op, deterministic=True)
                if result is not None:
                    assert_same_bits(library.read(result), wanted, f"reduce {case}")
                many = library.make(np.concatenate([np.roll(inputs[comm.rank], rank) for rank in range(comm.size)]))
                block = await made.reduce_scatter(many, op, deterministic=True)
                assert_same_bits(library.read(block), np.roll(wanted, comm.rank), f"reduce_scatter {case}")


async def test_deterministic_folds_in_rank_order_where_no_memory_is_left_for_slots(comm: Communicator) -> None:
    async with forced(comm, SHARED) as made:
        made._channel.has_met = True  # and has no team
        for count in COUNTS:
            inputs = [random(count, "float32", rank) for rank in range(comm.size)]
            wanted = in_rank_order(inputs, "float32", "sum")
            x = inputs[comm.rank].copy()
            await made.all_reduce(x, deterministic=True)
            assert_same_bits(x, wanted, f"all_reduce x {count}")
            result = await made.reduce(inputs[comm.rank], comm.size - 1, deterministic=True)
            if result is not None:
                assert_same_bits(result, wanted, f"reduce x {count}")
            many = np.tile(inputs[comm.rank], comm.size)
            assert_same_bits(await made.reduce_scatter(many, deterministic=True), wanted, f"reduce_scatter x {count}")


@pytest.mark.parametrize("way", [NATIVE, SHARED, CHANGING, SLOTS, PAIRS, PAIRS_SLOTS, TRIPLES, ALONE], ids=str)
async def test_every_rank_gets_the_same_bits(comm: Communicator, way: Way) -> None:
    """Whatever the order is; also where some ranks' arrays are resident and others' not."""
    async with forced(comm, way) as made:
        for count in COUNTS:
            for dtype in ("float16", "float32", "float64"):
                for op in ("sum", "avg", "prod"):
                    x = random(count, dtype, comm.rank).copy()
                    if comm.rank % 2 and way is not CHANGING:
                        resident = comm.empty(count, dtype)
                        resident[:] = x
                        x = resident
                    await made.all_reduce(x, op)
                    rows = await comm.all_gather(x.view(np.uint8))
                    assert (rows == rows[0]).all(), f"{op} {dtype} x {count}"


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
@pytest.mark.parametrize("is_deterministic", [False, True], ids=["any order", "deterministic"])
async def test_overflow_is_no_error_on_the_rank_where_it_happens(
    comm: Communicator, dtype: str, is_deterministic: bool
) -> None:
    """As everywhere else in a reduction, whatever NumPy is told to do of it: the others would wait."""
    for way in (NATIVE, SHARED, CHANGING, SLOTS, PAIRS, ALONE):
        async with forced(comm, way) as made:
            for factor, value in ((2.0, np.finfo(dtype).max), (1e300, 1)):
                x = np.full(1000, value if comm.rank == comm.size - 1 else 1, dtype)
                with np.errstate(all="raise"):
                    op = mpdist.premul_sum(factor if comm.rank == comm.size - 1 else 1.0)
                    await made.all_reduce(x, op, deterministic=is_deterministic)
                assert np.isinf(x.real).all(), f"{way} {dtype}"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("op", ["max", "min"])
async def test_nan_comes_out_of_every_comparison_with_the_same_bits_on_all_ranks(
    comm: Communicator, dtype: str, op: str
) -> None:
    """As of np.maximum and np.minimum, by every algorithm: MPI's own calls promise nothing."""
    if dtype == "bfloat16" and torch_library() is None:
        pytest.skip("torch is not installed")
    library, ufunc = Library(dtype), getattr(np, f"{op}imum")
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -2.0], np.float32)
    for way in (CHOSEN, NATIVE, SHARED, CHANGING, SLOTS, PAIRS, PAIRS_SLOTS, TRIPLES, ALONE):
        async with forced(comm, way) as made:
            for count in (1, 130, 70_001):
                case = f"{way} {dtype} {op} x {count}"
                generator = np.random.default_rng(count)
                inputs = [rounded(generator.choice(special, count), dtype) for _ in range(comm.size)]
                prefixes = list(itertools.accumulate(inputs, ufunc))
                mine, last = inputs[comm.rank], prefixes[-1]

                x = library.make(mine)
                await made.all_reduce(x, op)
                np.testing.assert_array_equal(library.read(x), last, err_msg=f"all_reduce {case}")
                rows = await comm.all_gather(library.read(x).view(np.uint8))
                assert (rows == rows[0]).all(), f"all_reduce {case}"
                result = await made.reduce(library.make(mine), 0, op)
                if result is not None:
                    np.testing.assert_array_equal(library.read(result), last, err_msg=f"reduce {case}")
                block = await made.reduce_scatter(library.make(np.tile(mine, comm.size)), op)
                np.testing.assert_array_equal(library.read(block), last, err_msg=f"reduce_scatter {case}")
                result = await made.scan(library.make(mine), op)
                np.testing.assert_array_equal(library.read(result), prefixes[comm.rank], err_msg=f"scan {case}")
                result = await made.exscan(library.make(mine), op)
                if result is not None:
                    np.testing.assert_array_equal(library.read(result), prefixes[comm.rank - 1], err_msg=case)
