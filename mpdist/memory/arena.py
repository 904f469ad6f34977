"""Arena: blocks of a sparse file that the ranks of a node map, so that all of them can read what lies there.

Pages exist only while a block covers them: they are reserved before use, for a
write to memory that a full file system cannot give is a SIGBUS, and given back
when the block goes. A file without a name is in no file system that could be full:
the system would kill a process instead, so what is left is looked at before.

A block goes when the last array on it does, which may happen in any thread and
inside any line, also of this file: so freeing only notes the block down, and waits
for no lock.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod

import numpy as np
import numpy.typing as npt

from mpdist.memory.allocate import shape_and_type
from mpdist.memory.available import has_room
from mpdist.memory.buffer import address_of
from mpdist.memory.elements import Array
from mpdist.memory.huge_pages import gather, huge_page_bytes

PAGE_BYTES = mmap.PAGESIZE
# Blocks begin on lines of their own, so that two writers never share one.
LINE_BYTES = 64
# From here on looking how much memory is left costs little beside taking it. And an array does not fit into what a
# processor finds on small pages without looking them up, so that huge ones are worth their time.
LARGE_BYTES = 4 * 1024**2
# Other processes take memory at the same time, so that it is looked at again after so much.
PIECE_BYTES = 64 * 1024**2
# Before 6.11 Linux began anew, with all that was asked for, where a signal came meanwhile: with a timer whose signals
# come faster than that it never ended.
STEP_BYTES = 256 * 1024
# madvise: map pages for writing. Since Linux 5.14; Python 3.11 does not name it.
_POPULATE_WRITE = 23
# Not taken, so that the next small thing that somebody needs is still there.
SPARE_BYTES = 64 * 1024**2


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


class Block:
    """Memory of an arena, free again when nobody refers to it.

    Attributes:
        offset: of its first byte in the arena.
        nbytes: its size.
    """

    __slots__ = ("__array_interface__", "_arena", "nbytes", "offset")

    def __init__(self, arena: Arena, offset: int, nbytes: int) -> None:
        self._arena = arena
        self.offset = offset
        self.nbytes = nbytes
        self.__array_interface__ = {
            "version": 3,
            "data": (arena.address + offset, False),
            "typestr": "|u1",
            "shape": (nbytes,),
        }

    def bytes(self) -> npt.NDArray[np.uint8]:
        """The memory as bytes; the array keeps the block."""
        return np.asarray(self)

    def is_of(self, arena: Arena) -> bool:
        """Whether it is a part of this arena."""
        return self._arena is arena

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._arena.give_back(self.offset, self.nbytes)


class Arena:
    """The part of the shared memory that this rank hands out.

    Attributes:
        memory: the mapped file.
        address: of its first byte in this process.
        nbytes: how much address space there is; pages exist only where blocks are.
    """

    def __init__(self, descriptor: int, memory: mmap.mmap, has_room: Callable[[int], bool] = has_room) -> None:
        self.memory = memory
        self.nbytes = len(memory)
        self.address = address_of(memory)
        self._descriptor = descriptor
        self._has_room = has_room
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, self.nbytes)]  # start and end, sorted, never touching
        self._returned: deque[tuple[int, int]] = deque()

    def allocate(self, nbytes: int, is_array: bool = False) -> Block | None:
        """A new block, its pages reserved, its content undefined; None where there is no memory for it.

        Args:
            is_array: a large one may take longer to make, and is to be on huge pages.
        """
        size = _rounded(max(nbytes, 1), LINE_BYTES if nbytes < PAGE_BYTES else PAGE_BYTES)
        is_huge = is_array and size >= LARGE_BYTES
        unit = (is_huge and huge_page_bytes()) or (PAGE_BYTES if size >= PAGE_BYTES else LINE_BYTES)
        with self._lock:
            self._take_back()
            offset = self._take(size, unit)
            if offset is None:
                return None
            is_reserved = False
            try:
                is_reserved = self._reserve(offset, offset + size)
            finally:
                if not is_reserved:
                    self._leave(offset, size)
        if not is_reserved:
            return None
        block = Block(self, offset, size)
        if is_huge:
            gather(self.memory, offset, offset + size)
        return block

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array | None:
        """A new array, not initialised; None where there is no memory for it.

        Raises:
            UsageError: as of shape_and_type.
        """
        dims, element_type = shape_and_type(shape, dtype)
        if not element_type.itemsize:
            element_type = np.empty(0, element_type).dtype  # texts of no length have one character
        block = self.allocate(prod(dims) * element_type.itemsize, is_array=True)
        if block is None:
            return None
        array: Array = np.ndarray(dims, element_type, block.bytes())
        return array

    def map_now(self, offset: int, nbytes: int) -> None:
        """Let the first write to these pages of a block take no longer than the next, in 0.3 ms per MiB.

        Without effect where the system can't.
        """
        if sys.platform == "linux":
            with suppress(OSError):  # an older kernel: the first write to a page maps it
                self.memory.madvise(_POPULATE_WRITE, offset, nbytes)

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Where this memory lies in the arena; None if it does not."""
        offset = address - self.address
        return offset if offset >= 0 and offset + nbytes <= self.nbytes else None

    def give_back(self, offset: int, nbytes: int) -> None:
        """The block is not used any more; from any thread, at any time, also inside `allocate`."""
        if os.getpid() != self._owner_pid:  # a forked child's copy: the pages are the parent's
            return
        self._returned.append((offset, nbytes))
        if not self._lock.locked():  # else whoever has it looks, or the next who needs memory
            with self._lock:
                self._take_back()

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks."""
        with self._lock:
            self._take_back()
            return self.nbytes - sum(end - start for start, end in self._free)

    # ------------------------------------------------------------------ under the lock

    def _take_back(self) -> None:
        while self._returned:
            self._leave(*self._returned.popleft())

    def _take(self, size: int, unit: int) -> int | None:
        """First fit, at a multiple of this number."""
        for place, (start, end) in enumerate(self._free):
            begin = _rounded(start, unit)
            if begin + size > end:
                continue
            rest = [(start, begin), (begin + size, end)]
            self._free[place : place + 1] = [hole for hole in rest if hole[0] < hole[1]]
            return begin
        return None

    def _reserve(self, start: int, end: int) -> bool:
        """Take the pages from the system, piece by piece; False where there are too few, with some of them taken."""
        for begin in range(start, end, STEP_BYTES):
            is_looked_at = (begin - start) % PIECE_BYTES == 0 and end - begin >= LARGE_BYTES
            if is_looked_at and not self._has_room(end - begin + SPARE_BYTES):
                return False
            try:
                os.posix_fallocate(self._descriptor, begin, min(STEP_BYTES, end - begin))
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                    return False
                raise
        return True

    def _leave(self, offset: int, nbytes: int) -> None:
        """Make a hole of it, and give back the pages that lie in holes only."""
        start, end = self._put(offset, offset + nbytes)
        self._discard(max(start, offset - PAGE_BYTES), min(end, offset + nbytes + PAGE_BYTES))

    def _put(self, start: int, end: int) -> tuple[int, int]:
        """Add a hole and join it with its neighbours; returns the joined one."""
        insort(self._free, (start, end))
        place = self._free.index((start, end))
        if place + 1 < len(self._free) and self._free[place + 1][0] == end:
            end = self._free.pop(place + 1)[1]
        if place > 0 and self._free[place - 1][1] == start:
            start = self._free.pop(place - 1)[0]
            place -= 1
        self._free[place] = (start, end)
        return start, end

    def _discard(self, start: int, end: int) -> None:
        """Give the whole pages of a hole back to the system, where it takes them."""
        first, last = _rounded(start, PAGE_BYTES), end // PAGE_BYTES * PAGE_BYTES
        if last > first and hasattr(mmap, "MADV_REMOVE"):
            with suppress(OSError):  # ramfs can't; nor where the process locks its memory: they are used again
                self.memory.madvise(mmap.MADV_REMOVE, first, last - first)
