"""Exports: what this process has exported on a device, and what it has opened of others.

Both take milliseconds, so they are kept: a block that is not needed any more serves
whoever needs one next, and what others have exported stays open under its handle,
which is new for new memory. Nothing goes back before the end, when nobody works on it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpdist.errors import DeviceFailed
from mpdist.memory.sharing import Export, Signal

if TYPE_CHECKING:
    from mpdist.memory.accelerator import Accelerator


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
        has_said: stderr says already that it cannot be shared.
    """

    has_said = False

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.sharing = accelerator.sharing()
        self._free: list[Offer] = []
        self._blocks: dict[bytes, int] = {}
        self._signals: dict[bytes, int] = {}

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

    def close(self) -> None:
        """Close what others own, which may be gone by now; ours go with the process, for others may have them open."""
        for event in self._signals.values():
            with suppress(DeviceFailed):
                self.sharing.close_signal(event)
        for address in self._blocks.values():
            with suppress(DeviceFailed):
                self.sharing.close(address)
        self._signals.clear()
        self._blocks.clear()
        self._free.clear()


def _known(table: dict[bytes, int], handle: bytes, make: Callable[[bytes], int]) -> int:
    found = table.get(handle)
    if found is None:
        found = table[handle] = make(handle)
    return found
