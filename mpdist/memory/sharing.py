"""Sharing: what mpdist asks of a device so that processes reach each other's memory there.

A process exports a block of memory and events, whose handles are bytes; others open
them. A block is opened once in a process, and closed before its owner gives it back.
Waiting for an event that has not been recorded is no wait at all: so its owner tells
by other means when it has been.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from mpdist.memory.folding import Folder
    from mpdist.memory.mark import Mark
    from mpdist.memory.segments import Segment

HANDLE_BYTES = 64
"""Of a block's handle, and of an event's."""


@dataclass(frozen=True, slots=True)
class Export:
    """A block of this process that others may open.

    Attributes:
        address: of its first byte, in this process.
        handle: what others open it by.
    """

    address: int
    nbytes: int
    handle: bytes


@dataclass(frozen=True, slots=True)
class Signal:
    """An event that other processes may wait for.

    Attributes:
        event: as this process knows it.
        handle: what others open it by.
    """

    event: int
    handle: bytes


class Lane(Protocol):
    """A queue of its own for work on memory of several processes; each piece begins when those before it are over."""

    def follow(self) -> None:
        """Let later work wait for all that copies to the device wait for, see Accelerator.follow."""

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Queue a copy between two addresses, of devices or of the host."""

    def fold(self, folder: Folder, sources: Sequence[int], targets: Sequence[int], count: int) -> None:
        """Queue what Folder.fold does, on arrays of `count` elements at these addresses."""

    def record(self, event: int) -> None:
        """An own event happens when all work queued so far is over; recorded before, it happens anew."""

    def wait(self, event: int) -> None:
        """Let later work wait for an event of any process, as it was recorded last."""

    def mark(self) -> Mark:
        """Tells when all work queued so far is over."""


class Sharing(Protocol):
    """One device, seen from several processes. All methods raise DeviceFailed where something cannot be done."""

    def export(self, nbytes: int) -> Export:
        """A new block, not initialised."""

    def release(self, export: Export) -> None:
        """Give a block back; nobody has it open."""

    def array(self, block: Export, shape: Sequence[int], dtype: np.dtype[np.generic], owner: object) -> object:
        """An array at the beginning of a block, which keeps its owner."""

    def settle(self) -> None:
        """Wait until all work that this process has queued on the device is over, in whatever stream."""

    def number_of(self, address: int) -> int:
        """Of the segment with this address: > 0, and of no other memory ever; 0 where it has no handle, or is gone."""

    def segment(self, address: int) -> Segment | None:
        """The segment with this address, which has a number; None where it has no handle."""

    def open(self, handle: bytes) -> int:
        """Address in this process of another one's block, or segment."""

    def close(self, address: int) -> None:
        """Before its owner gives it back."""

    def signal(self) -> Signal:
        """A new event."""

    def open_signal(self, handle: bytes) -> int:
        """Another process's event as this one knows it."""

    def close_signal(self, event: int) -> None:
        """It is not used any more, an own one or another process's."""

    def lane(self) -> Lane:
        """A new queue."""
