"""Cuda: which stream it waits for, and what it asks of CuPy; CuPy itself is a list of calls here."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpdist.errors import DeviceFailed, Unavailable, UsageError
from mpdist.memory import Device, accelerator, as_buffer, cuda
from mpdist.memory.accelerator import accelerator_of
from mpdist.memory.cuda import Cuda
from mpdist.memory.cuda_errors import failures

OUT, IN, CURRENT = 101, 102, 77


class Recorded:
    """A cupy that writes down what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.capturing: int | None = None
        self.status = 0
        self.is_busy = True
        self.streams = itertools.cycle((OUT, IN))
        self.events = 0

    def module(self) -> ModuleType:
        runtime = SimpleNamespace(
            CUDARuntimeError=RuntimeError,
            eventRecord=lambda event, stream: self.calls.append(("record", event, stream)),
            memcpyAsync=lambda *arguments: self.calls.append(("copy", *arguments)),
            memcpy2DAsync=lambda *arguments: self.calls.append(("rows", *arguments)),
            streamIsCapturing=lambda stream: stream == self.capturing,
            hostRegister=self._refuse,
            hostUnregister=self._refuse,
            free=lambda address: self.calls.append(("free", address)),
            eventQuery=lambda event: self.status,
            streamQuery=lambda stream: 600 if self.is_busy else 0,
            getDeviceProperties=lambda index: {"name": f"GPU {index}".encode()},
            driverGetVersion=lambda: 12080,
        )
        cupy = ModuleType("cupy")
        cupy.cuda = SimpleNamespace(  # type: ignore[attr-defined]
            runtime=runtime, Device=Nothing, Stream=self._stream, Event=self._event,
            get_current_stream=lambda: SimpleNamespace(ptr=CURRENT),
            driver=SimpleNamespace(CUDADriverError=RuntimeError), nvrtc=SimpleNamespace(NVRTCError=RuntimeError),
            compiler=SimpleNamespace(CompileException=RuntimeError),
        )  # fmt: skip
        cupy.RawKernel = None  # type: ignore[attr-defined]
        cupy.empty = np.empty  # type: ignore[attr-defined]
        return cupy

    def _refuse(self, *_: object) -> None:
        raise RuntimeError("not allowed")

    def _stream(self, *, non_blocking: bool) -> Any:
        assert non_blocking  # else it would wait for all of the legacy default stream
        number = next(self.streams)
        return SimpleNamespace(ptr=number, wait_event=lambda event: self.calls.append(("wait", number, event.ptr)))

    def _event(self, **_: bool) -> Any:
        self.events += 1
        number = self.events
        return SimpleNamespace(ptr=number, record=lambda stream: self.calls.append(("record", number, stream.ptr)))


class Nothing:
    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    recorded = Recorded()
    monkeypatch.setitem(sys.modules, "cupy", recorded.module())
    return recorded


class Array:
    """Of no library that is known."""

    def __init__(self, **interface: Any) -> None:
        self.__cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (4096, False), **interface}


class CupyArray(Array):
    __module__ = "cupy"


class Exporting:
    """An array that orders itself when it is exported."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __dlpack__(self, *, stream: int) -> object:
        self.asked.append(stream)
        return object()


@pytest.mark.parametrize(
    ("x", "producer"),
    [
        pytest.param(CupyArray(), CURRENT, id="cupy: the current stream"),
        pytest.param(Array(version=3, stream=55), 55, id="a stream that is named"),
        pytest.param(Array(version=3, stream=2), 2, id="the stream of the thread"),
        pytest.param(Array(version=3, stream=None), 1, id="none is named"),
        pytest.param(Array(version=2), 1, id="an interface that knows no streams"),
    ],
)
def test_both_streams_wait_for_the_producers(cupy: Recorded, x: Array, producer: int) -> None:
    Cuda(0).follow(as_buffer(x))
    assert cupy.calls == [("record", 1, producer), ("wait", OUT, 1), ("wait", IN, 1)]


def test_a_library_that_orders_by_export_is_asked_for_both_streams(cupy: Recorded) -> None:
    x = Exporting()
    buffer = as_buffer(Array())
    buffer.owner = x
    Cuda(0).follow(buffer)
    assert x.asked == [OUT, IN]


class Unnamed(Array, Exporting):
    """An array that can order itself, and whose interface names no stream: JAX's."""

    def __init__(self, **interface: Any) -> None:
        Array.__init__(self, **interface)
        Exporting.__init__(self)


def test_a_library_that_names_no_stream_is_asked_where_it_can_be(cupy: Recorded) -> None:
    gpu, x = Cuda(0), Unnamed(version=2)
    gpu.follow(as_buffer(x))
    gpu.ready(as_buffer(x))
    assert x.asked == [OUT, IN, OUT]
    x = Unnamed(version=3, stream=55)
    cupy.calls.clear()
    gpu.follow(as_buffer(x))
    assert not x.asked
    assert cupy.calls[0][2] == 55


def test_an_array_of_a_graph_that_is_being_recorded_is_refused(cupy: Recorded) -> None:
    cupy.capturing = CURRENT
    with pytest.raises(UsageError, match="CUDA graph"):
        Cuda(0).follow(as_buffer(CupyArray()))
    assert not cupy.calls


def test_an_array_is_ready_when_its_stream_has_come_so_far(cupy: Recorded) -> None:
    gpu = Cuda(0)
    assert gpu.ready(as_buffer(CupyArray())).Test()
    assert cupy.calls == [("record", 1, CURRENT)]
    cupy.capturing = CURRENT
    with pytest.raises(UsageError, match="CUDA graph"):
        gpu.ready(as_buffer(CupyArray()))


@pytest.mark.parametrize("status", [1, 700, 719])
def test_a_mark_tells_of_a_device_that_has_failed(cupy: Recorded, status: int) -> None:
    mark = Cuda(0).ready(as_buffer(CupyArray()))
    cupy.status = 600  # not ready
    assert not mark.Test()
    cupy.status = status
    with pytest.raises(DeviceFailed, match=f"work on the GPU failed: RuntimeError: {status}"):
        mark.Test()


def test_an_array_whose_library_orders_by_export_is_ready_when_a_stream_of_ours_is(cupy: Recorded) -> None:
    buffer = as_buffer(Array())
    buffer.owner = x = Exporting()
    assert Cuda(0).ready(buffer).Test()
    assert x.asked == [OUT]
    assert cupy.calls == [("record", 1, OUT)]


def test_each_thread_begins_to_use_the_gpu_once(cupy: Recorded) -> None:
    gpus = [Cuda(0), Cuda(0)]

    def attend() -> None:
        for gpu in gpus:
            gpu.attend()
            gpu.attend()

    for _ in range(2):
        thread = threading.Thread(target=attend)
        thread.start()
        thread.join()
    assert cupy.calls == [("free", 0)] * 2


def test_the_gpu_and_its_driver_are_named(cupy: Recorded) -> None:
    assert Cuda(0).describe() == "GPU 0, driver 12080"


def test_copies_go_by_streams_of_their_own_and_are_marked(cupy: Recorded) -> None:
    host = np.zeros(8, np.uint8)
    address = host.__array_interface__["data"][0]
    gpu, x = Cuda(0), as_buffer(Array())
    assert gpu.copy_out(x, 4, host).Test()
    gpu.copy_in(host, x, 8)
    assert cupy.calls == [
        ("copy", address, 4100, 8, 2, OUT),
        ("record", 1, OUT),
        ("rows", 4104, 4, address, 4, 4, 2, 1, IN),
        ("record", 2, IN),
    ]


@pytest.mark.parametrize(("nbytes", "way"), [(8, "rows"), (7, "copy"), (2**15 - 2, "rows"), (2**15, "copy")])
def test_few_bytes_go_to_the_device_by_an_engine_that_copies(cupy: Recorded, nbytes: int, way: str) -> None:
    host = np.zeros(nbytes, np.uint8)
    address = host.__array_interface__["data"][0]
    Cuda(0).copy_in(host, as_buffer(Array()), 8)
    half = nbytes // 2
    rows = ("rows", 4104, half, address, half, half, 2, 1, IN)
    assert cupy.calls[0] == (rows if way == "rows" else ("copy", 4104, address, nbytes, 1, IN))


@pytest.mark.parametrize("way", ["follow", "ready"])
def test_where_the_producer_is_idle_nothing_is_queued(cupy: Recorded, way: str) -> None:
    cupy.is_busy = False
    mark = getattr(Cuda(0), way)(as_buffer(CupyArray()))
    assert not cupy.calls
    if way == "ready":
        mark.wait()
        assert mark.Test()


def test_memory_that_cannot_be_pinned_is_told(cupy: Recorded) -> None:
    gpu = Cuda(0)
    assert not gpu.pin(np.zeros(8, np.uint8))
    gpu.unpin(np.zeros(8, np.uint8))


def test_a_gpu_that_cannot_be_made_present_has_failed(cupy: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, memory = Cuda(0), np.zeros(8, np.uint8)

    def refuse(*_: object) -> None:
        raise RuntimeError("an earlier kernel has failed")

    for way in ("__enter__", "__exit__"):
        with monkeypatch.context() as patch:
            patch.setattr(Nothing, way, refuse)
            patch.setattr(cuda, "_attended", cuda._Attended())
            gpu.unpin(memory)  # it may be gone before us
            for use in (gpu.attend, lambda: gpu.pin(memory), lambda: gpu.empty((3,), "f4")):
                with pytest.raises(DeviceFailed, match="an earlier kernel"):
                    use()


def test_a_gpu_that_is_not_there_is_unavailable(cupy: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "_known", {})
    monkeypatch.setattr(Nothing, "__enter__", cupy._refuse)
    with pytest.raises(Unavailable, match=r"cuda:7 cannot be used in this process \(.*not allowed\).*CUDA_VISIBLE"):
        accelerator_of(Device("cuda", 7))


def test_threads_that_come_at_once_get_the_same_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = threading.Barrier(4)

    def opened(device: Device) -> object:
        at_once.wait(20)
        return object()

    monkeypatch.setattr(accelerator, "_known", {})
    monkeypatch.setattr(accelerator, "_opened", opened)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(accelerator_of, [Device("cuda", 0)] * 4))
    assert len(found) == 1


def test_errors_of_the_device_are_ours_and_others_are_not() -> None:
    with pytest.raises(DeviceFailed, match="RuntimeError: gone"), failures(RuntimeError):
        raise RuntimeError("gone")
    with pytest.raises(KeyError), failures(RuntimeError):
        raise KeyError
