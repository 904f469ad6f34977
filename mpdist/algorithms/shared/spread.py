"""Spread: in which place of its slot a member shows a round.

To write what another core has in its cache takes three to five times as long as
to write what it has lost, where the two share no cache: each line must first be
taken from it. Reading is quick either way. So successive rounds take successive
places of their slot:

    few    the places stay in a core's own cache: best where cores share a cache
    all    the others have lost a place before it is written again: best where they don't

A virtual machine may be moved from the one to the other at any time. Each member
times its own writing now and then, and tells the others where a round begins, so
that members need not agree. bench/caches.py.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter

# Of so many rounds the first are for finding out: some in the place that was written last, then some in places that
# were not written for long.
CYCLE = 512
SAMPLES = 8

# Writing what the others have lost must take less than this part of writing what they have: where cores share a cache,
# it takes from 0.75 of it to all of it, and where they don't, 0.2 to 0.5.
GAIN = 0.6

LINE_BYTES = 64


class Spread:
    """Where one member's rounds begin."""

    __slots__ = ("_began", "_few_bytes", "_is_wide", "_round", "_slot_bytes", "_times", "_turns")

    def __init__(self, slot_bytes: int, few_bytes: int) -> None:
        """Use all of a slot, or the first `few_bytes` of it, which is the most that a round shows."""
        self._slot_bytes = slot_bytes
        self._few_bytes = few_bytes
        self._is_wide = False
        self._round = -1
        self._turns = [0, 0]
        self._began = 0.0
        self._times: tuple[list[float], list[float]] = [], []

    def begin(self, side: int, nbytes: int) -> int:
        """In which byte of this slot the next round of `nbytes` begins; it is written from now until `end`."""
        width = nbytes + -nbytes % LINE_BYTES or LINE_BYTES
        self._round = count = (self._round + 1) % CYCLE
        self._turns[side] = turn = self._turns[side] + 1
        if count >= 2 * SAMPLES:
            self._began = 0.0
            return turn % ((self._slot_bytes if self._is_wide else self._few_bytes) // width or 1) * width
        start = 0
        if count >= SAMPLES:
            start = self._few_bytes + turn % ((self._slot_bytes - self._few_bytes) // width or 1) * width
        self._began = perf_counter()
        return start if start + width <= self._slot_bytes else 0

    def end(self, nbytes: int) -> None:
        """The round has been written."""
        if not self._began:
            return
        seconds, self._began = perf_counter() - self._began, 0.0
        self._times[self._round >= SAMPLES].append(seconds / (nbytes or 1))
        if self._round == 2 * SAMPLES - 1:
            had, lost = self._times
            self._is_wide = bool(had) and median(lost) < GAIN * median(had)
            self._times = [], []
