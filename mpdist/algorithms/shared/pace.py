"""Pace: which of two ways is faster for a pair's private memory, here and now; found out by taking both.

Through slots takes half the time of reading each other's memory where the two
cores share a cache, and four times of it where they don't, and a virtual machine
may be moved from the one to the other at any time. The first member measures its
work and tells, beside each collective, by which way all go the next time.
"""

from __future__ import annotations

from collections import deque

# The best of the last so many times counts: what else the machine does must not look like a slow way.
SAMPLES = 3

# After so many times by the better way, multiplied by how much better it is, the other is tried once.
TRIED_EVERY = 32


class _Size:
    """What has been measured for arrays of about one size: times of both ways, the first being not through slots."""

    def __init__(self) -> None:
        self.times: tuple[deque[float], deque[float]] = deque(maxlen=SAMPLES), deque(maxlen=SAMPLES)
        self._since = 0

    def next(self) -> bool:
        """Whether to go through slots the next time."""
        if min(map(len, self.times)) < SAMPLES:
            return len(self.times[1]) < len(self.times[0])
        plain, slots = map(min, self.times)
        better = slots < plain
        self._since += 1
        if self._since <= TRIED_EVERY * max(plain, slots) / min(plain, slots):
            return better
        self._since = 0
        return not better


class Pace:
    """Of one team; all its members know the same.

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
        known.times[through_slots].append(seconds / nbytes)
        bit = 1 << size
        self.word = self.word | bit if known.next() else self.word & ~bit
