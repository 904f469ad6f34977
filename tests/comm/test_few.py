"""An all_reduce of a few numbers, which lie beside the word that tells of them."""

from __future__ import annotations

import array
import gc
import time
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from algorithms.forcing import SHARED, forced, replaced
from comm.meeting import met
from comm.reference import ops_for, reduced
from memory.simulated import Simulated

import mpdist
from mpdist import Communicator
from mpdist.algorithms.shared.few import FEW_BYTES, LINES, Few
from mpdist.memory.scalars import SCALAR_FOLDS, SCALAR_FORMATS

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.either_mpi]

TYPES = sorted(SCALAR_FORMATS)


@pytest.fixture
async def made(comm: Communicator) -> AsyncIterator[Communicator]:
    """A communicator of ranks that share memory already."""
    async with forced(comm, SHARED) as made:
        await made.barrier()
        yield made


def few_of(comm: Communicator) -> Few:
    """What it has made for few numbers."""
    few = comm._channel.few
    assert isinstance(few, Few)
    return few


def numbers(dtype: str, count: int, rank: int) -> np.ndarray[Any, Any]:
    """Some that differ from rank to rank; the sum of floating point ones depends on no order."""
    values = np.random.default_rng([count, rank]).integers(-9, 10, count)
    return (values / 4 if dtype.startswith("float") else values).astype(dtype)


@pytest.mark.parametrize("dtype", TYPES)
async def test_ops_and_sizes(made: Communicator, dtype: str) -> None:
    most = FEW_BYTES // np.dtype(dtype).itemsize
    for op in sorted(set(ops_for(dtype)) & SCALAR_FOLDS.keys()):
        for count in range(most + 2):
            inputs = [numbers(dtype, count, rank) for rank in range(made.size)]
            wanted = reduced(op, inputs, dtype)
            x, out = inputs[made.rank].copy(), np.zeros(count, dtype)
            assert await made.all_reduce(x, op, out=out) is out
            np.testing.assert_array_equal(x, inputs[made.rank])
            await made.all_reduce(x, op)
            for result in (x, out):
                np.testing.assert_allclose(result, wanted, rtol=1e-6, err_msg=f"{op} {count}")
    sizes = {plan.count for plan in few_of(made)._plans.values()}
    assert sizes == set(range(most + 1))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("op", ["sum", "prod"])
async def test_integers_wrap(made: Communicator, op: str, dtype: str) -> None:
    limits = np.iinfo(dtype)
    inputs = [np.array([limits.max - rank, limits.min + rank, limits.max // 3], dtype) for rank in range(made.size)]
    with np.errstate(over="ignore"):
        wanted = reduced(op, inputs, dtype)
    np.testing.assert_array_equal(await made.all_reduce(inputs[made.rank].copy(), op), wanted)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
async def test_numbers_that_are_none_and_too_large_ones(made: Communicator, dtype: str) -> None:
    rank, last = made.rank, made.size - 1
    large = np.finfo(dtype).max
    nan = [np.nan if rank == 0 else 1, np.nan if rank == last else 1, -np.inf if rank == last else np.inf]
    for op in ("min", "max", "sum", "prod"):
        result = await made.all_reduce(np.array(nan, dtype), op)
        assert np.isnan(result[:2]).all(), op
        wanted = {"min": -np.inf, "max": np.inf, "sum": np.nan, "prod": -np.inf}[op]
        np.testing.assert_array_equal(result[2], wanted, op)
    np.testing.assert_array_equal(await made.all_reduce(np.full(1, large, dtype)), np.inf)
    np.testing.assert_array_equal(await made.all_reduce(np.full(1, -large, dtype), "sum"), -np.inf)


async def test_bits_are_the_same_on_all_ranks(made: Communicator) -> None:
    for dtype in ("float32", "float64"):
        values = np.random.default_rng(made.rank).standard_normal(7).astype(dtype)
        for op in ("sum", "prod", "avg"):
            result = await made.all_reduce(values.copy(), op)
            everyone = await made.all_gather(result)
            assert len({each.tobytes() for each in everyone}) == 1


def unaligned() -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(13), np.float32, 3, offset=1)


MAKERS: dict[str, Callable[[Communicator], Any]] = {
    "2-d": lambda comm: np.zeros((1, 3), np.float32),
    "a slice": lambda comm: np.zeros(9, np.float32)[4:7],
    "unaligned": lambda comm: unaligned(),
    "array.array": lambda comm: array.array("f", [0, 0, 0]),
    "comm.empty": lambda comm: comm.empty(3, np.float32),
    "torch": lambda comm: pytest.importorskip("torch").zeros(3),
    "torch, unaligned": lambda comm: pytest.importorskip("torch").from_numpy(unaligned()),
}


@pytest.mark.parametrize("source", MAKERS)
@pytest.mark.parametrize("target", MAKERS)
async def test_any_array_does_in_any_place(made: Communicator, source: str, target: str) -> None:
    x, out = MAKERS[source](made), MAKERS[target](made)
    np.asarray(x)[...] = made.rank + 1
    await made.all_reduce(x, out=out)
    total = made.size * (made.size + 1) / 2
    np.testing.assert_array_equal(np.asarray(x), made.rank + 1)
    np.testing.assert_array_equal(np.asarray(out), total)
    await made.all_reduce(x)
    np.testing.assert_array_equal(np.asarray(x), total)
    assert few_of(made)._plans


async def test_a_number_without_axes(made: Communicator) -> None:
    x = np.array(made.rank + 0.5)
    assert await made.all_reduce(x) is x
    assert x == made.size**2 / 2
    assert few_of(made)._plans


@pytest.mark.parametrize("order", [1, -1], ids=["in order", "the last first"])
async def test_many_in_flight(made: Communicator, order: int) -> None:
    """Some wait until the others have read the line that they need."""
    xs = [np.full(2, made.rank + number, np.float64) for number in range(5 * LINES)]
    works = [made.all_reduce(x) for x in xs]
    for work in works[::order]:
        await work
    for number, x in enumerate(xs):
        np.testing.assert_array_equal(x, sum(rank + number for rank in range(made.size)))
    assert not few_of(made).pending


def test_many_in_flight_without_a_loop(comm: Communicator) -> None:
    """Each rank sleeps until the others have read, or come."""
    with replaced(comm, SHARED):
        made = comm.dup().wait()
    made.barrier().wait()
    for turn in range(3):
        if turn == made.rank:
            time.sleep(0.1)
        works = [made.all_reduce(np.full(1, number)) for number in range(3 * LINES)]
        assert [int(work.wait()[0]) for work in works] == [made.size * number for number in range(3 * LINES)]
    made.close().wait()


async def test_others_go_on_between(made: Communicator) -> None:
    works: list[mpdist.Work[Any]] = []
    for number in range(3 * LINES):
        works += [made.all_reduce(np.full(3, number)), made.all_reduce(np.full(1000, number)), made.barrier()]
    for number in range(3 * LINES):
        assert (await works[3 * number] == made.size * number).all()
        assert (await works[3 * number + 1] == made.size * number).all()
        await works[3 * number + 2]


async def test_all_hear_of_other_sizes_and_stay_in_step(made: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the ranks come at the same time, and none sees what another has signed."""
    monkeypatch.setattr(made._channel, "signer", None)
    last = made.size - 1
    for _ in range(3 * LINES):
        x = np.ones(3 if made.rank == last else 2)
        with pytest.raises(mpdist.SizeMismatch, match=rf"all_reduce on .*rank 0: 16.*rank {last}: 24\)"):
            await made.all_reduce(x)
        assert (x == 1).all()
        assert (await made.all_reduce(np.ones(2)) == made.size).all()
    works = [made.all_reduce(np.ones(3 if made.rank == last and number == 1 else 2)) for number in range(4)]
    for number, work in reversed(list(enumerate(works))):
        if number == 1:
            with pytest.raises(mpdist.SizeMismatch):
                await work
        else:
            assert (await work == made.size).all()


@pytest.mark.ranks(2, 3)
async def test_another_call_is_refused_and_may_be_made_good(comm: Communicator, made: Communicator) -> None:
    """Who comes last hears of it, and nothing is posted there."""
    if made.rank == 0:
        work = made.all_reduce(np.ones(2))
        await met(comm)
        await met(comm)
    else:
        await met(comm)
        with pytest.raises(mpdist.CollectiveMismatch, match=r"rank 0 has called all_reduce float64 x 2 sum"):
            made.all_reduce(np.ones(1000))
        await met(comm)  # until no rank makes the wrong call any more
        work = made.all_reduce(np.ones(2))
    assert (await work == made.size).all()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("is_on_device", [False, True], ids=["host", "device"])
async def test_another_size_is_refused_in_the_first_call_too(
    comm: Communicator, fake_gpu: Simulated, is_on_device: bool
) -> None:
    """When the ranks have not met yet, and where arrays are copied first."""
    make = fake_gpu.array if is_on_device else np.array
    async with forced(comm, SHARED) as made:
        for _ in range(2):
            if made.rank == 0:
                work = made.all_reduce(make([1.0, 1.0]))
                await met(comm)
                await met(comm)
            else:
                await met(comm)
                with pytest.raises(mpdist.CollectiveMismatch, match=r"rank 0 has called all_reduce float64 x 2 sum"):
                    made.all_reduce(make([1.0] * 100))
                await met(comm)  # until no rank makes the wrong call any more
                work = made.all_reduce(make([1.0, 1.0]))
            result = await work
            assert (result.get() if is_on_device else result).tolist() == [made.size] * 2


def test_arrays_that_may_be_resized_are_not_while_they_are_reduced(comm: Communicator) -> None:
    with replaced(comm, SHARED):
        made = comm.dup().wait()
    made.barrier().wait()
    numbers, octets = array.array("d", [1, 2]), bytearray(array.array("d", [1, 2]))
    view = memoryview(octets).cast("d")
    works = [made.all_reduce(numbers), made.all_reduce(view)]
    view.release()
    for resize in (lambda: numbers.extend([3] * 1000), lambda: octets.extend(bytes(1000))):
        with pytest.raises(BufferError):
            resize()
    comm.barrier().wait()
    for work in works:
        work.wait()
    del work, works
    assert numbers.tolist() == np.frombuffer(octets).tolist() == [made.size, 2 * made.size]
    numbers.append(3)
    octets.append(3)
    made.close().wait()


def test_a_team_goes_with_its_last_use(comm: Communicator) -> None:
    """And its memory, which Python's collector of garbage does not wait for."""
    gc.disable()
    try:
        with replaced(comm, SHARED):
            made = comm.dup().wait()
        made.barrier().wait()
        for op in ("sum", "avg"):
            made.all_reduce(np.ones(2), op).wait()
        assert few_of(made)._plans
        team = weakref.ref(made._channel.team)
        made.close().wait()
        assert team() is None
    finally:
        gc.enable()


@pytest.mark.ranks(2)
async def test_who_waits_for_a_rank_that_has_given_up_hears_of_it(comm: Communicator) -> None:
    with replaced(comm, SHARED):
        made = await comm.dup()
    await made.barrier()
    if made.rank == 0:
        with pytest.raises(mpdist.CommunicationError):
            await made.all_reduce(np.ones(2))
    else:
        made._channel.team.give_up()  # type: ignore[union-attr]  # it has a team
    made._closed("the test is over")
