"""all_reduces of a few numbers that are over when they are posted, or wait for the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from algorithms.forcing import SHARED, forced
from comm.meeting import met
from comm.reference import ops_for, reduced
from memory.simulated import Simulated

import mpdist
from mpdist import Communicator
from mpdist.algorithms.shared.few import FEW_BYTES, LINES, Few
from mpdist.algorithms.shared.few_works import Ended
from mpdist.memory.scalars import SCALAR_FOLDS, SCALAR_FORMATS

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.either_mpi]


@pytest.fixture
async def made(comm: Communicator) -> AsyncIterator[Communicator]:
    """A communicator on which sums of two numbers of float64 go at once."""
    async with forced(comm, SHARED) as made:
        for _ in range(2):
            await made.all_reduce(np.zeros(2))
        assert made._channel.at_once is made._channel.few
        yield made


class Kind(np.ndarray[Any, Any]):
    """One that NumPy does not know."""


async def rest(comm: Communicator, rank: int) -> None:
    """Let this one come later than the others."""
    if comm.rank == rank:
        await asyncio.sleep(0.005)


async def test_whoever_comes_last_need_not_wait(comm: Communicator, made: Communicator) -> None:
    for last in range(made.size):
        await comm.barrier()
        await rest(made, last)
        x = np.array([made.rank, 1.0])
        work = made.all_reduce(x)
        if made.rank == last:
            assert type(work) is Ended
            assert work.done()
            assert work.wait(0.0) is work.result() is x
            assert work.exception() is None
            assert "all_reduce float64 x 2 sum #" in repr(work)
        assert await work is x
        assert await work is x
        assert x.tolist() == [made.size * (made.size - 1) / 2, made.size]


@pytest.mark.parametrize("dtype", sorted(SCALAR_FORMATS))
async def test_ops_and_sizes(made: Communicator, dtype: str) -> None:
    for op in sorted(set(ops_for(dtype)) & SCALAR_FOLDS.keys()):
        for count in range(1, FEW_BYTES // np.dtype(dtype).itemsize + 1):
            for turn in range(3):
                inputs = [
                    np.random.default_rng([count, rank]).integers(-9, 10, count).astype(dtype)
                    for rank in range(made.size)
                ]
                await rest(made, turn if count == 1 else -1)
                x = inputs[made.rank].copy()
                await made.all_reduce(x, op)
                np.testing.assert_allclose(x, reduced(op, inputs, dtype), rtol=1e-6, err_msg=f"{op} {count}")
    few = made._channel.few
    assert isinstance(few, Few)
    assert {np.dtype(key[1]).name for key in few.recurring} >= {dtype}  # type: ignore[call-overload]  # NumPy's all


@pytest.mark.parametrize("dtype", ["int32", "int64"])
async def test_integers_wrap(made: Communicator, dtype: str) -> None:
    most = np.iinfo(dtype).max
    for _ in range(4):
        x = np.full(1, most, dtype)
        with np.errstate(over="ignore"):
            wanted = reduced("sum", [x] * made.size, dtype)
        await made.all_reduce(x)
        np.testing.assert_array_equal(x, wanted)


async def test_arrays_of_any_shape(made: Communicator) -> None:
    base = np.zeros(9)
    for x in (
        np.zeros(2),
        np.zeros((2, 1)),
        np.zeros((1, 1, 2)),
        base[3:5],
        np.zeros((2, 2))[1],
        np.zeros(2).view(Kind),
    ):
        for turn in range(3):
            x[...] = made.rank + turn
            assert await made.all_reduce(x) is x
            np.testing.assert_array_equal(x, sum(rank + turn for rank in range(made.size)))
    assert not base[[0, 1, 2, 5, 6, 7, 8]].any()
    for turn in range(4):
        number = np.array(turn + 0.5)
        await made.all_reduce(number)
        assert number == made.size * (turn + 0.5)


async def test_what_cannot_be_reduced_is_refused_as_ever(made: Communicator) -> None:
    fixed = np.zeros(2)
    fixed.flags.writeable = False
    for x, text in (
        (fixed, "read-only"),
        (np.zeros(4)[::2], "contiguous|strided"),
        (np.zeros(2, ">f8"), "byte order|big-endian"),
    ):
        before = x.copy()
        with pytest.raises(mpdist.UnsupportedBuffer, match=text):
            made.all_reduce(x)
        np.testing.assert_array_equal(x, before)
    for op in ("median", ["sum"], None, lambda a, b: a):
        if callable(op):
            await made.all_reduce(np.zeros(2), op)
        else:
            with pytest.raises(mpdist.UsageError):
                made.all_reduce(np.zeros(2), op)  # type: ignore[arg-type]  # as it says
    assert (await made.all_reduce(np.ones(2))).tolist() == [made.size] * 2


async def test_tensors(made: Communicator) -> None:
    torch = pytest.importorskip("torch")
    z = torch.ones(2, dtype=torch.complex128)
    for turn in range(4):
        for x in (
            torch.zeros(2, dtype=torch.float64),
            torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)),
            torch.zeros(5, dtype=torch.float64)[2:4],
            torch.zeros((2, 1), dtype=torch.float64).t(),
        ):
            x.data.fill_(turn + made.rank)
            assert await made.all_reduce(x) is x
            assert (x == sum(turn + rank for rank in range(made.size))).all()
        for x in (
            torch.zeros(4, dtype=torch.float64)[::2],
            z.conj().imag,
            torch.nested.nested_tensor([torch.zeros(1, dtype=torch.float64)] * 2),
            torch.zeros(2, dtype=torch.float64).to_sparse(),
            torch.zeros(2, dtype=torch.float64, device="meta"),
        ):
            with pytest.raises(mpdist.UnsupportedBuffer):
                made.all_reduce(x)
        number = torch.tensor(turn + 0.5, dtype=torch.float64)
        await made.all_reduce(number)
        assert number.item() == made.size * (turn + 0.5)


async def test_an_unaligned_tensor(made: Communicator) -> None:
    torch = pytest.importorskip("torch")
    for turn in range(4):
        x = torch.frombuffer(bytearray(17), dtype=torch.float64, count=2, offset=1)
        x.fill_(turn)
        await made.all_reduce(x)
        assert (x == turn * made.size).all()


async def test_the_loop_gets_its_turns(made: Communicator) -> None:
    """However many are over at once."""
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(beat())
    x = np.zeros(1)
    for _ in range(20_000):
        await made.all_reduce(x)
    task.cancel()
    assert beats > 20


async def test_among_others_in_flight(made: Communicator) -> None:
    """Those that others of the rank are before wait for their turn."""
    works: list[tuple[mpdist.Work[Any], float]] = []
    for turn in range(4 * LINES):
        count = (2, 2, 2000, 2, 3)[turn % 5]
        works.append((made.all_reduce(np.full(count, float(turn))), turn * made.size))
        if turn % 7 == 6:
            for work, wanted in works:
                assert ((await work) == wanted).all()
            works.clear()
        if turn % 11 == made.rank:
            await asyncio.sleep(0.001)
    for work, wanted in works:
        assert ((await work) == wanted).all()


def test_without_a_loop(comm: Communicator) -> None:
    made = comm.dup().wait()
    for turn in range(5 * LINES):
        if turn % 9 == made.rank:
            time.sleep(0.003)
        assert made.all_reduce(np.full(2, turn)).wait()[1] == made.size * turn
    made.close().wait()


async def test_callbacks(made: Communicator) -> None:
    seen: list[Any] = []
    for turn in range(6):
        await rest(made, turn % made.size)
        work = made.all_reduce(np.full(2, float(turn)))
        work.add_done_callback(lambda work: seen.append(work.result()[0]))
        await work
    await asyncio.sleep(0)
    assert seen == [made.size * turn for turn in range(6)]


async def test_two_tasks_are_told_from_each_other(made: Communicator) -> None:
    first = None
    if made.rank == 0:
        first = asyncio.create_task(alone(made))
        await asyncio.sleep(0.01)
        with pytest.raises(mpdist.UsageError, match="was called in task"):
            made.all_reduce(np.zeros(2))
        with pytest.raises(mpdist.ClosedError):
            made.all_reduce(np.zeros(2))
    else:
        await asyncio.sleep(0.02)
        assert (await made.all_reduce(np.ones(2)) == made.size).all()
    if first is not None:
        assert (await first == made.size).all()
    with pytest.raises(ZeroDivisionError):
        async with made:
            raise ZeroDivisionError


async def alone(comm: Communicator) -> Any:
    return await comm.all_reduce(np.ones(2))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("count", [1, 3, 100, 20_000])
async def test_whoever_comes_later_with_another_call_is_refused_and_may_correct_it(
    comm: Communicator, made: Communicator, count: int
) -> None:
    for _ in range(3):  # of arrays of that size, too
        await made.all_reduce(np.zeros(count))
    for turn in range(3):
        sequence = made._channel.sequence
        if made.rank == turn % made.size:
            work = made.all_reduce(np.ones(2))
            await met(comm)
            await met(comm)
        else:
            await met(comm)
            x = np.ones(count)
            with pytest.raises(mpdist.CollectiveMismatch, match=r"has called all_reduce float64 x 2 sum"):
                made.all_reduce(x)
            assert (x == 1).all()
            assert made._channel.sequence == sequence
            await met(comm)  # until no rank makes the wrong call any more
            work = made.all_reduce(np.ones(2))
        assert (await work == made.size).all()


@pytest.mark.ranks(2)
async def test_whoever_comes_later_than_another_collective_is_refused(comm: Communicator, made: Communicator) -> None:
    for _ in range(3):
        if made.rank == 0:
            work = made.broadcast(np.arange(3.0), 0)
            await met(comm)
            await met(comm)
        else:
            await met(comm)
            with pytest.raises(mpdist.CollectiveMismatch, match=r"rank 0 has called broadcast float64 x 3 from 0"):
                made.all_reduce(np.ones(2))
            await met(comm)
            work = made.broadcast(np.zeros(3), 0)
        assert (await work == [0, 1, 2]).all()
        assert (await made.all_reduce(np.ones(2)) == made.size).all()


async def test_a_closed_communicator_refuses_them(comm: Communicator) -> None:
    made = await comm.dup()
    for _ in range(4):
        await made.all_reduce(np.zeros(2))
    await made.close()
    with pytest.raises(mpdist.ClosedError):
        made.all_reduce(np.zeros(2))


async def test_one_that_has_timed_out_ends_them(made: Communicator) -> None:
    if made.rank == 0:
        with pytest.raises(mpdist.WorkTimeout):
            await made.all_reduce(np.zeros(2)).within(0.05)
        for count in (2, 3, 3, 3, 2):  # also of what has never been reduced
            with pytest.raises(mpdist.ClosedError):
                made.all_reduce(np.zeros(count))
    with pytest.raises(ZeroDivisionError):
        async with made:
            raise ZeroDivisionError


@pytest.mark.ranks(2)
async def test_members_who_gave_up_before_there_were_any_are_not_waited_for(comm: Communicator) -> None:
    """The others come together for the first, or for the first of arrays, in vain."""
    for is_few in (True, False):
        made = await comm.dup()
        await (made.barrier() if is_few else made.all_reduce(np.zeros(2)))
        if made.rank == 0:
            with pytest.raises(mpdist.CommRevoked, match="gave the communicator up"):
                await (made.all_reduce(np.zeros(2)) if is_few else made.barrier())
            with pytest.raises(mpdist.ClosedError):
                made.all_reduce(np.zeros(2))
        else:
            home: Any = made._channel.team if is_few else made._channel.few
            home.give_up()
        made._closed("the test is over")


async def test_arrays_of_the_host_and_of_devices_go_together(
    comm: Communicator, made: Communicator, fake_gpu: Simulated
) -> None:
    async with made.dup() as other:
        for each in (made, other, comm):
            for turn in range(8):
                x = np.full(2, made.rank + 1.0)
                out = np.zeros(2) if turn > 4 else None
                is_on_device = made.rank == turn % made.size and out is None
                op = mpdist.ReduceOp("sum") if turn % 3 == 2 else "sum"
                result = await each.all_reduce(fake_gpu.array(x) if is_on_device else x, op, out=out)
                result = result.get() if is_on_device else result
                assert result.tolist() == [made.size * (made.size + 1) / 2] * 2
