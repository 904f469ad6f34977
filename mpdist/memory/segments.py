"""Segments: memory that the program's own libraries have taken from a device, from which they give out arrays.

Others may open a segment as they open a block, but its owner gives it back when it
likes. So each that was shown has a word that others see, with its number, which no
other memory ever gets; and it is 0 from when the owner has found that the segment is
gone, or shows others in its place. Who has it open looks at the word, see openings.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpdist.memory.sharing import Sharing

# So many are shown at a time. Libraries take few large ones, and what others have open stays taken.
ENTRIES = 16


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory of which some is an array's.

    Attributes:
        start: its address in this process.
        handle: what others open it by.
        number: > 0, of no other memory of this process.
    """

    start: int
    nbytes: int
    handle: bytes
    number: int


class Segments:
    """Those of this process on one device.

    Args:
        words: ENTRIES of them, zeroed, which others see.
        at: the offset at which they find them.
        fence: orders memory accesses; None where the processor does.
    """

    def __init__(self, sharing: Sharing, words: memoryview, at: int, fence: Callable[[], object] | None = None) -> None:
        self._sharing = sharing
        self._words = words
        self._at = at
        self._fence = fence
        self._shown: list[Segment | None] = [None] * ENTRIES
        self._next = 0
        self._refreshed = 0.0

    def find(self, address: int, nbytes: int) -> tuple[Segment, int] | None:
        """The segment with this memory, and the offset of its word; None where others cannot open it."""
        number = self._sharing.number_of(address)
        if not number:
            return None
        entry = next((at for at, each in enumerate(self._shown) if each is not None and each.number == number), None)
        segment = self._sharing.segment(address) if entry is None else self._shown[entry]
        if segment is None or address + nbytes > segment.start + segment.nbytes:
            return None
        return segment, self._at + 8 * (self._show(segment) if entry is None else entry)

    def refresh(self, every: float = 0.0) -> None:
        """Let others know which are gone, unless that was found out less than so many seconds ago."""
        now = monotonic()
        if now < self._refreshed + every:
            return
        self._refreshed = now
        for entry, segment in enumerate(self._shown):
            if segment is not None and self._sharing.number_of(segment.start) != segment.number:
                self._hide(entry)

    def _show(self, segment: Segment) -> int:
        """In the place of one that is gone, else of the one that was shown first."""
        self.refresh()
        entry = self._shown.index(None) if None in self._shown else self._next
        self._next = (entry + 1) % ENTRIES
        self._hide(entry)
        self._shown[entry] = segment
        self._words[entry] = segment.number
        return entry

    def _hide(self, entry: int) -> None:
        self._words[entry] = 0
        self._shown[entry] = None
        if self._fence is not None:
            self._fence()
