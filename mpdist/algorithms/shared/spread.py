"""Spread: in which place a member shows a round.

To write what another core has in its cache takes three to five times as long as
to write what it has lost, where the two share no cache: each line must first be
taken from it. Reading is quick either way. So a round begins

    in its slot         which stays in a core's own cache: best where cores share a cache
    in a large one      by turns in so many places that the others have lost one before it is written again:
                        best where they don't

A virtual machine may be moved from the one to the other at any time. Each member
times its own writing now and then, and tells the others where a round begins, so
that members need not agree. bench/caches.py, bench/ways.py --places.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

# Of so many rounds the first are for finding out: some in the place that was written last, then some in places that
# were not written for long.
CYCLE = 512
SAMPLES = 8

# Writing what the others have lost must take less than this part of writing what they have: where cores share a cache,
# it takes from 0.75 of it to all of it, and where they don't, 0.2 to 0.5.
GAIN = 0.6

LINE_BYTES = 64

# What is mapped at a time, before it is first written: meeting its pages one by one takes longer, and would be timed.
MAPPED_BYTES = 1024 * 1024

Starts = tuple[int, int]
"""Where the slots of even and of odd rounds begin."""


class Spread:
    """Where one member's rounds begin.

    Attributes:
        slots: where those do that begin in their slots.
        plain: so many of the next ones begin there, and are not timed; whoever writes one may count it here instead of
            calling `begin` and `end`, which takes 0.15 us of the 18 of 64 KiB.
    """

    __slots__ = (
        "_ask",
        "_began",
        "_is_wide",
        "_large",
        "_large_bytes",
        "_map",
        "_round",
        "_times",
        "_turns",
        "_unmapped",
        "plain",
        "slots",
    )

    def __init__(
        self,
        slots: Starts,
        large: Callable[[], Starts | None],
        large_bytes: int,
        map_now: Callable[[int, int], None],
    ) -> None:
        """Make no large slots yet.

        Args:
            large: gives large ones of so many bytes, if there is memory; it is asked once.
            map_now: maps so many bytes from a byte on.
        """
        self.slots = slots
        self.plain = 0
        self._ask: Callable[[], Starts | None] | None = large
        self._large: Starts | None = None
        self._large_bytes = large_bytes
        self._map = map_now
        self._unmapped = {(side, at) for side in range(2) for at in range(0, large_bytes, MAPPED_BYTES)}
        self._is_wide = False
        self._round = -1
        self._turns = [0, 0]
        self._began = 0.0
        self._times: tuple[list[float], list[float]] = [], []

    def begin(self, side: int, nbytes: int) -> int:
        """Where the next round of `nbytes` begins, an even or an odd one; it is written from now until `end`."""
        start = self.slots[side]
        if self.plain:
            self.plain -= 1
            return start
        self._round = count = (self._round + 1) % CYCLE
        if count >= 2 * SAMPLES:
            self._began = 0.0
            if self._is_wide:
                return self._next(side, nbytes)
            self._round = CYCLE - 1
            self.plain = self._round - count
            return start
        if count >= SAMPLES:
            if self._ask is not None:
                self._large, self._ask = self._ask(), None
            start = self._next(side, nbytes)
        self._began = perf_counter()
        return start

    def _next(self, side: int, nbytes: int) -> int:
        """The next place of a large slot, or the slot where there is none."""
        large = self._large
        if large is None:
            return self.slots[side]
        width = nbytes + -nbytes % LINE_BYTES or LINE_BYTES
        self._turns[side] = turn = self._turns[side] + 1
        start = turn % (self._large_bytes // width) * width
        if self._unmapped:
            self._map_all(large, side, start, width)
        return large[side] + start

    def _map_all(self, large: Starts, side: int, start: int, width: int) -> None:
        for at in range(start // MAPPED_BYTES * MAPPED_BYTES, start + width, MAPPED_BYTES):
            if (side, at) in self._unmapped:
                self._unmapped.remove((side, at))
                self._map(large[side] + at, MAPPED_BYTES)

    @property
    def is_trying(self) -> bool:
        """Whether the last round was one of those for finding out, in a place that may be the worse one."""
        return self._round < 2 * SAMPLES

    def end(self, nbytes: int) -> None:
        """The round has been written."""
        if not self._began:
            return
        seconds, self._began = perf_counter() - self._began, 0.0
        self._times[self._round >= SAMPLES].append(seconds / (nbytes or 1))
        if self._round == 2 * SAMPLES - 1:
            had, lost = self._times
            self._is_wide = bool(had) and _usual(lost) < GAIN * _usual(had)
            self._times = [], []


def _usual(times: list[float]) -> float:
    """The lower quartile: pages that are met for the first time and caches full of other things take longer, by far."""
    return sorted(times)[len(times) // 4]
