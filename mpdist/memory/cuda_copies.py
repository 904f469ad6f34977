"""CUDA copies: by a kernel, where what is copied is small and the GPU reaches both sides.

The engines of a GPU that copy serve the processes on it by turns, and a turn is long: on an
H100 4 KiB from the host take 18 us, and 274 us while another process copies, too. Kernels
of several processes hinder each other little. What is large goes by the engines, which take no
place from the program's kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.errors import DeviceFailed
from mpdist.memory import cuda_kernels as kernels

if TYPE_CHECKING:
    from mpdist.memory.cuda import Cuda

# Bytes up to which a kernel copies between devices, and from pinned host memory.
BETWEEN_DEVICES = 64 * 1024 * 1024
FROM_HOST = 1024 * 1024

_CAN_USE_HOST_POINTER = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem


class Copies:
    """Those of one GPU."""

    def __init__(self, gpu: Cuda, index: int) -> None:
        self._gpu = gpu
        # What compiles, and its headers, are found when first needed, or are not.
        self._present = gpu.active_for(ImportError, OSError, RuntimeError)
        self._kernel: Any = None
        self._has_failed = False
        with gpu.present:
            self._reaches_host = bool(gpu.runtime.deviceGetAttribute(_CAN_USE_HOST_POINTER, index))
        self._pinned: dict[int, int] = {}

    def pinned(self, address: int, nbytes: int) -> None:
        """The GPU reaches this host memory."""
        self._pinned[address] = nbytes

    def unpinned(self, address: int) -> None:
        """It will not for long."""
        self._pinned.pop(address, None)

    def between_devices(self, source: int, target: int, nbytes: int, stream: Any) -> bool:
        """Queue a copy between memory of devices; False if it has to go another way."""
        return nbytes <= BETWEEN_DEVICES and self._launched(source, target, nbytes, stream)

    def from_host(self, source: int, target: int, nbytes: int, stream: Any) -> bool:
        """Queue a copy from host memory; False if it has to go another way."""
        return (
            nbytes <= FROM_HOST
            and self._reaches_host
            and any(0 <= source - start <= size - nbytes for start, size in list(self._pinned.items()))
            and self._launched(source, target, nbytes, stream)
        )

    def _launched(self, source: int, target: int, nbytes: int, stream: Any) -> bool:
        if self._has_failed or not nbytes or not kernels.are_aligned((source, target)):
            return False
        try:
            with self._present:
                if self._kernel is None:
                    self._kernel = self._gpu.raw_kernel(kernels.COPY, kernels.COPY_NAME)
                arguments = np.uint64(source), np.uint64(target), np.int64(nbytes)
                self._kernel((kernels.copy_blocks(nbytes),), (kernels.THREADS,), arguments, stream=stream)
        except DeviceFailed:
            self._has_failed = True
        return not self._has_failed
