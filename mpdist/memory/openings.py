"""Openings: segments of other processes that this one has open.

Opening one takes 0.1 ms and more, so it stays open as long as its owner shows it, see
segments.py; the owner's memory is really free when nobody has it open any more.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpdist.errors import DeviceFailed

if TYPE_CHECKING:
    from mpdist.memory.sharing import Sharing


@dataclass
class Opening:
    """One of them.

    Attributes:
        address: in this process; None: it could not be opened.
        number: the owner's for it.
        word: what the owner lets others know of it.
        users: messages that are being copied from it.
    """

    address: int | None
    number: int
    word: memoryview
    users: int = 0

    @property
    def is_stale(self) -> bool:
        """Whether the owner has given it back, or will tell of it no more."""
        return self.word[0] != self.number


class Openings:
    """Those on one device."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._table: dict[tuple[bytes, int], Opening] = {}

    def open(self, handle: bytes, number: int, word: memoryview) -> Opening:
        """A segment, until `leave`; what its owner does not show any more is closed first.

        Raises:
            DeviceFailed: it cannot be opened.
        """
        self.sweep()
        known = self._table.get((handle, number))
        if known is None:
            known = self._table[handle, number] = Opening(None, number, word)
            known.address = self._sharing.open(handle)
        if known.address is None:
            raise DeviceFailed("a segment that could not be opened before")
        known.users += 1
        return known

    def leave(self, opening: Opening) -> None:
        """A message has been copied from it."""
        opening.users -= 1
        self.sweep()

    def sweep(self) -> None:
        """Close what its owner does not show any more, unless something is still copied from it."""
        for key, opening in list(self._table.items()):
            if opening.is_stale and not opening.users:
                del self._table[key]
                self._close(opening)

    def close(self) -> None:
        """All of them."""
        for opening in self._table.values():
            self._close(opening)
        self._table.clear()

    def _close(self, opening: Opening) -> None:
        if opening.address is not None:
            with suppress(DeviceFailed):
                self._sharing.close(opening.address)
