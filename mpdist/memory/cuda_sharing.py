"""CUDA IPC by CuPy: memory and events that several processes share, and work on them; see Sharing.

Blocks are of cudaMalloc, as segments of CuPy's and of torch's pools are; what
cudaMallocAsync, expandable segments or managed memory give has no handle. See https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__DEVICE.html.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.errors import DeviceFailed
from mpdist.memory import cuda_kernels as kernels
from mpdist.memory import cuda_segments
from mpdist.memory.segments import Segment
from mpdist.memory.sharing import Export, Signal

if TYPE_CHECKING:
    from mpdist.memory.cuda import Cuda, CudaMark
    from mpdist.memory.folding import Folder

# cudaMemcpyKind: found out by the addresses, which may be of two devices.
_ANYWHERE = 4


class CudaSharing:
    """One GPU."""

    def __init__(self, gpu: Cuda) -> None:
        self._gpu = gpu
        self._runtime = gpu.runtime
        self._own: dict[int, Any] = {}  # events: CuPy destroys one that nobody holds
        self._kernels: dict[tuple[object, ...], Any] = {}

    def export(self, nbytes: int) -> Export:
        """See Sharing."""
        with self._gpu.present:
            address = self._runtime.malloc(nbytes)
            try:
                return Export(address, nbytes, self._runtime.ipcGetMemHandle(address))
            except BaseException:
                self._runtime.free(address)
                raise

    def release(self, export: Export) -> None:
        """See Sharing."""
        with self._gpu.present:
            self._runtime.free(export.address)

    def array(self, block: Export, shape: Sequence[int], dtype: np.dtype[np.generic], owner: object) -> object:
        """See Sharing."""
        import cupy

        with self._gpu.present:
            memory = self._gpu.cuda.UnownedMemory(block.address, block.nbytes, owner)
            return cupy.ndarray(tuple(shape), dtype, self._gpu.cuda.MemoryPointer(memory, 0))

    def settle(self) -> None:
        """See Sharing."""
        with self._gpu.present:
            self._runtime.deviceSynchronize()

    @cached_property
    def _driver(self) -> cuda_segments.Driver | None:
        return cuda_segments.driver()

    def number_of(self, address: int) -> int:
        """See Sharing."""
        if self._driver is None:
            return 0
        with self._gpu.present:
            return self._driver.number_of(address)

    def segment(self, address: int) -> Segment | None:
        """See Sharing."""
        assert self._driver is not None
        with suppress(DeviceFailed), self._gpu.present:
            found, number = self._driver.range_of(address), self._driver.number_of(address)
            if found is not None and number:
                start, nbytes = found
                return Segment(start, nbytes, self._runtime.ipcGetMemHandle(start), number)
        return None

    def open(self, handle: bytes) -> int:
        """See Sharing."""
        with self._gpu.present:
            return int(self._runtime.ipcOpenMemHandle(handle))  # peer access is enabled with it

    def close(self, address: int) -> None:
        """See Sharing."""
        with self._gpu.present:
            self._runtime.ipcCloseMemHandle(address)

    def signal(self) -> Signal:
        """See Sharing."""
        with self._gpu.present:
            event = self._gpu.cuda.Event(disable_timing=True, interprocess=True)
            self._own[event.ptr] = event
            return Signal(event.ptr, self._runtime.ipcGetEventHandle(event.ptr))

    def open_signal(self, handle: bytes) -> int:
        """See Sharing."""
        with self._gpu.present:
            return int(self._runtime.ipcOpenEventHandle(handle))

    def close_signal(self, event: int) -> None:
        """See Sharing."""
        if self._own.pop(event, None) is None:
            with self._gpu.present:
                self._runtime.eventDestroy(event)

    def lane(self) -> CudaLane:
        """See Sharing."""
        return CudaLane(self._gpu, self)

    def kernel(self, folder: Folder, sources: int, targets: int) -> Any:
        """The kernel that reduces; compiled when it is first called, and cached by CuPy."""
        key = folder.op.name, folder.element.code, kernels.divides(folder), sources, targets
        known = self._kernels.get(key)
        if known is None:
            text = kernels.source(folder, sources, targets)
            known = self._kernels[key] = self._gpu.raw_kernel(text, kernels.NAME, kernels.FLAGS)
        return known


class CudaLane:
    """A stream."""

    def __init__(self, gpu: Cuda, sharing: CudaSharing) -> None:
        self._gpu = gpu
        self._runtime = gpu.runtime
        self._sharing = sharing
        self._stream = gpu.stream()
        # What compiles, and its headers, are found when first needed, or are not.
        self._present = gpu.active_for(ImportError, OSError, RuntimeError)

    def follow(self) -> None:
        """See Lane."""
        with self._gpu.present:
            entered = self._gpu.entered()
            if entered is not None:
                self._stream.wait_event(entered)

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """See Lane."""
        with self._gpu.present:
            self._runtime.memcpyAsync(target, source, nbytes, _ANYWHERE, self._stream.ptr)

    def fold(self, folder: Folder, sources: Sequence[int], targets: Sequence[int], count: int) -> None:
        """See Lane."""
        element = folder.element
        addresses = [*sources, *targets]
        arguments = (
            *(np.uint64(address) for address in addresses),
            np.int64(count),
            np.int32(kernels.are_aligned(addresses)),
            kernels.real_of(element)(folder.terms or 1),
            *(folder.factors or ()),
        )
        with self._present:
            kernel = self._sharing.kernel(folder, len(sources), len(targets))
            kernel((kernels.blocks(element, count),), (kernels.THREADS,), arguments, stream=self._stream)

    def record(self, event: int) -> None:
        """See Lane."""
        with self._gpu.present:
            self._runtime.eventRecord(event, self._stream.ptr)

    def wait(self, event: int) -> None:
        """See Lane."""
        with self._gpu.present:
            self._runtime.streamWaitEvent(self._stream.ptr, event)

    def mark(self) -> CudaMark:
        """See Lane."""
        return self._gpu.mark(self._stream)
