"""GradientAverager on arrays of a device: what comes late is waited for, and the results are there."""

from __future__ import annotations

import asyncio
import gc
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from comm.devices import Gpu
from memory.simulated import DEVICE, DeviceArray, Simulated

import mpdist
from mpdist import Communicator, GradientAverager
from mpdist.comm.staging import pinned_of

pytestmark = pytest.mark.ranks(1, 2, 3)

SHAPES = [(3,), (2, 5), (), (40_000,), (0,), (7, 1)]


def values(step: int, rank: int, dtype: str) -> list[Any]:
    return [np.full(shape, (index + 1) * (rank + 1) + 8 * step, dtype) for index, shape in enumerate(SHAPES)]


def mean(step: int, size: int, index: int) -> float:
    return (index + 1) * (size + 1) / 2 + 8 * step


@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
async def test_arrays_hold_the_mean_after_each_step(
    comm: Communicator, gpu: Gpu, dtype: str, bucket_bytes: int
) -> None:
    averager = GradientAverager(comm, [gpu.array(x) for x in values(0, comm.rank, dtype)], bucket_bytes=bucket_bytes)
    for step in range(3):
        arrays = [gpu.array(x) for x in values(step, comm.rank, dtype)]
        for index in reversed(range(len(arrays))):
            averager.ready(index, arrays[index])
        for index, (x, result) in enumerate(zip(arrays, await averager, strict=True)):
            assert result is x
            np.testing.assert_array_equal(x.get(), np.full(SHAPES[index], mean(step, comm.size, index), dtype))


async def test_an_array_that_gets_other_memory_while_its_step_is_under_way_holds_the_mean(
    comm: Communicator, fake_gpu: Simulated
) -> None:
    averager = GradientAverager(comm, [fake_gpu.array(np.full(5, comm.rank))], op="sum")
    await averager
    for step in range(3):
        x, other = fake_gpu.array(np.full(5, comm.rank + step)), fake_gpu.empty((5,), int)
        averager.ready(0, x)
        fake_gpu.settle()
        x._values = other._values  # as `tensor.data = ...` does
        await averager
        np.testing.assert_array_equal(x.get(), np.full(5, sum(range(step, step + comm.size))))


def test_the_same_where_no_event_loop_runs(comm: Communicator, gpu: Gpu) -> None:
    arrays = [gpu.array(x) for x in values(1, comm.rank, "float32")]
    GradientAverager(comm, arrays).wait()
    for index, x in enumerate(arrays):
        np.testing.assert_array_equal(x.get(), np.full(SHAPES[index], mean(1, comm.size, index), np.float32))


async def test_arrays_of_the_host_and_of_a_device(comm: Communicator, gpu: Gpu) -> None:
    there = [index % 2 == 0 for index in range(len(SHAPES))]
    arrays = [gpu.array(x) if on else x for x, on in zip(values(0, comm.rank, "float64"), there, strict=True)]
    tree = await mpdist.average(comm, {"all": arrays})
    for index, x in enumerate(tree["all"]):
        assert x is arrays[index]
        np.testing.assert_array_equal(x.get() if there[index] else x, np.full(SHAPES[index], mean(0, comm.size, index)))


async def test_arrays_that_cannot_be_written_come_back_new(comm: Communicator, fake_gpu: Simulated) -> None:
    x = fake_gpu.array(np.full(5, float(comm.rank)))
    seen = x._values.view()
    seen.flags.writeable = False
    (result,) = await GradientAverager(comm, [DeviceArray(seen)])
    np.testing.assert_array_equal(result.get(), np.full(5, (comm.size - 1) / 2))
    np.testing.assert_array_equal(x.get(), np.full(5, float(comm.rank)))


async def test_the_host_memory_is_pinned_and_goes_back(comm: Communicator, fake_gpu: Simulated) -> None:
    averager = GradientAverager(comm, [fake_gpu.array(np.ones(1000))])
    for _ in range(3):
        await averager
    assert len(fake_gpu.pinned) == 1
    assert fake_gpu.copies == [("out", 8000), ("in", 8000)] * 3
    del averager
    gc.collect()
    assert await comm.all_reduce(x := fake_gpu.array(np.ones(1000))) is x
    assert len(fake_gpu.pinned) == 1


async def test_memory_does_not_go_back_while_it_is_copied_to(comm: Communicator, fake_gpu: Simulated) -> None:
    """A loop that breaks off in the middle of a step drops its averager."""
    averager = GradientAverager(comm, [fake_gpu.array(np.ones(1000)), fake_gpu.array(np.ones(1000))])
    await averager
    fake_gpu.program.run(lambda: time.sleep(0.05))
    averager.ready(0, fake_gpu.array(np.full(1000, 5.0)))
    pinned = pinned_of(comm._channel.engine, DEVICE)
    del averager
    gc.collect()
    loan = pinned.lend(16_000)
    loan.bytes[:] = 7
    await asyncio.sleep(0.2)
    assert (loan.bytes == 7).all()


async def test_an_array_that_was_not_taken_may_be_ready_again(comm: Communicator, fake_gpu: Simulated) -> None:
    x = fake_gpu.array(np.full(3, float(comm.rank)))
    averager = GradientAverager(comm, [x])
    for _ in range(2):
        fake_gpu.is_capturing = True
        with pytest.raises(mpdist.UsageError, match="CUDA graph"):
            averager.ready(0)
        fake_gpu.is_capturing = False
        averager.ready(0, fake_gpu.array(np.full(3, float(comm.rank))))
        (x,) = await averager
        np.testing.assert_array_equal(x.get(), np.full(3, (comm.size - 1) / 2))


def test_ready_may_come_from_any_thread(comm: Communicator, gpu: Gpu) -> None:
    averager = GradientAverager(comm, [gpu.array(x) for x in values(0, comm.rank, "float32")], bucket_bytes=1)
    for step in range(3):
        arrays = [gpu.array(x) for x in values(step, comm.rank, "float32")]
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(averager.ready, range(len(arrays)), arrays))
        averager.wait()
        for index, x in enumerate(arrays):
            np.testing.assert_array_equal(x.get(), np.full(SHAPES[index], mean(step, comm.size, index), np.float32))


async def test_a_failed_copy_is_an_error_of_the_step(comm: Communicator, fake_gpu: Simulated) -> None:
    averager = GradientAverager(comm, [fake_gpu.array(np.ones(10))])
    await averager
    fake_gpu.fails = RuntimeError("the device is gone")
    with pytest.raises(mpdist.CommunicationError, match="the device is gone"):
        await averager


async def test_what_does_not_fit_is_told(comm: Communicator, fake_gpu: Simulated) -> None:
    with pytest.raises(mpdist.UsageError, match="compress is 'float16', which is for arrays in host memory"):
        GradientAverager(comm, [fake_gpu.array(np.ones(2))], compress="float16")
    averager = GradientAverager(comm, [np.ones(2)])
    with pytest.raises(mpdist.SizeMismatch, match=r"float64 \(2,\) on cuda:0, it was float64 \(2,\);"):
        averager.ready(0, fake_gpu.array(np.ones(2)))
    await averager


async def test_a_rank_whose_array_is_elsewhere_is_told(comm: Communicator, fake_gpu: Simulated) -> None:
    x = np.ones(2)
    arrays = [fake_gpu.array(x) if comm.rank == 0 else x]
    if comm.size == 1:
        await GradientAverager(comm, arrays)
        return
    with pytest.raises(mpdist.CollectiveMismatch, match=r"float64 \(2,\) on device 0"):
        await GradientAverager(comm, arrays)
