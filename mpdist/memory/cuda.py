"""CUDA: copies between a GPU and the host by CuPy, in the order of the program's own streams.

The one home of CuPy, with what lies beside it; CuPy is loaded when the first array on a GPU comes. An array
says by its library in which stream it is being computed: torch and CuPy have a
current stream, others put it into `__cuda_array_interface__`, or order themselves
when they are asked for a DLPack capsule, as JAX, whose streams no other stream waits for. See
https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html and
https://data-apis.org/array-api/latest/API_specification/generated/array_api.array.__dlpack__.html.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from mpdist.errors import DeviceFailed, UsageError
from mpdist.memory.cuda_errors import Present, failures
from mpdist.memory.cuda_sharing import CudaSharing
from mpdist.memory.mark import OVER

if TYPE_CHECKING:
    from mpdist.memory.buffer import Buffer
    from mpdist.memory.elements import Array
    from mpdist.memory.mark import Mark

# Handle of the stream with which all blocking streams synchronise; the interface calls it 1, torch and CuPy 0.
LEGACY_DEFAULT = 1

_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind
_SUCCESS, _NOT_READY = 0, 600  # cudaError_t
# Fewer bytes the driver brings to the device by the engine that computes, on which processes take turns: 274 us on an
# H100 while another process does the same. Rows of a rectangle always go by one that copies: 13 us (2026-11-22).
_BY_ENGINE = 32 * 1024


class _Attended(threading.local):
    """The GPUs that this thread has used."""

    indices: frozenset[int] = frozenset()


_attended = _Attended()


class Cuda:
    """One GPU: a stream for copies to the host and one for copies from it.

    Attributes:
        cuda, runtime: CuPy's.
        raw_kernel: makes a kernel of its source.
        present: within it this is the thread's present GPU, and what goes wrong there is DeviceFailed.

    Raises:
        ImportError: CuPy is not installed, or finds no driver.
    """

    def __init__(self, index: int) -> None:
        import cupy

        self.cuda: Any = cupy.cuda
        self.runtime: Any = cupy.cuda.runtime
        self.raw_kernel: Any = cupy.RawKernel
        # Kernels are launched by the driver, and compiled by a library of its own.
        self._failure: tuple[type[Exception], ...] = (
            self.runtime.CUDARuntimeError,
            self.cuda.driver.CUDADriverError,
            self.cuda.compiler.CompileException,
            self.cuda.nvrtc.NVRTCError,
        )
        self._device: Any = cupy.cuda.Device(index)
        self._index = index
        self.present = self.active_for()
        self._out, self._in = self.stream(), self.stream()
        self._sharing: CudaSharing | None = None

    def active_for(self, *others: type[Exception]) -> Present:
        """As `present`, and `others` are DeviceFailed, too."""
        return Present(self._device, *self._failure, *others)

    def stream(self) -> Any:
        """A new stream, which waits for no other."""
        with self.present:
            return self.cuda.Stream(non_blocking=True)

    def follow(self, x: Buffer) -> None:
        """See Accelerator."""
        with self.present:
            producer = self._producer(x.owner)
            if producer is None:
                self._ask(x.owner, self._out)
                self._ask(x.owner, self._in)
            elif not self.is_idle(producer):
                event = self._reached(producer)
                for stream in (self._out, self._in):
                    stream.wait_event(event)

    def ready(self, x: Buffer) -> Mark:
        """See Accelerator."""
        with self.present:
            producer = self._producer(x.owner)
            if producer is None:
                self._ask(x.owner, self._out)
                return self.mark(self._out)
            return OVER if self.is_idle(producer) else CudaMark(self._reached(producer), self.runtime)

    def is_idle(self, stream: int) -> bool:
        """Whether all is over that was queued in a stream; in the legacy default one also what that waits for.

        Raises:
            UsageError: it is being recorded.
        """
        if self.runtime.streamIsCapturing(stream):
            raise UsageError(
                f"the array on cuda:{self._index} is being recorded into a CUDA graph, so it has no values yet; "
                "communicate before or after the capture"
            )
        return _is_over(self.runtime, self.runtime.streamQuery(stream))

    def _reached(self, stream: int) -> Any:
        """An event at the present end of a stream."""
        event = self._event()
        self.runtime.eventRecord(event.ptr, stream)
        return event

    def _ask(self, owner: Any, stream: Any) -> None:
        """Let the array's library make a stream of ours wait: a consumer's stream is an argument of the export."""
        owner.__dlpack__(stream=stream.ptr)

    def _producer(self, owner: Any) -> int | None:
        """Handle of the stream in which an array is being computed; None if only its library knows."""
        library = type(owner).__module__.partition(".")[0]
        if library == "cupy":
            return int(self.cuda.get_current_stream().ptr)
        torch: Any = sys.modules.get("torch")
        if torch is not None and isinstance(owner, torch.Tensor):
            return int(torch.cuda.current_stream(self._index).cuda_stream)
        interface = getattr(owner, "__cuda_array_interface__", None)
        if interface is None or ("stream" not in interface and hasattr(owner, "__dlpack__")):
            return None
        return int(interface.get("stream") or LEGACY_DEFAULT)

    def copy_out(self, source: Buffer, start: int, target: Array) -> CudaMark:
        """See Accelerator."""
        self._copy(_address(target), source.address + start, target.nbytes, _TO_HOST, self._out)
        return self.mark(self._out)

    def copy_in(self, source: Array, target: Buffer, start: int) -> CudaMark:
        """See Accelerator."""
        place, address, nbytes = target.address + start, _address(source), source.nbytes
        if nbytes < _BY_ENGINE and nbytes and nbytes % 2 == 0:
            half = nbytes // 2
            with self.present:
                self.runtime.memcpy2DAsync(place, half, address, half, half, 2, _TO_DEVICE, self._in.ptr)
        else:
            self._copy(place, address, nbytes, _TO_DEVICE, self._in)
        return self.mark(self._in)

    def attend(self) -> None:
        """See Accelerator. The first call of the runtime in a thread gives it the GPU's context."""
        if self._index not in _attended.indices:
            with self.present:
                self.runtime.free(0)
            _attended.indices |= {self._index}

    def describe(self) -> str:
        """See Accelerator."""
        name = self.runtime.getDeviceProperties(self._index)["name"]
        return f"{name.decode()}, driver {self.runtime.driverGetVersion()}"

    def identity(self) -> int:
        """See Accelerator: by the GPU's place on the bus, for processes may count their GPUs differently."""
        with self.present:
            place = self.runtime.deviceGetPCIBusId(self._index)
        return int.from_bytes(blake2b(place.encode(), digest_size=8).digest()) >> 1

    def empty(self, shape: Sequence[int], dtype: object) -> object:
        """See Accelerator."""
        import cupy

        with self.present:
            return cupy.empty(tuple(shape), dtype)

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: Any) -> None:
        if nbytes:
            with self.present:
                self.runtime.memcpyAsync(target, source, nbytes, kind, stream.ptr)

    def _event(self) -> Any:
        return self.cuda.Event(block=True, disable_timing=True)

    def mark(self, stream: Any) -> CudaMark:
        """All that is queued in a stream so far."""
        with self.present:
            event = self._event()
            event.record(stream)
        return CudaMark(event, self.runtime)

    def sharing(self) -> CudaSharing:
        """See Accelerator."""
        if self._sharing is None:
            self._sharing = CudaSharing(self)
        return self._sharing

    def entered(self) -> Any:
        """An event after which copies to the device may begin, as far as they have been told to wait; None: now."""
        if _is_over(self.runtime, self.runtime.streamQuery(self._in.ptr)):
            return None
        event = self._event()
        event.record(self._in)
        return event

    def pin(self, memory: Array) -> bool:
        """See Accelerator."""
        with self.present:
            try:
                self.runtime.hostRegister(_address(memory), memory.nbytes, 0)
            except self.runtime.CUDARuntimeError:
                return False
        return True

    def unpin(self, memory: Array) -> None:
        """See Accelerator."""
        # The driver may have ended before us; then nothing is pinned any more.
        with contextlib.suppress(DeviceFailed), self.present:
            self.runtime.hostUnregister(_address(memory))


class CudaMark:
    """A recorded event."""

    __slots__ = ("_event", "_failures", "_runtime")

    def __init__(self, event: Any, runtime: Any) -> None:
        self._event = event
        self._runtime = runtime
        self._failures = failures(runtime.CUDARuntimeError)

    def Test(self) -> bool:
        with self._failures:  # Event.done takes an error for "not yet"
            return _is_over(self._runtime, self._runtime.eventQuery(self._event.ptr))

    def wait(self) -> None:
        with self._failures:
            self._event.synchronize()


def _is_over(runtime: Any, status: int) -> bool:
    """What a query has answered."""
    if status not in (_SUCCESS, _NOT_READY):
        raise runtime.CUDARuntimeError(status)
    return status == _SUCCESS


def _address(memory: Array) -> int:
    return int(memory.__array_interface__["data"][0])
