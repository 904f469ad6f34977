"""GPUs for tests: a simulated one everywhere, and CuPy's where there is one.

Both give arrays whose values come late, in the program's own stream: whoever does
not wait for that stream communicates what was there before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
import pytest
from memory.simulated import Simulated, simulated

import mpdist
from mpdist.config import DEVICE_OPERATIONS
from mpdist.transport.cuda_aware import Awareness

SPIN = r"""
extern "C" __global__ void spin(long long ticks) {
    long long start = clock64();
    while (clock64() - start < ticks) {}
}
"""
# A few milliseconds at 1 to 2 GHz.
SPIN_TICKS = 5_000_000


class Gpu(Protocol):
    def array(self, values: Any) -> Any:
        """An array there that gets these values late."""

    def fill(self, array: Any, values: Any) -> None:
        """Give an array there these values, late."""

    def private(self, shape: Sequence[int], dtype: Any) -> Any:
        """A new array in memory that has no handle."""

    def pooled(self, shape: Sequence[int], dtype: Any) -> Any:
        """A new array of the program's own library, in a segment of its pool."""

    def give_back_all(self) -> object:
        """The pool's segments without an array go back to the driver, also those that others have open."""


class CupyGpu:
    def __init__(self) -> None:
        import cupy

        self._cupy: Any = cupy
        self._spin = cupy.RawKernel(SPIN, "spin")
        runtime: Any = cupy.cuda.runtime
        has_pools = runtime.deviceGetAttribute(runtime.cudaDevAttrMemoryPoolsSupported, 0)
        self._without_handle = cupy.cuda.malloc_async if has_pools else cupy.cuda.malloc_managed

    def array(self, values: Any) -> Any:
        there = self._cupy.asarray(np.asarray(values))
        late = self._cupy.zeros_like(there)
        self.fill(late, there)
        return late

    def fill(self, array: Any, values: Any) -> None:
        there = self._cupy.asarray(values)
        self._spin((1,), (1,), (np.int64(SPIN_TICKS),))
        array[...] = there

    def private(self, shape: Sequence[int], dtype: Any) -> Any:
        with self._cupy.cuda.using_allocator(self._without_handle):
            return self._cupy.empty(tuple(shape), dtype)

    def pooled(self, shape: Sequence[int], dtype: Any) -> Any:
        pool = self._cupy.get_default_memory_pool()
        with self._cupy.cuda.using_allocator(pool.malloc):
            return self._cupy.empty(tuple(shape), dtype)

    def give_back_all(self) -> None:
        self._cupy.cuda.runtime.deviceSynchronize()  # copies from and to that memory may still be queued
        self._cupy.get_default_memory_pool().free_all_blocks()


@contextmanager
def opened(name: str, **options: Any) -> Iterator[Gpu]:
    """Options are those of the simulated one."""
    if name == "cupy":
        yield CupyGpu()
        return
    with simulated(**options) as gpu:
        yield gpu


HOMES = ("own", "pooled", "shared")
"""Whose memory arrays are in: the program's, which has no handle or one, or the communicator's."""


def maker(comm: mpdist.Communicator, gpu: Gpu, home: str = "own") -> Callable[..., Any]:
    """What makes an array of a shape and a dtype there."""
    return {"own": gpu.private, "pooled": gpu.pooled, "shared": partial(comm.empty, device="cuda")}[home]


def there(comm: mpdist.Communicator, gpu: Gpu, values: Any, home: str = "own") -> Any:
    """An array on the GPU that gets these values late."""
    array = maker(comm, gpu, home)(values.shape, values.dtype)
    gpu.fill(array, values)
    return array


def forget(comm: mpdist.Communicator) -> None:
    """What was made for another GPU."""
    engine = comm._channel.engine
    for pinned in engine.staging.values():
        pinned.close()
    engine.staging.clear()
    engine.exports.clear()
    engine.given.clear()
    for channel in engine.channels:
        if channel.showing is not None:
            channel.showing.close(together=False)
            channel.showing = None


# MPI takes the memory of the second one: it is the host's.
GPUS = ["simulated", "given", pytest.param("cupy", marks=pytest.mark.gpu)]


@pytest.fixture(params=GPUS)
def gpu(request: pytest.FixtureRequest, comm: mpdist.Communicator) -> Iterator[Gpu]:
    """Each of them."""
    engine = comm._channel.engine
    before = engine.awareness
    if request.param == "given":
        engine.awareness = Awareness(",".join(DEVICE_OPERATIONS))
    forget(comm)
    with opened(request.param) as found:
        yield found
    forget(comm)
    engine.awareness = before


@pytest.fixture
def fake_gpu(comm: mpdist.Communicator) -> Iterator[Simulated]:
    """The simulated one, which can also be told to fail."""
    forget(comm)
    with simulated() as found:
        yield found
    forget(comm)
