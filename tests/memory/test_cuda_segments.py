"""CUDA segments: how the driver is asked, and what CuPy is asked then; both are written down here."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from memory.test_cuda_sharing import HANDLE, Recorded

from mpdist.memory import cuda_segments
from mpdist.memory.cuda import Cuda
from mpdist.memory.segments import Segment

START, NBYTES, NUMBER = 0x7F0000200000, 1 << 21, 0x123456789A
INVALID_VALUE = 1


class Allocation:
    """The driver's library where there is one allocation; called as C calls it."""

    def __init__(self) -> None:
        self.is_capable = 1
        word = ctypes.POINTER(ctypes.c_uint64)
        kinds, into = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_void_p)
        attributes = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint, kinds, into, ctypes.c_uint64)
        of_range = ctypes.CFUNCTYPE(ctypes.c_int, word, ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint64)
        self.cuPointerGetAttributes = attributes(self._attributes)
        self.cuMemGetAddressRange_v2 = of_range(self._range)

    def _attributes(self, number: int, kinds: Any, into: Any, address: int) -> int:
        for kind, at in zip(kinds[:number], into[:number], strict=True):
            is_known = START <= address < START + NBYTES
            if kind == 7:
                ctypes.c_uint64.from_address(at).value = NUMBER if is_known else 0
            elif kind == 10:
                ctypes.c_int.from_address(at).value = self.is_capable if is_known else 0
            else:
                return INVALID_VALUE
        return 0

    def _range(self, start: Any, nbytes: Any, address: int) -> int:
        if not START <= address < START + NBYTES:
            return INVALID_VALUE
        start[0], nbytes[0] = START, NBYTES
        return 0


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> Allocation:
    library = Allocation()
    opened = []

    def load(name: str) -> Any:
        opened.append(name)
        return SimpleNamespace(
            cuPointerGetAttributes=library.cuPointerGetAttributes,
            cuMemGetAddressRange_v2=library.cuMemGetAddressRange_v2,
        )

    monkeypatch.setattr(ctypes, "CDLL", load)
    return library


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded()
    monkeypatch.setitem(sys.modules, "cupy", recorded.module())
    return recorded


@pytest.mark.usefixtures("cupy")
def test_memory_of_an_allocation_has_its_number_start_and_handle(allocation: Allocation) -> None:
    sharing = Cuda(0).sharing()
    assert sharing.number_of(START + 700) == sharing.number_of(START) == NUMBER
    assert sharing.segment(START + 700) == Segment(START, NBYTES, HANDLE, NUMBER)
    assert sharing.number_of(START - 1) == sharing.number_of(START + NBYTES) == 0
    assert sharing.segment(START - 1) is None


def test_the_handle_is_that_of_the_start(allocation: Allocation, cupy: Recorded) -> None:
    Cuda(0).sharing().segment(START + 700)
    assert cupy.calls == [("ipcGetMemHandle", START)]


@pytest.mark.usefixtures("cupy")
def test_what_has_no_legacy_handle_has_no_number(allocation: Allocation) -> None:
    allocation.is_capable = 0
    sharing = Cuda(0).sharing()
    assert sharing.number_of(START) == 0
    assert sharing.segment(START) is None


@pytest.mark.usefixtures("allocation")
def test_where_cuda_gives_no_handle_it_is_none(cupy: Recorded) -> None:
    cupy.fails = True
    assert Cuda(0).sharing().segment(START) is None


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("kind", [OSError, AttributeError])
def test_without_the_drivers_library_nothing_has_a_number(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def refuse(_: str) -> None:
        raise kind("not there")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert cuda_segments.driver() is None
    assert Cuda(0).sharing().number_of(START) == 0
