"""Collectives straight between the devices of a node: the same results, and which way they take."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from comm.arrays import numbers
from comm.devices import Gpu
from comm.reference import ops_for, reduced
from memory.simulated import Simulated

import mpdist
from mpdist.algorithms.devices import plan, programs
from mpdist.algorithms.devices.joining import PATTERN_BYTES
from mpdist.comm import straight
from mpdist.memory import as_buffer
from mpdist.memory.cuda import Cuda
from mpdist.progress.marks import copied

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.any_mpi]

Comm = mpdist.Communicator
DTYPES = ("bool", "int8", "uint16", "int64", "float16", "float32", "complex64")
FEW = 1500
COUNTS = (0, 1, 7, FEW, 5000)
PROOF = (("in", PATTERN_BYTES), ("fold", PATTERN_BYTES), ("out", 2 * PATTERN_BYTES))
JOINING = 2
"""So many collectives on a device go through host memory, at the most, before the ranks reach each other."""


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plan, "SLOT_BYTES", 8192)
    for op in straight.IPC_FROM:
        monkeypatch.setitem(straight.IPC_FROM, op, 0)
    for name in ("LED_FROM", "ONE_GPU_FROM"):
        monkeypatch.setattr(straight, name, 0)
    return


@pytest.fixture(params=["one GPU", "several"])
def gpus(request: pytest.FixtureRequest, comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the ranks think that they all use the same one."""
    identity = 1 if request.param == "one GPU" else 1 + comm.rank
    for kind in (Simulated, Cuda):
        monkeypatch.setattr(kind, "identity", lambda _: identity)


def check(found: Any, expected: Any) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.get(), expected)


async def join(comm: Comm, gpu: Gpu) -> None:
    """After this arrays on devices go straight; before, it hangs on how far the others are."""
    for _ in range(JOINING):
        x = gpu.array(np.ones(3))
        await comm.all_reduce(x)
        check(x, np.full(3, float(comm.size)))


def went_straight(gpu: Simulated) -> bool:
    """Whether what came since the last call did not go through the host."""
    kinds = {kind for kind, nbytes in gpu.copies if nbytes and (kind, nbytes) not in PROOF}
    gpu.copies.clear()
    assert kinds <= {"between", "fold"} or kinds <= {"out", "in"}
    return bool(kinds & {"between", "fold"})


def everyone(comm: Comm, count: int, dtype: str) -> list[Any]:
    return [numbers(count, dtype, seed=rank) for rank in range(comm.size)]


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("dtype", DTYPES)
async def test_all_reduce_in_place_and_into_out(comm: Comm, gpu: Gpu, dtype: str) -> None:
    await join(comm, gpu)
    ops = ops_for(dtype)
    for op, count in [*((ops[0], count) for count in COUNTS), *((op, FEW) for op in ops[1:])]:
        values = everyone(comm, count, dtype)
        expected = reduced(op, values, dtype)
        x = gpu.array(values[comm.rank])
        assert await comm.all_reduce(x, op) is x
        np.testing.assert_allclose(x.get(), expected)
        x, out = gpu.array(values[comm.rank]), gpu.array(np.zeros_like(expected))
        assert await comm.all_reduce(x, op=op, out=out, deterministic=True) is out
        np.testing.assert_allclose(out.get(), expected)
        check(x, values[comm.rank])


async def test_arrays_go_straight_after_the_first_collectives(comm: Comm, fake_gpu: Simulated) -> None:
    await join(comm, fake_gpu)
    fake_gpu.copies.clear()
    for count in (1, 5000):
        x = fake_gpu.array(np.full(count, comm.rank, np.float32))
        await comm.all_reduce(x)
        check(x, np.full(count, sum(range(comm.size)), np.float32))
        assert went_straight(fake_gpu)
    assert fake_gpu.shared.log.count("export") == 1
    assert fake_gpu.shared.log.count("open") == comm.size - 1


@pytest.mark.parametrize("count", COUNTS)
async def test_broadcast_and_all_gather(comm: Comm, gpu: Gpu, count: int) -> None:
    await join(comm, gpu)
    values = everyone(comm, count, "float32")
    for root in range(comm.size):
        x = gpu.array(values[comm.rank])
        assert await comm.broadcast(x, root) is x
        check(x, values[root])
        check(await comm.all_gather(gpu.array(values[comm.rank])), np.stack(values))
        out = gpu.array(np.zeros(count * comm.size, np.float32))
        assert await comm.all_gather(gpu.array(values[comm.rank]), out=out) is out
        check(out, np.concatenate(values))


@pytest.mark.parametrize("count", COUNTS)
async def test_reduce_scatter(comm: Comm, gpu: Gpu, count: int) -> None:
    await join(comm, gpu)
    rows = everyone(comm, comm.size * count, "int64")
    block = slice(comm.rank * count, (comm.rank + 1) * count)
    for op in ("sum", "max"):
        expected = reduced(op, rows, "int64")[block]
        check(await comm.reduce_scatter(gpu.array(rows[comm.rank]), op), expected)
        out = gpu.array(np.zeros(count, np.int64))
        assert await comm.reduce_scatter(gpu.array(rows[comm.rank]), op, deterministic=True, out=out) is out
        check(out, expected)


async def test_each_rank_has_its_own_factor(comm: Comm, gpu: Gpu) -> None:
    await join(comm, gpu)
    for dtype, factor in (("float32", 0.5), ("int64", 3), ("complex64", 1 + 2j)):
        x = gpu.array(np.full(3000, comm.rank + 1, dtype))
        await comm.all_reduce(x, op=mpdist.premul_sum(factor * (comm.rank + 1)))
        total = sum(factor * (rank + 1) ** 2 for rank in range(comm.size))
        check(x, np.full(3000, total, dtype))


async def test_what_does_not_fit_goes_through_the_host(comm: Comm, fake_gpu: Simulated) -> None:
    await join(comm, fake_gpu)
    fake_gpu.copies.clear()
    x = fake_gpu.array(np.full(100, comm.rank))
    assert await comm.all_reduce(x, op=lambda a, b: a) is x
    check(x, np.zeros(100, int))
    for rank, each in enumerate(await comm.all_gather([fake_gpu.array(np.full(rank_size(comm), comm.rank))])):
        check(each, np.full(rank + 1, rank))
    assert not went_straight(fake_gpu)


def rank_size(comm: Comm) -> int:
    return comm.rank + 1


async def test_ranks_with_host_memory_take_part(comm: Comm, fake_gpu: Simulated) -> None:
    await join(comm, fake_gpu)
    for turn in range(3 * comm.size):
        fake_gpu.copies.clear()
        values = np.full(2000, comm.rank + turn, np.float64)
        x: Any = values if comm.rank == turn % comm.size else fake_gpu.array(values)
        await comm.all_reduce(x)
        found = x if x is values else x.get()
        np.testing.assert_array_equal(found, np.full(2000, sum(range(comm.size)) + comm.size * turn, np.float64))
        assert not went_straight(fake_gpu)
        x = fake_gpu.array(values)
        await comm.all_reduce(x)
        assert went_straight(fake_gpu)


async def test_a_rank_that_never_has_an_array_on_a_device_holds_nobody_up(comm: Comm, fake_gpu: Simulated) -> None:
    for turn in range(5):
        values = np.full(500, comm.rank + turn)
        x: Any = values if comm.rank == 0 else fake_gpu.array(values)
        await comm.broadcast(x, comm.size - 1)
        np.testing.assert_array_equal(x if x is values else x.get(), np.full(500, comm.size - 1 + turn))
    assert "open" not in fake_gpu.shared.log


async def test_several_are_in_flight_among_those_of_the_host(comm: Comm, gpu: Gpu) -> None:
    for _ in range(2):
        works, arrays = [], []
        for number in range(12):
            values = np.full(1000, comm.rank + number, np.float32)
            arrays.append(values if number % 3 == 0 else gpu.array(values))
            works.append(comm.all_reduce(arrays[-1]))
            works.append(comm.barrier() if number % 4 == 1 else comm.all_gather(np.arange(3)))
        await asyncio.gather(*works)
        for number, each in enumerate(arrays):
            expected = sum(rank + number for rank in range(comm.size))
            found = each if number % 3 == 0 else each.get()
            np.testing.assert_array_equal(found, np.full(1000, expected, np.float32))


async def test_communicators_one_after_the_other_use_the_same_memory(comm: Comm, fake_gpu: Simulated) -> None:
    for _ in range(3):
        async with comm.dup() as other:
            await join(other, fake_gpu)
            x = fake_gpu.array(np.full(4000, comm.rank))
            await other.all_reduce(x)
            check(x, np.full(4000, sum(range(comm.size))))
    assert fake_gpu.shared.log.count("export") == 1
    assert fake_gpu.shared.log.count("open") == comm.size - 1


def shared_array(comm: Comm, gpu: Gpu, values: Any) -> Any:
    """An array in memory that the others reach, which gets these values late."""
    array = comm.empty(values.shape, values.dtype, device="cuda")
    gpu.fill(array, values)
    return array


@pytest.mark.usefixtures("gpus")
async def test_memory_of_the_communicator_goes_through_no_slot(comm: Comm, gpu: Gpu) -> None:
    await join(comm, gpu)
    for count in (1, 7, 5000):
        values = everyone(comm, count, "float32")
        total = reduced("sum", values, "float32")
        for _ in range(2):  # the second time in memory that was used before
            x = shared_array(comm, gpu, values[comm.rank])
            await comm.all_reduce(x)
            check(x, total)
            x, out = (shared_array(comm, gpu, each) for each in (values[comm.rank], np.zeros_like(total)))
            await comm.all_reduce(x, out=out)
            check(out, total)
            check(await comm.all_gather(x), np.stack(values))
            for root in range(comm.size):
                y = shared_array(comm, gpu, values[comm.rank])
                await comm.broadcast(y, root)
                check(y, values[root])
            rows = shared_array(comm, gpu, np.tile(values[comm.rank], comm.size))
            check(await comm.reduce_scatter(rows), total)
            out = shared_array(comm, gpu, np.zeros_like(total))
            await comm.reduce_scatter(rows, out=out)
            check(out, total)
            whole = shared_array(comm, gpu, np.zeros((comm.size, count), np.float32))
            await comm.all_gather(x, out=whole)
            check(whole, np.stack(values))


async def test_memory_of_the_communicator_is_copied_once(comm: Comm, fake_gpu: Simulated) -> None:
    await join(comm, fake_gpu)
    x = shared_array(comm, fake_gpu, np.full(4000, comm.rank, np.float32))
    fake_gpu.copies.clear()
    await comm.broadcast(x, 0)
    assert fake_gpu.copies == ([("between", 16000)] if comm.rank else [])
    check(x, np.zeros(4000, np.float32))
    opened = fake_gpu.shared.log.count("open")
    assert opened == comm.size - 1 + (comm.rank > 0)
    await comm.broadcast(x, 0)
    assert fake_gpu.shared.log.count("open") == opened


async def test_on_one_gpu_one_rank_works_for_all(comm: Comm, fake_gpu: Simulated) -> None:
    fake_gpu.place = 1
    await join(comm, fake_gpu)
    x = shared_array(comm, fake_gpu, np.full(4000, comm.rank, np.float32))
    fake_gpu.copies.clear()
    for turn in range(3):
        await comm.all_reduce(x, "max")
        check(x, np.full(4000, comm.size - 1 + turn, np.float32))
        fake_gpu.fill(x, np.full(4000, comm.rank + turn + 1, np.float32))
    await comm.broadcast(x, 1)
    check(x, np.full(4000, 4, np.float32))
    works = [("fold", 16000)] * 3 + [("between", 16000)] * (comm.size - 1)
    assert fake_gpu.copies == (works if comm.rank == 0 else [])
    opened = fake_gpu.shared.log.count("open")
    assert opened == (comm.size - 1) * (2 if comm.rank == 0 else 1)


async def test_on_one_gpu_private_memory_takes_two_turns_or_goes_through_the_host(
    comm: Comm, fake_gpu: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu.place = 1
    await join(comm, fake_gpu)
    fake_gpu.copies.clear()
    x = fake_gpu.array(np.full(1000, comm.rank))
    await comm.all_reduce(x, "max")
    check(x, np.full(1000, comm.size - 1))
    assert fake_gpu.copies == [("between", 8000), ("fold", 8000)]
    monkeypatch.setattr(straight, "ONE_GPU_FROM", 8001)
    fake_gpu.copies.clear()
    await comm.all_reduce(x)
    check(x, np.full(1000, comm.size * (comm.size - 1)))
    assert fake_gpu.copies == [("out", 8000), ("in", 8000)]
    shared = shared_array(comm, fake_gpu, np.full(1000, comm.rank))
    await comm.all_reduce(shared)
    check(shared, np.full(1000, sum(range(comm.size))))


@pytest.mark.usefixtures("gpus")
async def test_where_some_have_private_memory_all_use_slots(comm: Comm, gpu: Gpu) -> None:
    await join(comm, gpu)
    for turn in range(2 * comm.size):
        values = np.full(3000, comm.rank + turn, np.float64)
        x = gpu.array(values) if comm.rank == turn % comm.size else shared_array(comm, gpu, values)
        await comm.all_reduce(x)
        check(x, np.full(3000, sum(range(comm.size)) + comm.size * turn, np.float64))


async def test_an_array_that_goes_leaves_its_memory_to_the_next(comm: Comm, fake_gpu: Simulated) -> None:
    await join(comm, fake_gpu)
    for turn in range(6):
        x = shared_array(comm, fake_gpu, np.full(1000, turn))
        await comm.all_reduce(x)
        check(x, np.full(1000, turn * comm.size))
        del x
    assert fake_gpu.shared.log.count("export") <= 1 + 2
    assert fake_gpu.shared.log.count("open") <= 3 * (comm.size - 1)


async def test_where_memory_cannot_be_shared_it_is_said_once(
    comm: Comm, fake_gpu: Simulated, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_gpu.shared.can_share = comm.rank != 0
    for _ in range(2):
        async with comm.dup() as other:
            for _ in range(4):
                await join(other, fake_gpu)
            assert not went_straight(fake_gpu)
    said = capsys.readouterr().err
    assert said.count("cannot reach each other's memory on cuda:0") == (comm.rank == 0)


async def test_memory_that_is_not_the_owners_is_noticed(
    comm: Comm, fake_gpu: Simulated, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_gpu.shared.is_garbled = comm.rank == 1
    for _ in range(4):
        await join(comm, fake_gpu)
    assert not went_straight(fake_gpu)
    assert capsys.readouterr().err.count("holds other values") == (comm.rank == 1)


async def test_it_can_be_switched_off(comm: Comm, fake_gpu: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm._channel.engine, "has_ipc", False)
    for _ in range(4):
        await join(comm, fake_gpu)
    assert not went_straight(fake_gpu)
    assert fake_gpu.shared.log == []


async def test_small_arrays_go_through_the_host_and_take_no_memory(
    comm: Comm, fake_gpu: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(straight.IPC_FROM, "all_reduce", 1000)
    for _ in range(4):
        x = fake_gpu.array(np.ones(100))
        await comm.all_reduce(x)
        check(x, np.full(100, float(comm.size)))
    assert fake_gpu.shared.log == []


def test_the_same_where_no_event_loop_runs(comm: Comm, gpu: Gpu) -> None:
    for turn in range(5):
        x = gpu.array(np.full(3000, comm.rank + turn))
        comm.all_reduce(x).wait()
        check(x, np.full(3000, sum(range(comm.size)) + comm.size * turn))


async def test_the_same_where_calls_are_compared_first(comm: Comm, gpu: Gpu) -> None:
    def compared(channel: Any, _op: str, _details: Any, steps: Any, _arguments: Any) -> Any:
        yield channel.transport.ibarrier()
        return (yield from steps)

    comm._channel.check = compared
    for turn in range(5):
        arrays = [gpu.array(np.full(3000, comm.rank + turn)), np.full(10, comm.rank), gpu.array(np.full(7, comm.rank))]
        await asyncio.gather(*(comm.all_reduce(each) for each in arrays))
        check(arrays[0], np.full(3000, sum(range(comm.size)) + comm.size * turn))
        np.testing.assert_array_equal(arrays[1], np.full(10, sum(range(comm.size))))
        check(arrays[2], np.full(7, sum(range(comm.size))))


async def test_calls_that_differ_fail_on_all_ranks_and_the_next_one_works(comm: Comm, fake_gpu: Simulated) -> None:
    await join(comm, fake_gpu)
    with pytest.raises(mpdist.SizeMismatch, match=rf"rank {comm.size - 1}: {8 * (9 + comm.size)}"):
        await comm.all_reduce(fake_gpu.array(np.ones(10 + comm.rank)))
    x = fake_gpu.array(np.ones(10))
    with pytest.raises(mpdist.CollectiveMismatch, match="rank 0: broadcast"):
        await (comm.all_reduce(x) if comm.rank else comm.broadcast(x, 0))
    with pytest.raises(mpdist.CollectiveMismatch, match="differ in src"):
        await comm.broadcast(fake_gpu.array(np.ones(10)), comm.rank % 2)
    fake_gpu.copies.clear()
    await join(comm, fake_gpu)
    assert went_straight(fake_gpu)


async def test_a_device_that_fails_fails_the_collective_on_all_ranks(comm: Comm, fake_gpu: Simulated) -> None:
    await join(comm, fake_gpu)
    x = fake_gpu.array(np.ones(4000))
    error: type[Exception] = mpdist.CommunicationError
    if comm.rank == 0:
        fake_gpu.fails = RuntimeError("the device is gone")
    work = comm.all_reduce(x)
    if comm.rank == 0:
        with pytest.raises(error, match="the device is gone"):
            await work
    else:  # its share may have come in time
        await asyncio.wait([asyncio.ensure_future(asyncio.wait_for(work, 20))])
        with pytest.raises((error, mpdist.ClosedError), match="gave it up"):
            await comm.all_reduce(x)
    with pytest.raises(mpdist.ClosedError):
        comm.barrier()


def interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this rank's next collective fail in its midst, when it has told that its own array is ready."""
    queued: list[object] = []

    def interrupted(marks: Any) -> Any:
        queued.append(marks)
        if len(queued) == 2:
            raise ValueError("as a signal's handler may")
        return copied(marks)

    monkeypatch.setattr(programs, "copied", interrupted)


async def test_after_an_error_nobody_writes_into_others_arrays(
    comm: Comm, fake_gpu: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank works for all: what it has queued is over before the others hear that it has given up."""
    fake_gpu.place = 1
    await join(comm, fake_gpu)
    x = shared_array(comm, fake_gpu, np.full(1000, 1.0))
    if comm.rank == 0:
        interrupt(monkeypatch)
        fake_gpu.program.run(lambda: time.sleep(0.05))
    with pytest.raises(mpdist.CommunicationError if comm.rank == 0 else mpdist.CommRevoked):
        await comm.all_reduce(x)
    then = x.get()
    await asyncio.sleep(0.2)
    np.testing.assert_array_equal(x.get(), then)


async def test_an_array_that_another_may_still_write_is_kept(
    comm: Comm, fake_gpu: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a rank that gives up while another one works for all: its memory serves no other array."""
    fake_gpu.place = 1
    await join(comm, fake_gpu)
    x = shared_array(comm, fake_gpu, np.full(1000, 1.0))
    if comm.rank == 1:
        interrupt(monkeypatch)
    with pytest.raises(mpdist.CommunicationError) if comm.rank == 1 else suppress(mpdist.CommRevoked):
        await comm.all_reduce(x)
    if comm.rank == 1:
        (exports,) = comm._channel.engine.exports.values()
        assert {each.address for each in exports.kept} == {as_buffer(x).address}
