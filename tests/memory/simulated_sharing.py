"""Memory and events of a simulated GPU that several processes share, as strict as CUDA is.

A block is a file without a name, which others open through /proc while its owner
holds it; an event is two words in such a file: how often it was recorded, and how
often it has happened. What is queued is done late, by a thread of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.memory import Folder
from mpdist.memory.buffer import address_of
from mpdist.memory.cuda_errors import failures
from mpdist.memory.segments import Segment
from mpdist.memory.sharing import HANDLE_BYTES, Export, Signal

if TYPE_CHECKING:
    from memory.simulated import Simulated, SimulatedMark

NEW, FREED = 0xAB, 0xDD
SEGMENT_BYTES = 64 * 1024
_HANDLE = struct.Struct("<5q")
_LOOK_SECONDS = 0.00002
_RECORDED, _HAPPENED = 0, 1


class File:
    """A file without a name, mapped."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor = descriptor
        self.memory = mmap.mmap(descriptor, nbytes)
        self.address = address_of(self.memory)

    @classmethod
    def new(cls, nbytes: int) -> File:
        descriptor = os.memfd_create("mpdist-simulated")
        os.ftruncate(descriptor, nbytes)
        return cls(descriptor, nbytes)

    @classmethod
    def of(cls, handle: bytes) -> File:
        """Another process's."""
        pid, number, device, inode, nbytes = _HANDLE.unpack_from(handle)
        if pid == os.getpid():
            raise RuntimeError("invalid device context")
        try:
            descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        except OSError:
            raise RuntimeError("invalid resource handle") from None
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (device, inode):
            os.close(descriptor)
            raise RuntimeError("invalid resource handle")
        return cls(descriptor, nbytes)

    @property
    def handle(self) -> bytes:
        status = os.fstat(self.descriptor)
        packed = _HANDLE.pack(os.getpid(), self.descriptor, status.st_dev, status.st_ino, len(self.memory))
        return packed.ljust(HANDLE_BYTES, b"\0")

    def fill(self, value: int) -> None:
        ctypes.memset(self.address, value, len(self.memory))

    def words(self) -> memoryview:
        return memoryview(self.memory).cast("q")

    def __del__(self) -> None:
        os.close(self.descriptor)


class SimulatedSharing:
    """See Sharing.

    Attributes:
        opened: other processes' blocks.
        can_share: False: no block has a handle.
        can_open: False: nothing that is not open yet can be opened.
        is_garbled: what is opened is other memory than the owner's.
        log: what was asked for, in words.
        segments: memory of the program's library.
    """

    def __init__(self, device: Simulated) -> None:
        self._device = device
        self._own: dict[int, File] = {}
        self.opened: dict[int, tuple[bytes, File]] = {}
        self._events: dict[int, File] = {}
        self.segments: list[SimulatedSegment] = []
        self._numbers = iter(range(1, 1 << 62))
        self.can_share = self.can_open = True
        self.is_garbled = False
        self.log: list[str] = []

    def export(self, nbytes: int) -> Export:
        with failures(RuntimeError):
            if not self.can_share:
                raise RuntimeError("operation not supported")
            file = File.new(nbytes)
            file.fill(NEW)
            self._own[file.address] = file
            self.log.append("export")
            return Export(file.address, nbytes, file.handle)

    def release(self, export: Export) -> None:
        self._own.pop(export.address).fill(FREED)

    def array(self, block: Export, shape: Sequence[int], dtype: Any, owner: object) -> Any:
        from memory.simulated import DeviceArray

        return DeviceArray(np.asarray(_Room(block.address, tuple(shape), dtype, owner)))

    def settle(self) -> None:
        self._device.settle()

    def pooled(self, shape: Sequence[int], dtype: Any) -> Any:
        """An array of the program's library, in a segment that has room, or in a new one."""
        from memory.simulated import DeviceArray

        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        segment = next((each for each in self.segments if each.has_room(nbytes)), None)
        if segment is None:
            segment = SimulatedSegment(next(self._numbers), nbytes)
            self.segments.append(segment)
        lent = _Lent(segment, nbytes)
        return DeviceArray(np.asarray(_Room(lent.address, tuple(shape), dtype, lent)))

    def give_back_all(self) -> int:
        """Segments without an array go back to the driver, with what is in them; how many."""
        empty = [each for each in self.segments if not each.arrays]
        self.segments = [each for each in self.segments if each.arrays]
        for each in empty:
            each.file.fill(FREED)
        return len(empty)

    def _segment(self, address: int) -> SimulatedSegment | None:
        return next((each for each in self.segments if 0 <= address - each.file.address < each.nbytes), None)

    def number_of(self, address: int) -> int:
        found = self._segment(address)
        return 0 if found is None else found.number

    def segment(self, address: int) -> Segment | None:
        found = self._segment(address)
        assert found is not None
        if not self.can_share:
            return None
        return Segment(found.file.address, found.nbytes, found.file.handle, found.number)

    def open(self, handle: bytes) -> int:
        with failures(RuntimeError):
            if any(handle == known for known, _ in self.opened.values()):
                raise RuntimeError("resource already mapped")
            if not self.can_open:
                raise RuntimeError("operation not supported")
            file = File.of(handle)
            if self.is_garbled:
                file = File.new(len(file.memory))
            self.opened[file.address] = handle, file
            self.log.append("open")
            return file.address

    def close(self, address: int) -> None:
        with failures(RuntimeError):
            if self.opened.pop(address, None) is None:
                raise RuntimeError("invalid argument")
            self.log.append("close")

    def signal(self) -> Signal:
        file = File.new(mmap.PAGESIZE)
        return Signal(self._known(file), file.handle)

    def open_signal(self, handle: bytes) -> int:
        with failures(RuntimeError):
            return self._known(File.of(handle))

    def close_signal(self, event: int) -> None:
        del self._events[event]

    def _known(self, file: File) -> int:
        number = next(self._numbers)
        self._events[number] = file
        return number

    def event(self, number: int) -> File:
        return self._events[number]

    def lane(self) -> SimulatedLane:
        return SimulatedLane(self._device, self)


class SimulatedSegment:
    """Memory from which a library gives out arrays, one behind the other; from the start again when all are gone."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = max(SEGMENT_BYTES, nbytes)
        self.file = File.new(self.nbytes)
        self.file.fill(NEW)
        self.arrays = 0
        self.used = 0

    def has_room(self, nbytes: int) -> bool:
        return self.used + nbytes <= self.nbytes


class _Lent:
    """An array's part of it."""

    def __init__(self, segment: SimulatedSegment, nbytes: int) -> None:
        self._segment = segment
        self.address = segment.file.address + segment.used
        segment.used += -(-nbytes // 512) * 512
        segment.arrays += 1

    def __del__(self) -> None:
        self._segment.arrays -= 1
        if not self._segment.arrays:
            self._segment.used = 0


class SimulatedLane:
    """See Lane."""

    def __init__(self, device: Simulated, sharing: SimulatedSharing) -> None:
        self._device = device
        self._sharing = sharing
        self._stream = device.stream()

    def follow(self) -> None:
        self._stream.follow(self._device.entered())

    def copy(self, source: int, target: int, nbytes: int) -> None:
        self._device.copies.append(("between", nbytes))
        self._stream.run(lambda: ctypes.memmove(target, source, nbytes))

    def fold(self, folder: Folder, sources: Sequence[int], targets: Sequence[int], count: int) -> None:
        self._device.copies.append(("fold", count * folder.element.itemsize))
        dtype = folder.element.storage

        def late() -> None:
            at = [[_array(each, count, dtype) for each in addresses] for addresses in (sources, targets)]
            folder.fold(*at)

        self._stream.run(late)

    def record(self, event: int) -> None:
        file = self._sharing.event(event)
        words = file.words()
        words[_RECORDED] += 1
        number = words[_RECORDED]

        def happen() -> None:
            words[_HAPPENED] = number

        self._stream.run(happen)

    def wait(self, event: int) -> None:
        file = self._sharing.event(event)
        words = file.words()
        number = words[_RECORDED]  # of now; 0: not recorded, so there is nothing to wait for

        def until() -> None:
            while words[_HAPPENED] < number:
                time.sleep(_LOOK_SECONDS)

        self._stream.run(until)

    def mark(self) -> SimulatedMark:
        mark = self._stream.mark()
        mark.error = self._device.fails
        return mark


class _Room:
    """A block's memory, as NumPy asks for it."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: Any, owner: object) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "version": 3, "data": (address, False), "typestr": np.dtype(dtype).str, "shape": shape
        }  # fmt: skip


def _array(address: int, count: int, dtype: np.dtype[Any]) -> Any:
    room = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(room, dtype, count)
