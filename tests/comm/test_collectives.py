"""Collectives of arrays against a reference, over libraries x types x operations x sizes x roots."""

from __future__ import annotations

import array
import asyncio
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from comm.arrays import (
    NUMPY,
    Library,
    Values,
    assert_values,
    libraries,
    numbers,
    torch_library,
)
from comm.reference import HALVES, ops_for, reduced, rounded

import mpdist
from mpdist import Communicator
from mpdist.transport import arguments, mpi

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.limit(120)]

COUNTS = (0, 1, 7, 1000)
LARGE = 300_001


def reducible() -> Iterator[tuple[Library, str, str, int]]:
    """Library, type, operation and count. Counts and operations take turns where nothing is new but the type."""
    for library in libraries():
        for place, dtype in enumerate(library.dtypes):
            ops = ops_for(dtype)
            for turn, op in enumerate(ops if library.own_results else (ops[place % len(ops)],)):
                for count in (
                    COUNTS if op in ("sum", "lor") and library.name == "numpy" else (COUNTS[(place + turn) % 4],)
                ):
                    yield library, dtype, op, count


def movable(*, sizes: tuple[int, ...] = COUNTS) -> Iterator[tuple[Library, str, int]]:
    """Library, type and count."""
    for library in libraries():
        for place, dtype in enumerate(library.dtypes):
            few = (sizes[place % len(COUNTS)],)
            for count in sizes if dtype in ("uint8", "bfloat16") and library.own_results else few:
                yield library, dtype, count


def everyone(comm: Communicator, count: int, dtype: str) -> list[Values]:
    """The inputs of all ranks."""
    return [numbers(count, dtype, rank) for rank in range(comm.size)]


def own_result(library: Library, result: Any) -> Values:
    """The values of a result that mpdist allocated."""
    return library.read(result) if library.own_results else NUMPY.read(result)


# ---------------------------------------------------------------------- moving


async def test_barrier_holds_until_the_last_rank_has_come(comm: Communicator) -> None:
    for last in range(comm.size):
        if comm.rank == last:
            await asyncio.sleep(0.005)
        came = time.monotonic()
        assert await comm.barrier() is None
        left = time.monotonic()
        latest = await comm.all_reduce(np.array([came]), "max")
        assert left >= latest[0]


async def test_broadcast_copies_from_any_root(comm: Communicator) -> None:
    for library, dtype, count in movable(sizes=(*COUNTS, LARGE)):
        for src in range(comm.size):
            case = f"{library} {dtype} x {count} from {src}"
            x = library.make(numbers(count, dtype, comm.rank), dtype)
            assert await comm.broadcast(x, src) is x
            assert_values(library.read(x), numbers(count, dtype, src), case)


async def test_broadcast_only_reads_the_roots_array(comm: Communicator) -> None:
    x: Any = b"abc" if comm.rank == 0 else bytearray(3)
    await comm.broadcast(x, src=0)
    assert bytes(x) == b"abc"


async def test_gather_stacks_on_any_root(comm: Communicator) -> None:
    for library, dtype, count in movable():
        dst = count % comm.size
        case = f"{library} {dtype} x {count} to {dst}"
        x = library.make(numbers(count, dtype, comm.rank), dtype)
        result = await comm.gather(x, dst)
        assert_values(library.read(x), numbers(count, dtype, comm.rank), case)
        if comm.rank != dst:
            assert result is None
            continue
        assert tuple(result.shape) == (comm.size, count)
        assert_values(own_result(library, result), everyone(comm, count, dtype), case)


async def test_gather_fills_the_given_array(comm: Communicator) -> None:
    for library, dtype, count in movable():
        for dst in range(comm.size):
            x = library.make(numbers(count, dtype, comm.rank), dtype)
            out = library.make(numbers(count * comm.size, dtype, 77), dtype) if comm.rank == dst else None
            result = await comm.gather(x, dst, out=out)
            assert result is out
            if out is not None:
                assert_values(library.read(out), everyone(comm, count, dtype), (library, dtype, count, dst))


async def test_all_gather_stacks_on_all_ranks(comm: Communicator) -> None:
    for library, dtype, count in movable(sizes=(*COUNTS, LARGE)):
        case = f"{library} {dtype} x {count}"
        x = library.make(numbers(count, dtype, comm.rank), dtype)
        result = await comm.all_gather(x)
        assert tuple(result.shape) == (comm.size, count)
        assert_values(own_result(library, result), everyone(comm, count, dtype), case)
        out = library.make(numbers(count * comm.size, dtype, 77), dtype)
        assert await comm.all_gather(x, out=out) is out
        assert_values(library.read(out), everyone(comm, count, dtype), f"{case}, out given")
        assert_values(library.read(x), numbers(count, dtype, comm.rank), f"{case}, input")


async def test_all_gather_adds_an_axis_before_those_of_x(comm: Communicator) -> None:
    result = await comm.all_gather(np.full((2, 3), comm.rank))
    assert result.shape == (comm.size, 2, 3)
    result = await comm.all_gather(np.array(comm.rank))
    assert result.shape == (comm.size,)
    assert result.tolist() == list(range(comm.size))


async def test_scatter_hands_out_rows_from_any_root(comm: Communicator) -> None:
    for library, dtype, count in movable():
        src = count % comm.size
        case = f"{library} {dtype} x {count} from {src}"
        whole = numbers(count * comm.size, dtype, src)
        x = library.make(whole, dtype) if comm.rank == src else None
        wanted = whole[comm.rank * count : (comm.rank + 1) * count]
        if dtype != "bfloat16":
            result = await comm.scatter(x, src)
            assert_values(own_result(library, result) if comm.rank == src else NUMPY.read(result), wanted, case)
        out = library.make(numbers(count, dtype, 77), dtype)
        assert await comm.scatter(x, src, out=out) is out
        assert_values(library.read(out), wanted, f"{case}, out given")
        if x is not None:
            assert_values(library.read(x), whole, f"{case}, input")


async def test_scatter_keeps_the_further_axes(comm: Communicator) -> None:
    x = np.arange(comm.size * 2 * 3).reshape(comm.size * 2, 3) if comm.rank == 0 else None
    block = await comm.scatter(x, 0)
    assert block.shape == (2, 3)
    assert block.tolist() == (np.arange(6).reshape(2, 3) + 6 * comm.rank).tolist()


async def test_all_to_all_transposes_blocks(comm: Communicator) -> None:
    for library, dtype, count in movable(sizes=(*COUNTS, LARGE // 3)):
        case = f"{library} {dtype} x {count}"
        inputs = everyone(comm, count * comm.size, dtype)
        wanted = [each[comm.rank * count : (comm.rank + 1) * count] for each in inputs]
        x = library.make(inputs[comm.rank], dtype)
        assert_values(own_result(library, await comm.all_to_all(x)), wanted, case)
        out = library.make(numbers(count * comm.size, dtype, 77), dtype)
        assert await comm.all_to_all(x, out=out) is out
        assert_values(library.read(out), wanted, f"{case}, out given")
        assert_values(library.read(x), inputs[comm.rank], f"{case}, input")


# ---------------------------------------------------------------------- reducing


async def test_all_reduce_in_place(comm: Communicator) -> None:
    for library, dtype, op, count in reducible():
        x = library.make(numbers(count, dtype, comm.rank), dtype)
        assert await comm.all_reduce(x, op) is x
        assert_values(library.read(x), reduced(op, everyone(comm, count, dtype), dtype), (library, dtype, op, count))


async def test_all_reduce_into_out_only_reads_x(comm: Communicator) -> None:
    for library, dtype, op, count in reducible():
        case = f"{library} {dtype} {op} x {count}"
        x = library.make(numbers(count, dtype, comm.rank), dtype)
        out = library.make(numbers(count, dtype, 77), dtype)
        assert await comm.all_reduce(x, op, out=out) is out
        assert_values(library.read(out), reduced(op, everyone(comm, count, dtype), dtype), case)
        assert_values(library.read(x), numbers(count, dtype, comm.rank), f"{case}, input")


async def test_all_reduce_with_x_as_out_is_in_place(comm: Communicator) -> None:
    for dtype in ("float32", "float16", "int64"):
        x = numbers(9, dtype, comm.rank)
        assert await comm.all_reduce(x, out=x) is x
        assert_values(x, reduced("sum", everyone(comm, 9, dtype), dtype), dtype)


async def test_large_all_reduces(comm: Communicator) -> None:
    for dtype in ("float32", "float64", "float16", "int8"):
        x = numbers(LARGE, dtype, comm.rank)
        await comm.all_reduce(x)
        assert_values(x, reduced("sum", everyone(comm, LARGE, dtype), dtype), dtype)


async def test_reduce_gives_the_root_the_result_and_only_reads_x(comm: Communicator) -> None:
    for library, dtype, op, count in reducible():
        dst = (count + len(op)) % comm.size
        case = f"{library} {dtype} {op} x {count} to {dst}"
        x = library.make(numbers(count, dtype, comm.rank), dtype)
        result = await comm.reduce(x, dst, op)
        assert_values(library.read(x), numbers(count, dtype, comm.rank), f"{case}, input")
        if comm.rank == dst:
            assert_values(own_result(library, result), reduced(op, everyone(comm, count, dtype), dtype), case)
        else:
            assert result is None, case


async def test_reduce_into_out(comm: Communicator) -> None:
    for dst in range(comm.size):
        for dtype in ("float32", "float16", "uint8", "bool"):
            op = "lor" if dtype == "bool" else "sum"
            out = numbers(5, dtype, 77) if comm.rank == dst else None
            assert await comm.reduce(numbers(5, dtype, comm.rank), dst, op, out=out) is out
            if out is not None:
                assert_values(out, reduced(op, everyone(comm, 5, dtype), dtype), (dst, dtype))


async def test_reduce_scatter_keeps_the_own_block(comm: Communicator) -> None:
    for library, dtype, op, count in reducible():
        case = f"{library} {dtype} {op} x {count}"
        x = library.make(numbers(count * comm.size, dtype, comm.rank), dtype)
        wanted = reduced(op, everyone(comm, count * comm.size, dtype), dtype)
        mine = wanted[comm.rank * count : (comm.rank + 1) * count]
        assert_values(own_result(library, await comm.reduce_scatter(x, op)), mine, case)
        out = library.make(numbers(count, dtype, 77), dtype)
        assert await comm.reduce_scatter(x, op, out=out) is out
        assert_values(library.read(out), mine, f"{case}, out given")
        assert_values(library.read(x), numbers(count * comm.size, dtype, comm.rank), f"{case}, input")


async def test_scan_reduces_up_to_the_own_rank(comm: Communicator) -> None:
    for library, dtype, op, count in reducible():
        case = f"{library} {dtype} {op} x {count}"
        x = library.make(numbers(count, dtype, comm.rank), dtype)
        result = await comm.scan(x, op)
        wanted = reduced(op, everyone(comm, count, dtype)[: comm.rank + 1], dtype)
        assert_values(own_result(library, result), wanted, case)
        assert_values(library.read(x), numbers(count, dtype, comm.rank), f"{case}, input")


async def test_exscan_reduces_up_to_the_rank_before(comm: Communicator) -> None:
    for library, dtype, op, count in reducible():
        case = f"{library} {dtype} {op} x {count}"
        x = library.make(numbers(count, dtype, comm.rank), dtype)
        out = library.make(numbers(count, dtype, 77), dtype)
        result = await comm.exscan(x, op, out=out)
        assert_values(library.read(x), numbers(count, dtype, comm.rank), f"{case}, input")
        if comm.rank == 0:
            assert result is None
            assert_values(library.read(out), numbers(count, dtype, 77), f"{case}, rank 0's out")
            continue
        assert result is out
        wanted = reduced(op, everyone(comm, count, dtype)[: comm.rank], dtype)
        assert_values(library.read(out), wanted, case)


async def test_premul_sum_multiplies_by_each_ranks_factor(comm: Communicator) -> None:
    for library in (NUMPY, *([torch_library()] if torch_library() else [])):
        assert library is not None
        for dtype in ("int8", "uint16", "int64", *HALVES, "float32", "float64", "complex64"):
            if dtype not in library.dtypes:
                continue
            factor = comm.rank + 2 if "int" in dtype else (comm.rank + 1) / 2
            inputs = everyone(comm, 7, dtype)
            wide = np.complex128 if dtype == "complex64" else np.float64
            total = sum(
                (
                    (rank + 2 if "int" in dtype else (rank + 1) / 2) * each.astype(wide)
                    for rank, each in enumerate(inputs)
                ),
                np.zeros(7),
            )
            x = library.make(inputs[comm.rank], dtype)
            await comm.all_reduce(x, mpdist.premul_sum(factor))
            assert_values(library.read(x), rounded(total, dtype), f"all_reduce {dtype}")
            x = library.make(inputs[comm.rank], dtype)
            result = await comm.reduce(x, 0, mpdist.premul_sum(factor))
            assert_values(library.read(x), inputs[comm.rank], f"input of reduce {dtype}")
            if comm.rank == 0:
                assert_values(library.read(result), rounded(total, dtype), f"reduce {dtype}")
            out = library.make(np.zeros(7), dtype)
            await comm.all_reduce(x, mpdist.premul_sum(factor), out=out)
            assert_values(library.read(x), inputs[comm.rank], f"input of all_reduce into out {dtype}")
            assert_values(library.read(out), rounded(total, dtype), f"all_reduce into out {dtype}")


def last(a: Values, b: Values) -> Values:
    """Associative, not commutative."""
    return b


def affine(a: Values, b: Values) -> Values:
    """Composition of x -> m x + n, as pairs side by side: associative, not commutative."""
    out = np.empty_like(a)
    out[0::2] = a[0::2] * b[0::2]
    out[1::2] = a[1::2] * b[0::2] + b[1::2]
    return out


async def test_a_function_is_applied_in_rank_order(comm: Communicator) -> None:
    inputs = [np.array([rank + 1, rank, 2, 3 - rank], np.int64) for rank in range(comm.size)]
    prefix = [inputs[0]]
    for each in inputs[1:]:
        prefix.append(affine(prefix[-1], each))
    x = inputs[comm.rank].copy()
    assert_values(await comm.all_reduce(x.copy(), affine), prefix[-1], "all_reduce")
    assert_values(await comm.all_reduce(x, affine, out=np.zeros_like(x)), prefix[-1], "all_reduce into out")
    assert_values(await comm.scan(x, affine), prefix[comm.rank], "scan")
    exscan = await comm.exscan(x, affine)
    assert exscan is None if comm.rank == 0 else (exscan == prefix[comm.rank - 1]).all()
    for dst in range(comm.size):
        result = await comm.reduce(x, dst, affine)
        assert result is None if comm.rank != dst else (result == prefix[-1]).all()
    blocks = np.concatenate([inputs[comm.rank] + block for block in range(comm.size)])
    wanted = inputs[0] + comm.rank
    for each in inputs[1:]:
        wanted = affine(wanted, each + comm.rank)
    assert_values(await comm.reduce_scatter(blocks, affine), wanted, "reduce_scatter")
    uneven = [np.full(block + 1, 10 * comm.rank + block) for block in range(comm.size)]
    result = await comm.reduce_scatter(uneven, last)
    assert_values(result, np.full(comm.rank + 1, 10 * (comm.size - 1) + comm.rank), "uneven reduce_scatter")
    assert_values(x, inputs[comm.rank], "input")


async def test_a_function_works_on_every_type(comm: Communicator) -> None:
    for library in libraries():
        for dtype in library.dtypes:
            for count in (0, 5):
                x = library.make(numbers(count, dtype, comm.rank), dtype)
                await comm.all_reduce(x, last)
                assert_values(library.read(x), numbers(count, dtype, comm.size - 1), (library, dtype, count))


async def test_a_function_that_fails_fails_its_own_rank_only(comm: Communicator) -> None:
    def add(a: Values, b: Values) -> Values:
        if comm.rank == 0:
            raise ArithmeticError("not today")
        return a + b

    if comm.size == 1:
        pytest.skip("a function of two is not called")
    x = np.ones(3)
    if comm.rank == 0:
        with pytest.raises(mpdist.CommunicationError, match="not today"):
            await comm.all_reduce(x, add)
    else:
        await comm.all_reduce(x, add)
    assert (await comm.all_reduce(np.ones(1)))[0] == comm.size


async def test_half_types_are_rounded_once(comm: Communicator) -> None:
    """Random values: the error is at most one rounding of the exact result, and float32's own error."""
    random = np.random.default_rng(5)
    for dtype, bits in (("float16", 11), ("bfloat16", 8)):
        library = NUMPY if dtype == "float16" else torch_library()
        if library is None:
            continue
        inputs = [rounded(random.normal(size=1000), dtype) for _ in range(comm.size)]
        for op in ("sum", "avg"):
            exact = sum(each.astype(np.float64) for each in inputs) / (comm.size if op == "avg" else 1)
            absolute = sum(np.abs(each.astype(np.float64)) for each in inputs)
            x = library.make(inputs[comm.rank], dtype)
            await comm.all_reduce(x, op)
            error = np.abs(library.read(x).astype(np.float64) - exact)
            tiny = 2.0**-24 if dtype == "float16" else 2.0**-133
            allowed = np.abs(exact) * 2.0**-bits + absolute * 2.0**-22 + tiny
            assert (error <= allowed).all(), f"{dtype} {op}: {(error - allowed).max()}"


async def test_half_sums_do_not_stop_growing(comm: Communicator) -> None:
    """2048 + 1 is 2048 in float16: sums of many would stay there if each step were rounded."""
    x = np.full(3, 2048 if comm.rank == 0 else 1, np.float16)
    await comm.all_reduce(x)
    assert_values(x, np.full(3, 2048 + comm.size - 1, np.float16), "sum")


# ---------------------------------------------------------------------- uneven blocks


def block(comm: Communicator, src: int, dst: int, dtype: str) -> Values:
    """A block whose size says where it comes from and where it goes; some are empty."""
    return numbers((3 * src + 2 * dst) % 7, dtype, 10 * src + dst)


def uneven_libraries() -> Iterator[tuple[Library, str]]:
    for library in libraries():
        for dtype in ("uint8", "float64", "complex64", "bfloat16"):
            if dtype in library.dtypes:
                yield library, dtype


def some_array(library: Library, dtype: str, count: int) -> Any:
    return library.make(numbers(count, dtype, 77), dtype)


async def test_uneven_gather(comm: Communicator) -> None:
    for library, dtype in uneven_libraries():
        for dst in range(comm.size):
            wanted = [block(comm, src, dst, dtype) for src in range(comm.size)]
            x = library.make(wanted[comm.rank], dtype)
            outs = [some_array(library, dtype, len(each)) for each in wanted] if comm.rank == dst else None
            for out in (None, outs):
                results = await comm.gather([x], dst, out=out)
                if comm.rank != dst:
                    assert results is None
                    continue
                read = library.read if out else lambda each, library=library: own_result(library, each)
                for src, (result, values) in enumerate(zip(results, wanted, strict=True)):
                    assert_values(read(result), values, (library, dtype, dst, src))
            assert_values(library.read(x), wanted[comm.rank], "input")


async def test_uneven_all_gather(comm: Communicator) -> None:
    for library, dtype in uneven_libraries():
        wanted = [block(comm, src, 1, dtype) for src in range(comm.size)]
        x = library.make(wanted[comm.rank], dtype)
        for out in (None, [some_array(library, dtype, len(each)) for each in wanted]):
            results = await comm.all_gather([x], out=out)
            if out is not None:
                assert all(result is each for result, each in zip(results, out, strict=True))
            for result, values in zip(results, wanted, strict=True):
                assert_values(library.read(result) if out else own_result(library, result), values, (library, dtype))


async def test_uneven_scatter(comm: Communicator) -> None:
    for library, dtype in uneven_libraries():
        for src in range(comm.size):
            wanted = block(comm, src, comm.rank, dtype)
            x = None
            if comm.rank == src:
                x = [library.make(block(comm, src, dst, dtype), dtype) for dst in range(comm.size)]
            out = some_array(library, dtype, len(wanted))
            assert await comm.scatter(x, src, out=out) is out
            assert_values(library.read(out), wanted, (library, dtype, src))
            if dtype != "bfloat16":
                result = await comm.scatter(x, src)
                assert_values(own_result(library, result) if x else NUMPY.read(result), wanted, (library, dtype, src))


async def test_uneven_all_to_all(comm: Communicator) -> None:
    for library, dtype in uneven_libraries():
        x = [library.make(block(comm, comm.rank, dst, dtype), dtype) for dst in range(comm.size)]
        wanted = [block(comm, src, comm.rank, dtype) for src in range(comm.size)]
        for out in (None, [some_array(library, dtype, len(each)) for each in wanted]):
            results = await comm.all_to_all(x, out=out)
            for result, values in zip(results, wanted, strict=True):
                assert_values(library.read(result) if out else own_result(library, result), values, (library, dtype))
        for dst, each in enumerate(x):
            assert_values(library.read(each), block(comm, comm.rank, dst, dtype), "input")


async def test_uneven_reduce_scatter(comm: Communicator) -> None:
    for library, dtype in uneven_libraries():
        for op in ("sum", "avg") if dtype != "uint8" else ("sum", "bxor"):
            x = [library.make(numbers(5 * dst % 7, dtype, 10 * comm.rank + dst), dtype) for dst in range(comm.size)]
            mine = [numbers(5 * comm.rank % 7, dtype, 10 * src + comm.rank) for src in range(comm.size)]
            result = await comm.reduce_scatter(x, op)
            assert_values(own_result(library, result), reduced(op, mine, dtype), (library, dtype, op))


def cut(counts: list[int], layout: str) -> list[Values]:
    """Arrays of so many elements: views that lie in some way, or arrays of their own."""
    if layout == "arrays of their own":
        return [np.zeros(count) for count in counts]
    gap = 3 if layout == "gaps" else 0
    order = list(range(len(counts)))
    if layout == "another order":
        order.reverse()
    whole = np.zeros(sum(counts) + gap * len(counts))
    views: dict[int, Values] = {}
    start = 0
    for place in order:
        views[place] = whole[start : start + counts[place]]
        start += counts[place] + gap
    return [views[place] for place in range(len(counts))]


def filled(blocks: list[Values], values: list[Values], is_frozen: bool = False) -> list[Values]:
    for block_, value in zip(blocks, values, strict=True):
        block_[:] = value
        block_.flags.writeable = not is_frozen
    return blocks


LAYOUTS = ["one behind the other", "gaps", "another order", "arrays of their own"]


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_uneven_blocks_go_from_and_to_wherever_they_lie(comm: Communicator, layout: str) -> None:
    everyone_ = range(comm.size)
    sent = [block(comm, comm.rank, dst, "float64") for dst in everyone_]
    wanted = [block(comm, src, comm.rank, "float64") for src in everyone_]
    x = filled(cut([len(each) for each in sent], layout), sent, is_frozen=True)

    def outs(values: list[Values]) -> list[Values]:
        return cut([len(each) for each in values], layout)

    def check(results: Any, given: list[Values], values: list[Values]) -> None:
        for result, out, value in zip(results, given, values, strict=True):
            assert result is out
            assert_values(result, value, layout)
        around = given[0] if given[0].base is None else given[0].base
        if around is not given[0]:
            assert np.count_nonzero(around) == sum(np.count_nonzero(each) for each in values), "beside the blocks"

    given = outs(wanted)
    check(await comm.all_to_all(x, out=given), given, wanted)
    for src in everyone_:
        own = block(comm, src, comm.rank, "float64")
        assert_values(await comm.scatter(x if comm.rank == src else None, src, out=np.zeros(len(own))), own, layout)
    to_last = [block(comm, src, comm.size - 1, "float64") for src in everyone_]
    given = outs(to_last)
    results = await comm.gather([x[-1]], 0, out=given if comm.rank == 0 else None)
    if comm.rank == 0:
        check(results, given, to_last)
    check(await comm.all_gather([x[-1]], out=given), given, to_last)
    counts = [5 * dst % 7 for dst in everyone_]
    rows = [filled(cut(counts, layout), [numbers(n, "float64", r) for n in counts], is_frozen=True) for r in everyone_]
    result = await comm.reduce_scatter(rows[comm.rank])
    assert_values(result, sum(row[comm.rank] for row in rows), layout)
    for each, value in zip(x, sent, strict=True):
        assert_values(each, value, "input")


async def test_the_same_array_may_go_to_all(comm: Communicator) -> None:
    x = np.full(comm.rank + 2, comm.rank)
    for results in (await comm.all_to_all([x] * comm.size), await comm.all_gather([x])):
        for src, result in enumerate(results):
            assert_values(result, np.full(src + 2, src), "the same array")
    result = await comm.scatter([x] * comm.size if comm.rank == 0 else None, 0)
    assert_values(result, np.zeros(2, int), "the same array")
    total = await comm.reduce_scatter([np.full(3, comm.rank)] * comm.size)
    assert_values(total, np.full(3, sum(range(comm.size))), "the same array")


async def test_an_uneven_reduce_scatter_may_write_over_other_blocks_of_x(comm: Communicator) -> None:
    x = np.arange(3.0 * comm.size)
    blocks = list(x.reshape(comm.size, 3))
    result = await comm.reduce_scatter(blocks, out=blocks[comm.rank - 1] if comm.size > 1 else None)
    assert_values(result, comm.size * (np.arange(3.0) + 3 * comm.rank), "over x")


async def test_results_of_uneven_blocks_share_nothing_with_the_input(comm: Communicator) -> None:
    x = np.zeros(2 * comm.size)
    blocks = np.split(x, comm.size)
    results = [*await comm.all_to_all(blocks), *await comm.all_gather([blocks[0]]), await comm.reduce_scatter(blocks)]
    results += [await comm.scatter(blocks if comm.rank == src else None, src) for src in range(comm.size)]
    for result in results:
        assert not np.shares_memory(result, x)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_uneven_blocks_are_not_copied(comm: Communicator, layout: str) -> None:
    count = 256 * 1024
    x, outs = cut([count + dst for dst in range(comm.size)], layout), cut([count + comm.rank] * comm.size, layout)
    mine, gathered = np.zeros(count + comm.rank), cut([count + src for src in range(comm.size)], layout)
    is_root = comm.rank == 0

    async def all_kinds() -> None:
        await comm.all_to_all(x, out=outs)
        await comm.all_gather([mine], out=gathered)
        await comm.gather([mine], 0, out=gathered if is_root else None)
        await comm.scatter(x if is_root else None, 0, out=mine)
        if layout == "one behind the other":
            await comm.reduce_scatter(x, out=mine)

    await all_kinds()
    tracemalloc.start()
    try:
        await all_kinds()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < mine.nbytes


async def test_uneven_blocks_keep_their_shapes(comm: Communicator) -> None:
    results = await comm.all_gather([np.zeros((comm.rank, 2, 1))])
    assert [result.shape for result in results] == [(rank, 2, 1) for rank in range(comm.size)]
    results = await comm.all_gather([np.array(comm.rank)])
    assert [result.shape for result in results] == [()] * comm.size


# ---------------------------------------------------------------------- more than MPI's counts


@pytest.fixture
def small_counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What happens beyond 2**31 elements, at a few."""
    arguments._giant.cache_clear()
    monkeypatch.setattr(arguments, "MAX_COUNT", 31)
    for module in (arguments, mpi):
        monkeypatch.setattr(module, "SLICE_COUNT", 16)
    yield
    arguments._giant.cache_clear()


async def test_reductions_beyond_the_largest_count(comm: Communicator, small_counts: None) -> None:
    for dtype in ("int8", "float16", "float64", "bool"):
        op = "lor" if dtype == "bool" else "sum"
        for count in (16, 17, 32, 33, 100):
            inputs = everyone(comm, count, dtype)
            wanted = reduced(op, inputs, dtype)
            x = inputs[comm.rank]
            case = f"{dtype} x {count}"
            assert_values(await comm.all_reduce(x.copy(), op), wanted, f"all_reduce {case}")
            assert_values(await comm.all_reduce(x, op, out=np.zeros_like(x)), wanted, f"all_reduce into out {case}")
            for dst in range(comm.size):
                result = await comm.reduce(x, dst, op)
                if comm.rank == dst:
                    assert_values(result, wanted, f"reduce {case}")
            scanned = reduced(op, inputs[: comm.rank + 1], dtype)
            assert_values(await comm.scan(x, op), scanned, f"scan {case}")
            exscanned = await comm.exscan(x, op)
            if comm.rank:
                assert_values(exscanned, reduced(op, inputs[: comm.rank], dtype), f"exscan {case}")
            whole = everyone(comm, count * comm.size, dtype)
            block_ = slice(comm.rank * count, (comm.rank + 1) * count)
            result = await comm.reduce_scatter(whole[comm.rank], op)
            assert_values(result, reduced(op, whole, dtype)[block_], f"reduce_scatter {case}")


async def test_moves_beyond_the_largest_count(comm: Communicator, small_counts: None) -> None:
    for dtype in ("uint8", "complex128"):
        for count in (2, 31, 32, 33, 48, 100):
            case = f"{dtype} x {count}"
            inputs = everyone(comm, count, dtype)
            x = inputs[comm.rank].copy()
            for src in range(comm.size):
                got = await comm.broadcast(inputs[comm.rank].copy(), src)
                assert_values(got, inputs[src], f"broadcast {case}")
                gathered = await comm.gather(x, src)
                if comm.rank == src:
                    assert_values(gathered, inputs, f"gather {case}")
                whole = np.concatenate(inputs)
                assert_values(await comm.scatter(whole if comm.rank == src else None, src), x, f"scatter {case}")
            assert_values(await comm.all_gather(x), inputs, f"all_gather {case}")
            wide = everyone(comm, count * comm.size, dtype)
            got = await comm.all_to_all(wide[comm.rank])
            wanted = [each[comm.rank * count : (comm.rank + 1) * count] for each in wide]
            assert_values(got, wanted, f"all_to_all {case}")
            lists = [x[: dst + 1] for dst in range(comm.size)]
            results = await comm.all_to_all(lists)
            for src, result in enumerate(results):
                assert_values(result, inputs[src][: comm.rank + 1], f"uneven all_to_all {case}")


# ---------------------------------------------------------------------- order, time, memory


async def test_many_collectives_may_be_pending_and_are_awaited_in_any_order(comm: Communicator) -> None:
    """One-step and several-step ones in turn; each result must be its own."""
    works: list[tuple[Any, Callable[[Any], None]]] = []
    for number in range(60):
        x = np.full(3, comm.rank + number)
        kind = number % 6
        if kind == 0:
            wanted = sum(rank + number for rank in range(comm.size))
            works.append(
                (comm.all_reduce(x), lambda got, wanted=wanted: assert_values(got, [wanted] * 3, "all_reduce"))
            )
        elif kind == 1:
            works.append(
                (
                    comm.all_gather([x[: 1 + comm.rank % 3]]),
                    lambda got, number=number: assert_values(
                        np.concatenate(got),
                        np.concatenate([np.full(1 + rank % 3, rank + number) for rank in range(comm.size)]),
                        "uneven",
                    ),
                )
            )
        elif kind == 2:
            works.append((comm.barrier(), lambda got: None))
        elif kind == 3:
            works.append(
                (
                    comm.broadcast_object(("n", number), src=number % comm.size),
                    lambda got, number=number: assert_equal(got, ("n", number)),
                )
            )
        elif kind == 4:
            works.append(
                (
                    comm.broadcast(x, number % comm.size),
                    lambda got, number=number: assert_values(got, [number % comm.size + number] * 3, "broadcast"),
                )
            )
        else:
            works.append(
                (
                    comm.all_gather_object(comm.rank * number),
                    lambda got, number=number: assert_equal(got, [rank * number for rank in range(comm.size)]),
                )
            )
    order = np.random.default_rng(comm.rank).permutation(len(works))
    for place in order:
        work, check = works[place]
        check(await work)
    assert [work.sequence for work, _ in works] == list(range(works[0][0].sequence, works[0][0].sequence + 60))


def assert_equal(got: Any, wanted: Any) -> None:
    assert got == wanted


async def test_inputs_may_be_dropped_at_once(comm: Communicator) -> None:
    def post(number: int) -> Any:
        count = 20_000
        match number % 4:
            case 0:
                return comm.all_reduce(np.full(count, comm.rank + 1.0), out=np.empty(count))
            case 1:
                return comm.all_gather([np.full(count, comm.rank + 1.0)])
            case 2:
                return comm.reduce_scatter(np.full(count * comm.size, comm.rank + 1, np.float16))
            case _:
                return comm.all_reduce(np.full(count, comm.rank + 1.0), mpdist.premul_sum(2))

    works = [post(number) for number in range(40)]
    junk = [np.full(20_000, np.nan) for _ in range(40)]
    total = comm.size * (comm.size + 1) / 2
    for number, work in enumerate(works):
        result = await work
        match number % 4:
            case 1:
                assert all((each == rank + 1).all() for rank, each in enumerate(result))
            case 3:
                assert (result == 2 * total).all()
            case _:
                assert (result == total).all()
    del junk


def test_collectives_work_without_a_loop(comm: Communicator) -> None:
    x = np.full(3, comm.rank)
    comm.all_reduce(x).wait()
    assert_values(x, [sum(range(comm.size))] * 3, "wait")
    assert comm.all_gather_object(comm.rank).wait() == list(range(comm.size))
    works = [comm.all_gather([np.full(comm.rank, number)]) for number in range(5)]
    for number, work in reversed(list(enumerate(works))):
        assert [len(each) for each in work.wait()] == list(range(comm.size)), number


async def test_a_collective_names_the_callers_line(comm: Communicator) -> None:
    x = np.ones(comm.size)
    works = [
        comm.barrier(), comm.broadcast(x, 0), comm.all_reduce(x), comm.reduce(x, 0), comm.scan(x), comm.exscan(x),
        comm.reduce_scatter(x), comm.reduce_scatter(list(x.reshape(-1, 1))), comm.gather(x, 0), comm.gather([x], 0),
        comm.all_gather(x), comm.scatter(x, 0), comm.all_to_all(x), comm.all_to_all(list(x.reshape(-1, 1))),
        comm.all_reduce(x, "avg"), comm.all_reduce(x, np.add), comm.broadcast_object(1), comm.all_gather_object(1),
    ]  # fmt: skip
    sites = [work.site for work in works]
    await asyncio.gather(*works)
    for work, site in zip(works, sites, strict=True):
        assert "test_collectives.py:" in site, work


async def test_every_loop_drives_collectives_while_another_task_computes(comm: Communicator) -> None:
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0)
            beats += 1

    task = asyncio.create_task(beat())
    for _ in range(200):
        await comm.all_reduce(np.ones(1))
    task.cancel()
    assert beats >= 2


# More than MPI sends before its receiver has come.
BLOCK_BYTES = 1 << 20

POSTS: dict[str, Callable[[Communicator, list[bytearray]], Any]] = {
    "scatter": lambda comm, blocks: comm.scatter(blocks if comm.rank == 0 else None, 0),
    "gather": lambda comm, blocks: comm.gather([bytearray(BLOCK_BYTES)], 0, out=blocks if comm.rank == 0 else None),
    "all_gather": lambda comm, blocks: comm.all_gather([bytearray(BLOCK_BYTES)], out=blocks),
    "all_to_all": lambda comm, blocks: comm.all_to_all(blocks),
    "all_to_all with out": lambda comm, blocks: comm.all_to_all([bytearray(BLOCK_BYTES)] * comm.size, out=blocks),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("what", POSTS)
async def test_blocks_cannot_be_resized_from_the_post_on(comm: Communicator, what: str) -> None:
    blocks = [bytearray(BLOCK_BYTES) for _ in range(comm.size)]
    if comm.rank:
        await comm.recv(src=0, tag=3)
    work = POSTS[what](comm, blocks)
    if comm.rank == 0:
        with pytest.raises(BufferError):
            blocks[0].append(1)  # the others have not come yet
        for rank in range(1, comm.size):
            await comm.send(np.ones(1), rank, tag=3)
    await work


CALLS: dict[str, Callable[[Communicator, Any], Any]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "broadcast": lambda comm, x: comm.broadcast(x, 0),
    "reduce": lambda comm, x: comm.reduce(x, comm.size - 1),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("is_second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("count", [6, 2_400, 12_000, 300_000])
@pytest.mark.parametrize("call", CALLS)
async def test_an_array_cannot_be_resized_while_it_is_sent(
    comm: Communicator, call: str, count: int, is_second: bool
) -> None:
    """Nor need a view of it stay: neither was held by requests that wait for their turn, and by none of MPI's."""
    await comm.barrier()
    before = (lambda: [comm.all_reduce(np.ones(count))]) if is_second else list
    x, octets = array.array("d", [comm.rank] * count), bytearray(8 * count)
    first = comm.rank == 0
    if not first:
        await comm.recv(src=0, tag=3)
    works = before()
    works.append(CALLS[call](comm, x))
    with memoryview(octets) as view, view.cast("d") as numbers:
        works.append(CALLS[call](comm, numbers))
    if first:
        for resize in (lambda: x.append(1), lambda: octets.append(1)):
            with pytest.raises(BufferError):
                resize()
        for rank in range(1, comm.size):
            await comm.send(np.ones(1), rank, tag=3)
    for work in works:
        await work
    if call == "all_reduce":
        assert set(x) == {comm.size * (comm.size - 1) / 2}
    elif call == "broadcast":
        assert set(x) == {0.0}
    else:
        assert set(x) == {float(comm.rank)}
    del work, works
    x.append(1)
    octets.append(1)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
async def test_sums_of_short_integers_wrap(comm: Communicator, dtype: str, deterministic: bool) -> None:
    """In vectors and behind them, and where only a part of the sum is too large."""
    largest = np.iinfo(dtype).max
    for count in (1, 100, 20_000):
        values = [np.full(comm.size * count, largest - 3 if rank % 2 == 0 else 7, dtype) for rank in range(comm.size)]
        mine, wanted = values[comm.rank], np.sum(values, axis=0, dtype=dtype)
        options = {"deterministic": deterministic}
        np.testing.assert_array_equal(await comm.all_reduce(mine.copy(), **options), wanted)
        factors = mpdist.premul_sum(3)
        np.testing.assert_array_equal(await comm.all_reduce(mine.copy(), factors), (wanted * 3).astype(dtype))
        reduced_there = await comm.reduce(mine, 0, **options)
        assert comm.rank != 0 or (reduced_there == wanted).all()
        np.testing.assert_array_equal(await comm.reduce_scatter(mine, **options), wanted[:count])
        before = np.sum(values[: comm.rank + 1], axis=0, dtype=dtype)
        np.testing.assert_array_equal(await comm.scan(mine), before)
        blocks = await comm.reduce_scatter(np.array_split(mine, comm.size))
        np.testing.assert_array_equal(blocks, wanted[:count])
