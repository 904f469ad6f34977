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
from mpdist.memory.cuda import failures
from mpdist.memory.sharing import HANDLE_BYTES, Export, Signal

if TYPE_CHECKING:
    from memory.simulated import Simulated, SimulatedMark

NEW, FREED = 0xAB, 0xDD
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
    """

    def __init__(self, device: Simulated) -> None:
        self._device = device
        self._own: dict[int, File] = {}
        self.opened: dict[int, tuple[bytes, File]] = {}
        self._events: dict[int, File] = {}
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

        return DeviceArray(np.asarray(_Room(block, tuple(shape), dtype, owner)))

    def settle(self) -> None:
        self._device.settle()

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

    def __init__(self, block: Export, shape: tuple[int, ...], dtype: Any, owner: object) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "version": 3, "data": (block.address, False), "typestr": np.dtype(dtype).str, "shape": shape
        }  # fmt: skip


def _array(address: int, count: int, dtype: np.dtype[Any]) -> Any:
    room = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(room, dtype, count)
