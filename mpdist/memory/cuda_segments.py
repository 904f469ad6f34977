"""CUDA segments: which allocation of cudaMalloc an address lies in, by the driver, which CuPy does not ask.

See https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__UNIFIED.html and group__CUDA__MEM.html there.
"""

from __future__ import annotations

import ctypes
import threading

# CUpointer_attribute
_BUFFER_ID, _IS_LEGACY_CUDA_IPC_CAPABLE = 7, 10
_ASKED = (ctypes.c_int * 2)(_IS_LEGACY_CUDA_IPC_CAPABLE, _BUFFER_ID)


class _Answer(threading.local):
    """Where a thread is answered; made once, for making it takes longer than asking."""

    def __init__(self) -> None:
        self.is_capable, self.number = ctypes.c_int(0), ctypes.c_uint64(0)
        self.places = (ctypes.c_void_p * 2)(ctypes.addressof(self.is_capable), ctypes.addressof(self.number))


class Driver:
    """The driver's library; the GPU's context is the present one.

    Raises:
        OSError, AttributeError: it is not there, or too old.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._attributes = library.cuPointerGetAttributes
        self._attributes.argtypes = [
            ctypes.c_uint, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint64
        ]  # fmt: skip
        self._answer = _Answer()
        self._range = library.cuMemGetAddressRange_v2
        self._range.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint64]

    def number_of(self, address: int) -> int:
        """Unique for an allocation; 0 for what is none, or has no legacy handle, as what a pool of the driver gives."""
        # What it cannot answer for an address it leaves 0, and succeeds.
        answer = self._answer
        if self._attributes(2, _ASKED, answer.places, address) or not answer.is_capable.value:
            return 0
        return answer.number.value

    def range_of(self, address: int) -> tuple[int, int] | None:
        """Start and size of the allocation."""
        start, nbytes = ctypes.c_uint64(0), ctypes.c_size_t(0)
        if self._range(ctypes.byref(start), ctypes.byref(nbytes), address):
            return None
        return start.value, nbytes.value


def driver() -> Driver | None:
    """The library, where it can tell."""
    try:
        return Driver()
    except (OSError, AttributeError):
        return None
