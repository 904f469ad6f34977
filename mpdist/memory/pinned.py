"""Pinned: host memory through which a device's arrays travel, kept for the next ones.

Pinning takes milliseconds, so blocks are reused: their sizes are powers of two, and
one that is given back waits for the next array of its size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from mpdist.errors import DeviceFailed

if TYPE_CHECKING:
    from mpdist.memory.accelerator import Accelerator
    from mpdist.memory.elements import Array
    from mpdist.memory.mark import Mark

SMALLEST_BYTES = 64 * 1024

# So many free blocks of a size are kept: what is sent and what is received at the same time.
KEPT = 4


class Pinned:
    """Blocks of host memory for one device.

    Attributes:
        accelerator: the device.
        has_failed: memory could not be pinned: copies block, and are slower.
    """

    def __init__(self, accelerator: Accelerator, allocate: Callable[[int], Array]) -> None:
        """Take what gives host memory of so many bytes (uint8)."""
        self.accelerator = accelerator
        self.has_failed = False
        self._allocate = allocate
        self._free: dict[int, list[Array]] = {}
        self._busy: list[tuple[Array, list[Mark]]] = []
        self._pinned: set[int] = set()
        self._kept = KEPT

    def lend(self, nbytes: int) -> Loan:
        """Memory of at least so many bytes, until the Loan is dropped."""
        for _ in range(len(self._busy)):
            try:
                busy = self._busy.pop(0)
            except IndexError:  # another thread was faster
                break
            self.take_back(*busy)
        size = max(SMALLEST_BYTES, 1 << max(nbytes - 1, 0).bit_length())
        try:
            block = self._free.setdefault(size, []).pop()
        except IndexError:
            block = self._allocate(size)
            if self.accelerator.pin(block):
                self._pinned.add(id(block))
            elif not self.has_failed:
                self.has_failed = True
                print("mpdist: host memory cannot be pinned here: copies to and from the GPU are slow", file=sys.stderr)
        return Loan(self, block, nbytes)

    def take_back(self, block: Array, marks: list[Mark]) -> None:
        """Nobody uses a block any more, but copies up to these marks.

        From any thread, also while memory is being collected, so without a lock.
        """
        if not self._kept:
            _wait_for(marks)
        elif not all(map(_is_over, marks)):
            self._busy.append((block, marks))
            return
        free = self._free.setdefault(block.nbytes, [])
        if len(free) < self._kept:
            free.append(block)
        else:
            self._unpin(block)

    def close(self) -> None:
        """Give all memory back; that of Loans which are still out when they are dropped."""
        self._kept = 0
        while self._busy:
            self.take_back(*self._busy.pop())
        for free in self._free.values():
            while free:
                self._unpin(free.pop())

    def _unpin(self, block: Array) -> None:
        if id(block) in self._pinned:
            self._pinned.discard(id(block))
            self.accelerator.unpin(block)


def _wait_for(marks: list[Mark]) -> None:
    for mark in marks:
        with suppress(DeviceFailed):
            mark.wait()


def _is_over(mark: Mark) -> bool:
    try:
        return mark.Test()
    except DeviceFailed:
        return True


class Loan:
    """A block that goes back when nobody holds this any more, and copies are over.

    Attributes:
        bytes: as many as were asked for (uint8).
        marks: of copies that may go on when nobody holds this any more.
    """

    __slots__ = ("_block", "_home", "bytes", "marks")

    def __init__(self, home: Pinned, block: Array, nbytes: int) -> None:
        self._home = home
        self._block = block
        self.marks: list[Mark] = []
        self.bytes: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = block[:nbytes]

    def __del__(self) -> None:
        self._home.take_back(self._block, self.marks)
