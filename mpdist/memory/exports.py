"""Exports: what this process has exported on a device, and what it has opened of others.

Both take milliseconds, so they are kept: a block that is not needed any more serves
whoever needs one next, and what others have exported stays open under its handle,
which is new for new memory. Nothing goes back before the end, when nobody works on it.
"""

from __future__ import annotations

import sys
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from mpdist.errors import DeviceFailed
from mpdist.memory import slots
from mpdist.memory.openings import Openings
from mpdist.memory.segments import Segments
from mpdist.memory.sharing import Export, Signal
from mpdist.memory.slots import Slots

if TYPE_CHECKING:
    from mpdist.memory.accelerator import Accelerator
    from mpdist.memory.buffer import Buffer, Device
    from mpdist.memory.sharing import Lane

# Blocks for arrays are of this size, as cudaMalloc's, or twice, four times, ...: so that one serves the next, too.
UNIT_BYTES = 2 * 1024 * 1024

PRIVATE = -1
"""In place of an offset: memory that others do not reach."""

_LARGEST = 1 << 62


@dataclass(frozen=True)
class Offer:
    """A block, and events that tell of work on it."""

    block: Export
    signals: tuple[Signal, ...]

    @property
    def handles(self) -> list[bytes]:
        """Of the block, then of the events."""
        return [self.block.handle, *(signal.handle for signal in self.signals)]


class Exports:
    """One device's.

    Attributes:
        accelerator: the device.
        segments: memory of the program's own libraries that others may have open; None where none is shown.
        openings: what this process has open of theirs.
        kept: what must stay to the end, for others may still write there.
    """

    _has_said = False

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.sharing = accelerator.sharing()
        self._free: list[Offer] = []
        self._blocks: dict[bytes, int] = {}
        self._signals: dict[bytes, int] = {}
        self._arrays: list[tuple[int, int, bytes]] = []  # address, size and handle of blocks for arrays, sorted
        self._spare: dict[int, list[Export]] = {}
        self._slots: Slots | None = None
        self.segments: Segments | None = None
        self.openings = Openings(self.sharing)
        self.kept: list[object] = []

    @cached_property
    def lane(self) -> Lane:
        """Copies of messages."""
        return self.sharing.lane()

    def slots(self) -> Slots:
        """Through which messages pass whose arrays others do not reach.

        Raises:
            DeviceFailed: they cannot be had, or have no handle.
        """
        if self._slots is None:
            self._slots = Slots(self.sharing.export(slots.block_bytes()))
        return self._slots

    def say(self, device: Device, error: DeviceFailed) -> None:
        """Once: others cannot reach this device's memory, or this process theirs."""
        if self._has_said:
            return
        self._has_said = True
        print(
            f"mpdist: ranks of this node cannot reach each other's memory on {device} ({error}): its arrays "
            "travel through host memory, which is slower",
            file=sys.stderr,
        )

    def take(self, nbytes: int, signals: int) -> Offer:
        """A block and events, until `give_back`.

        Raises:
            DeviceFailed: they cannot be had, or have no handles.
        """
        for offer in self._free:
            if (offer.block.nbytes, len(offer.signals)) == (nbytes, signals):
                self._free.remove(offer)
                return offer
        block = self.sharing.export(nbytes)
        return Offer(block, tuple(self.sharing.signal() for _ in range(signals)))

    def give_back(self, offer: Offer) -> None:
        """No work on it is under way in any process."""
        self._free.append(offer)

    def block(self, handle: bytes) -> int:
        """Address of another process's block.

        Raises:
            DeviceFailed: it cannot be opened.
        """
        return _known(self._blocks, handle, self.sharing.open)

    def signal(self, handle: bytes) -> int:
        """Another process's event.

        Raises:
            DeviceFailed: it cannot be opened.
        """
        return _known(self._signals, handle, self.sharing.open_signal)

    # ------------------------------------------------------------------ arrays

    def array(self, shape: Sequence[int], dtype: np.dtype[np.generic]) -> object:
        """A new array in a block of its own, not initialised; the block serves another one when it goes.

        Raises:
            DeviceFailed: no memory that others can open is left.
        """
        nbytes = prod(shape) * dtype.itemsize
        size = UNIT_BYTES << max(-(-nbytes // UNIT_BYTES) - 1, 0).bit_length()
        try:
            block = self._spare.setdefault(size, []).pop()
        except IndexError:
            block = self.sharing.export(size)
            insort(self._arrays, (block.address, block.nbytes, block.handle))
        else:
            self.sharing.settle()  # who had it before may have queued work on it, in any stream
        return self.sharing.array(block, shape, dtype, _Lent(self, block))

    def take_back(self, block: Export) -> None:
        """No array lies in it any more; from any thread, also while memory is being collected."""
        self._spare.setdefault(block.nbytes, []).append(block)

    def place_of(self, buffer: Buffer) -> tuple[int, bytes]:
        """The offset of an array in its block, and the block's handle; PRIVATE, b"" for other memory."""
        index = bisect_right(self._arrays, (buffer.address, _LARGEST, b"")) - 1
        if index >= 0 and buffer.nbytes:
            address, nbytes, handle = self._arrays[index]
            if buffer.address + buffer.nbytes <= address + nbytes:
                return buffer.address - address, handle
        return PRIVATE, b""

    def close(self) -> None:
        """Close what others own, which may be gone by now; ours go with the process, for others may have them open."""
        for event in self._signals.values():
            with suppress(DeviceFailed):
                self.sharing.close_signal(event)
        self.openings.close()
        for address in self._blocks.values():
            with suppress(DeviceFailed):
                self.sharing.close(address)
        self._signals.clear()
        self._blocks.clear()
        self._free.clear()


class _Lent:
    """Kept by an array: its block is free when nobody holds it any more."""

    def __init__(self, home: Exports, block: Export) -> None:
        self._home = home
        self._block = block

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._home.take_back(self._block)


def _known(table: dict[bytes, int], handle: bytes, make: Callable[[bytes], int]) -> int:
    found = table.get(handle)
    if found is None:
        found = table[handle] = make(handle)
    return found
