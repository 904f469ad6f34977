"""Kernels, copies and events on a real GPU, in one process; between processes: comm/test_device_ipc.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from memory.test_cuda_kernels import CASES, SOURCES, assert_same, values_of

from mpdist.errors import DeviceFailed
from mpdist.memory.cuda import Cuda
from mpdist.memory.sharing import HANDLE_BYTES, Export, Lane

pytestmark = pytest.mark.gpu

NBYTES = 1 << 22
SPIN = r"""
extern "C" __global__ void spin(long long ticks) {
    long long start = clock64();
    while (clock64() - start < ticks) {}
}
"""
SPIN_TICKS = 50_000_000


@pytest.fixture
def gpu() -> Cuda:
    return Cuda(0)


@pytest.fixture
def block(gpu: Cuda) -> Iterator[Export]:
    block = gpu.sharing().export(NBYTES)
    yield block
    gpu.sharing().release(block)


def put(values: Any, address: int) -> None:
    import cupy

    cupy.cuda.runtime.memcpy(address, values.ctypes.data, values.nbytes, 1)
    cupy.cuda.runtime.deviceSynchronize()  # which returns when it has read the values


def get(like: Any, address: int) -> Any:
    import cupy

    values = np.empty_like(like)
    cupy.cuda.runtime.memcpy(values.ctypes.data, address, values.nbytes, 2)
    return values


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{CASES[i][1].name}")
def test_a_kernel_gives_what_the_host_gives(gpu: Cuda, block: Export, number: int) -> None:
    _, element, folder = CASES[number]
    lane = gpu.sharing().lane()
    for count, offset in ((1, 0), (7, 1), (1000, 0), (1000, 1), (33_333, 0)):
        xs = [values_of(element, count, 10 * count + index) for index in range(SOURCES)]
        expected = np.empty_like(xs[0])
        folder.fold(xs, [expected])
        step = -(-(xs[0].nbytes + 32) // 16) * 16
        places = [block.address + index * step + offset * element.itemsize for index in range(SOURCES + 1)]
        for x, place in zip(xs, places, strict=False):
            put(x, place)
        lane.fold(folder, places[:SOURCES], [places[SOURCES], places[1]], count)
        lane.mark().wait()
        assert_same(get(expected, places[SOURCES]), expected, element)
        assert_same(get(expected, places[1]), expected, element)


def test_an_event_orders_two_streams(gpu: Cuda, block: Export) -> None:
    import cupy

    sharing = gpu.sharing()
    first, second = sharing.lane(), sharing.lane()
    event = sharing.signal()
    assert len(event.handle) == len(block.handle) == HANDLE_BYTES
    old, new = np.zeros(1000), np.arange(1000.0)
    put(new, block.address)
    put(old, block.address + 8192)
    _spin(cupy, first)
    first.copy(block.address, block.address + 8192, new.nbytes)
    first.record(event.event)
    second.wait(event.event)
    second.copy(block.address + 8192, block.address + 16384, new.nbytes)
    second.mark().wait()
    np.testing.assert_array_equal(get(new, block.address + 16384), new)
    sharing.close_signal(event.event)


def _spin(cupy: Any, lane: Lane) -> None:
    with lane._stream:  # type: ignore[attr-defined]  # of CudaLane
        cupy.RawKernel(SPIN, "spin")((1,), (1,), (np.int64(SPIN_TICKS),))


def test_a_block_cannot_be_opened_by_its_own_process(gpu: Cuda, block: Export) -> None:
    with pytest.raises(DeviceFailed):
        gpu.sharing().open(block.handle)


def test_memory_of_cupys_pool_has_a_number_of_its_own_as_long_as_the_pool_has_it(gpu: Cuda) -> None:
    import cupy

    sharing = gpu.sharing()
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        x, y = cupy.zeros(1 << 20, np.uint8), cupy.zeros(1 << 25, np.uint8)
        first, second = sharing.number_of(x.data.ptr), sharing.number_of(y.data.ptr)
        assert 0 not in (first, second)
        assert first != second
        segment = sharing.segment(y.data.ptr + 1000)
        assert segment is not None
        assert (segment.start <= y.data.ptr, segment.number, len(segment.handle)) == (True, second, HANDLE_BYTES)
        assert segment.start + segment.nbytes >= y.data.ptr + y.nbytes
        address = y.data.ptr
        del y
        assert sharing.number_of(address) == second
        pool.free_all_blocks()
    assert sharing.number_of(address) != second


def test_what_cuda_has_no_handle_for_has_no_number(gpu: Cuda) -> None:
    import cupy

    managed = cupy.cuda.malloc_managed(1 << 20)
    assert gpu.sharing().number_of(managed.ptr) == 0
    assert gpu.sharing().number_of(np.zeros(10).ctypes.data) == 0


def test_an_array_in_a_block_keeps_its_owner(gpu: Cuda, block: Export) -> None:
    owner = Owner()
    x: Any = gpu.sharing().array(block, (2, 3), np.dtype(np.float32), owner)
    x[...] = 5
    assert x.data.ptr == block.address
    np.testing.assert_array_equal(x.get(), np.full((2, 3), 5, np.float32))
    gone: list[bool] = owner.gone
    del owner
    assert not gone
    del x
    assert gone


class Owner:
    def __init__(self) -> None:
        self.gone: list[bool] = []

    def __del__(self) -> None:
        self.gone.append(True)


def test_a_stream_with_work_or_something_to_wait_for_is_not_idle(gpu: Cuda) -> None:
    import cupy

    blocking, other = cupy.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    kernel = cupy.RawKernel(SPIN, "spin")
    kernel((1,), (1,), (np.int64(1),), stream=blocking)
    cupy.cuda.runtime.deviceSynchronize()
    assert all(gpu.is_idle(each) for each in (0, 1, blocking.ptr, other.ptr))
    kernel((1,), (1,), (np.int64(20 * SPIN_TICKS),), stream=blocking)
    assert not gpu.is_idle(blocking.ptr)
    assert not gpu.is_idle(0)  # with which all blocking streams synchronise
    assert not gpu.is_idle(1)
    assert gpu.is_idle(other.ptr)
    other.wait_event(blocking.record())
    assert not gpu.is_idle(other.ptr)
    blocking.synchronize()
    other.synchronize()
    assert all(gpu.is_idle(each) for each in (0, 1, blocking.ptr, other.ptr))
