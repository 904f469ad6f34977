"""CudaSharing: what it asks of CuPy; CuPy itself is a list of calls here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpdist.errors import DeviceFailed
from mpdist.memory import BY_NAME, Folder, as_op, premul_sum
from mpdist.memory.cuda import Cuda
from mpdist.memory.cuda_kernels import FLAGS, NAME
from mpdist.memory.sharing import HANDLE_BYTES

HANDLE = bytes(range(HANDLE_BYTES))
LANE = 103


class Recorded:
    """A cupy that writes down what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.streams = iter((101, 102, LANE))
        self.events = iter(range(1, 100))
        self.fails = False
        self.is_busy = True

    def module(self) -> ModuleType:
        names = (
            "malloc", "free", "ipcGetMemHandle", "ipcOpenMemHandle", "ipcCloseMemHandle", "ipcGetEventHandle",
            "ipcOpenEventHandle", "eventDestroy", "eventRecord", "streamWaitEvent", "memcpyAsync",
            "eventQuery",
        )  # fmt: skip
        answers = {"malloc": 4096, "ipcGetMemHandle": HANDLE, "ipcOpenMemHandle": 8192,
                   "ipcGetEventHandle": HANDLE, "ipcOpenEventHandle": 55, "eventQuery": 0}  # fmt: skip
        runtime = SimpleNamespace(CUDARuntimeError=RuntimeError)
        for name in names:
            setattr(runtime, name, self._call(name, answers.get(name)))
        runtime.streamQuery = lambda stream: 600 if self.is_busy else 0
        cupy = ModuleType("cupy")
        cupy.RawKernel = self._kernel  # type: ignore[attr-defined]
        cupy.cuda = SimpleNamespace(  # type: ignore[attr-defined]
            runtime=runtime, Device=Context, Stream=self._stream, Event=self._event,
            driver=SimpleNamespace(CUDADriverError=KeyError), nvrtc=SimpleNamespace(NVRTCError=EOFError),
            compiler=SimpleNamespace(CompileException=SyntaxError),
        )  # fmt: skip
        return cupy

    def _call(self, name: str, answer: Any) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            if self.fails:
                raise RuntimeError("invalid argument")
            return answer

        return call

    def _stream(self, *, non_blocking: bool) -> Any:
        assert non_blocking
        return FakeStream(self, next(self.streams))

    def _event(self, *, block: bool = False, disable_timing: bool, interprocess: bool = False) -> Any:
        assert disable_timing  # else it could not be shared
        number = next(self.events)
        return SimpleNamespace(
            ptr=number, interprocess=interprocess,
            record=lambda stream: self.calls.append(("eventRecord", number, stream.ptr)),
        )  # fmt: skip

    def _kernel(self, code: str, name: str, options: tuple[str, ...] = ()) -> Any:
        self.calls.append(("RawKernel", code, name, options))

        def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...], *, stream: Any) -> None:
            self.calls.append(("launch", stream.ptr, grid, block, arguments))

        return launch


class Context:
    def __init__(self, index: int) -> None:
        pass

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class FakeStream:
    def __init__(self, cupy: Recorded, ptr: int) -> None:
        self._cupy, self.ptr = cupy, ptr

    def wait_event(self, event: Any) -> None:
        self._cupy.calls.append(("wait_event", self.ptr, event.ptr))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    recorded = Recorded()
    monkeypatch.setitem(sys.modules, "cupy", recorded.module())
    return recorded


def test_a_block_is_exported_opened_closed_and_given_back(cupy: Recorded) -> None:
    sharing = Cuda(0).sharing()
    block = sharing.export(1 << 20)
    assert (block.address, block.nbytes, block.handle) == (4096, 1 << 20, HANDLE)
    assert sharing.open(HANDLE) == 8192
    sharing.close(8192)
    sharing.release(block)
    assert cupy.calls == [
        ("malloc", 1 << 20),
        ("ipcGetMemHandle", 4096),
        ("ipcOpenMemHandle", HANDLE),
        ("ipcCloseMemHandle", 8192),
        ("free", 4096),
    ]


def test_an_array_lies_in_a_block_and_keeps_its_owner(cupy: Recorded) -> None:
    module: Any = sys.modules["cupy"]
    module.cuda.UnownedMemory = lambda *arguments: ("memory", *arguments)
    module.cuda.MemoryPointer = lambda *arguments: ("pointer", *arguments)
    module.ndarray = lambda *arguments: arguments
    sharing, owner, dtype = Cuda(0).sharing(), object(), np.dtype(np.int8)
    x = sharing.array(sharing.export(1 << 20), [2, 3], dtype, owner)
    assert x == ((2, 3), dtype, ("pointer", ("memory", 4096, 1 << 20, owner), 0))


def test_a_block_without_a_handle_is_given_back(cupy: Recorded) -> None:
    sharing = Cuda(0).sharing()

    def refuse(_: int) -> None:
        raise RuntimeError("operation not supported")

    sys.modules["cupy"].cuda.runtime.ipcGetMemHandle = refuse
    with pytest.raises(DeviceFailed, match="not supported"):
        sharing.export(64)
    assert cupy.calls == [("malloc", 64), ("free", 4096)]


def test_events_of_this_process_and_of_others(cupy: Recorded) -> None:
    sharing = Cuda(0).sharing()
    own = sharing.signal()
    other = sharing.open_signal(HANDLE)
    lane = sharing.lane()
    lane.record(own.event)
    lane.wait(other)
    sharing.close_signal(own.event)  # CuPy's object destroys it
    sharing.close_signal(other)
    assert cupy.calls == [
        ("ipcGetEventHandle", own.event),
        ("ipcOpenEventHandle", HANDLE),
        ("eventRecord", own.event, LANE),
        ("streamWaitEvent", LANE, 55),
        ("eventDestroy", 55),
    ]


def test_work_begins_after_what_copies_to_the_device_wait_for(cupy: Recorded) -> None:
    lane = Cuda(0).sharing().lane()
    lane.follow()
    lane.copy(100, 200, 64)
    assert lane.mark().Test()
    assert cupy.calls == [
        ("eventRecord", 1, 102),
        ("wait_event", LANE, 1),
        ("memcpyAsync", 200, 100, 64, 4, LANE),
        ("eventRecord", 2, LANE),
        ("eventQuery", 2),
    ]


def test_it_waits_for_nothing_where_nothing_is_under_way(cupy: Recorded) -> None:
    cupy.is_busy = False
    Cuda(0).sharing().lane().follow()
    assert not cupy.calls


def test_a_reduction_is_a_kernel_of_its_own_stream_compiled_once(cupy: Recorded) -> None:
    lane = Cuda(0).sharing().lane()
    folder = Folder(as_op("avg"), BY_NAME["float64"], 2)
    for _ in range(2):
        lane.fold(folder, [4096, 8192], [1024], 3000)
    lane.fold(folder, [4096, 8200], [1024], 1)
    compiled = [call for call in cupy.calls if call[0] == "RawKernel"]
    assert [call[2:] for call in compiled] == [(NAME, FLAGS)]
    launches = [call for call in cupy.calls if call[0] == "launch"]
    assert [call[1] for call in launches] == [LANE] * 3
    assert launches[0][2:4] == ((6,), (256,))
    assert launches[0][4] == (4096, 8192, 1024, 3000, 1, 2.0)
    assert [type(each) for each in launches[0][4]] == [*[np.uint64] * 3, np.int64, np.int32, np.float64]
    assert launches[2][4] == (4096, 8200, 1024, 1, 0, 2.0)


def test_factors_go_as_what_is_computed_in(cupy: Recorded) -> None:
    lane = Cuda(0).sharing().lane()
    for name, kind in (("bfloat16", np.float32), ("int8", np.int8), ("complex64", np.complex64)):
        lane.fold(Folder(premul_sum(2), BY_NAME[name], None, [2, 3]), [16, 32], [48], 4)
        assert [type(each) for each in cupy.calls[-1][4][-2:]] == [kind] * 2


@pytest.mark.parametrize("kind", [KeyError, EOFError, SyntaxError, ImportError])
def test_a_kernel_that_cannot_be_compiled_or_launched_is_an_error_of_the_device(
    cupy: Recorded, kind: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise kind("no compiler")

    sys.modules["cupy"].RawKernel = fail
    with pytest.raises(DeviceFailed, match="no compiler"):
        Cuda(0).sharing().lane().fold(Folder(as_op("sum"), BY_NAME["int8"], None), [16, 32], [48], 4)


def test_errors_are_ours(cupy: Recorded) -> None:
    sharing = Cuda(0).sharing()
    lane = sharing.lane()
    cupy.fails = True
    calls = (
        lambda: sharing.export(64), lambda: sharing.open(HANDLE), lambda: sharing.open_signal(HANDLE),
        lambda: sharing.close(1), lambda: sharing.close_signal(1), lambda: lane.copy(1, 2, 3),
        lambda: lane.record(1), lambda: lane.wait(1),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(DeviceFailed, match="invalid argument"):
            call()
