"""Pace: which of two ways is faster for a pair's private memory, here and now; found out by taking both.

Through slots takes half the time of reading each other's memory where the two
cores share a cache, and up to three times of it where they don't, and a virtual
machine may be moved from the one to the other at any time. The first member times
each collective and tells, beside the next, by which way all go after that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from time import perf_counter

# Of the last so many times the lower median counts: the first by another way finds its memory in the wrong cache, the
# first after a pause in none, which may be faster than all others, and what else the machine does must not look like a
# slow way.
SAMPLES = 4

# The first so many after a pause of so many seconds don't count where more used to follow: they find other things in
# the caches, by either way, but not after each pause alike.
COLD = 2
PAUSE_SECONDS = 0.0005

# After so many times by the better way, multiplied by how much better it is, the other is tried again.
TRIED_EVERY = 128


class _Size:
    """What has been measured for arrays of about one size: the last times of each way, slots being the second.

    Attributes:
        through_slots: by which way to go.
    """

    def __init__(self) -> None:
        self.through_slots = False
        self._times: tuple[deque[float], deque[float]] = deque(maxlen=SAMPLES), deque(maxlen=SAMPLES)
        self._count = 0  # of times since the last change of the way
        self._ended = 0.0
        self._run = self._last_run = 0  # so many without a pause

    def is_cold(self, seconds: float) -> bool:
        """Whether the collective that has just taken so long is one of the first after a pause, and more follow."""
        now = perf_counter()
        if now - seconds > self._ended + PAUSE_SECONDS:
            self._last_run, self._run = self._run, 0
        self._ended = now
        self._run += 1
        return self._run <= COLD < self._last_run

    def took(self, through_slots: bool, seconds: float) -> None:
        here, there = (self._times[way] for way in (through_slots, not through_slots))
        here.append(seconds)
        if through_slots is not self.through_slots:  # the change is not heard yet
            return
        self._count += 1
        if self._count < SAMPLES:
            return
        gain = _usual(there) / _usual(here) if there else 0.0
        if gain >= 1 and self._count > TRIED_EVERY * gain:
            there.clear()
            gain = 0.0
        if gain < 1:
            self.through_slots = not through_slots
            self._count = 0


def _usual(times: Collection[float]) -> float:
    return sorted(times)[(len(times) - 1) // 2]


class Pace:
    """Of one operation of a team; all its members know the same.

    Attributes:
        word: by which way each size is to go the next time, a bit for each; to be told by the first member.
    """

    def __init__(self) -> None:
        self.word = 0
        self._heard = 0
        self._sizes: dict[int, _Size] = {}

    def is_through_slots(self, nbytes: int) -> bool:
        """By which way arrays of this size go now."""
        return bool(self._heard >> nbytes.bit_length() & 1)

    def hear(self, word: int) -> None:
        """From now on this holds, on all members."""
        self._heard = word

    def took(self, nbytes: int, through_slots: bool, seconds: float) -> None:
        """Note the time of one collective."""
        size = nbytes.bit_length()
        known = self._sizes.get(size)
        if known is None:
            known = self._sizes[size] = _Size()
        if known.is_cold(seconds):
            return
        known.took(through_slots, seconds / nbytes)
        bit = 1 << size
        self.word = self.word | bit if known.through_slots else self.word & ~bit
