"""Leases: which memory belongs to a pending operation, and what was in it.

Until an operation is done its buffers are not the program's: what is sent must not
change, what is received into must not be used by anything else. MPI checks neither, and
a mistake gives wrong data silently. Each posted operation takes a lease on its memory:
one that overlaps another, with a write on either side, is refused; a checksum shows
whether what is sent has changed. Buffers that an operation reads and writes (all_reduce
in place) have no checksum: MPI itself changes them.
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mpdist.errors import UsageError
from mpdist.memory import Buffer

# At so many leases each call looks whether they are over.
LOOKS = 16


@dataclass(frozen=True)
class Span:
    """Some bytes of memory, and whether they are written."""

    start: int
    nbytes: int
    writes: bool

    @classmethod
    def of(cls, buffer: Buffer, *, writes: bool) -> Span:
        return cls(buffer.address, buffer.nbytes, writes)

    def clashes(self, other: Span) -> bool:
        """Whether both cannot be in use at once."""
        apart = self.start + self.nbytes <= other.start or other.start + other.nbytes <= self.start
        return (self.writes or other.writes) and not apart and bool(self.nbytes and other.nbytes)


@dataclass(eq=False)
class Lease:
    """The memory of one operation.

    Attributes:
        text: `recv from 1, tag 4 on 'world' (rank 0 of 2), called at train.py:12`.
        is_over: whether the operation is done.
    """

    text: str
    spans: Sequence[Span]
    is_over: Callable[[], bool]

    def ends(self) -> bool:
        """Whether it is over; then it keeps nothing of its operation alive."""
        if not self.is_over():
            return False
        self.is_over = _certainly
        return True


def _certainly() -> bool:
    return True


class Places:
    """Leased spans by their address: a look at one place does not look at all of them.

    They are sorted by where they start, those of each order of magnitude by themselves: what
    reaches into a place starts no further before it than such spans are long.
    """

    def __init__(self) -> None:
        self._sorted: dict[int, list[tuple[Span, Lease]]] = {}

    def add(self, span: Span, lease: Lease) -> None:
        """Hold a span."""
        insort(self._sorted.setdefault(span.nbytes.bit_length(), []), (span, lease), key=_start)

    def overlapping(self, mine: Span) -> Lease | None:
        """A lease of a span that clashes with this one."""
        for span, lease in self._near(mine):
            if mine.clashes(span):
                return lease
        return None

    def drop(self, span: Span) -> None:
        """Forget a span whose lease is over."""
        for _ in self._near(span):
            pass

    def _near(self, mine: Span) -> Iterator[tuple[Span, Lease]]:
        """What may reach into a span; of leases that are over nothing stays there."""
        for magnitude, places in self._sorted.items():
            first = bisect_left(places, mine.start - (1 << magnitude), key=_start)
            last = bisect_left(places, mine.start + max(mine.nbytes, 1), key=_start)
            places[first:last] = near = [place for place in places[first:last] if not place[1].ends()]
            yield from near


def _start(place: tuple[Span, Lease]) -> int:
    return place[0].start


@dataclass
class Leases:
    """All leases of this process: threads post at the same time, and what one lets go of another must not look at.

    The lock may be taken again by its owner: a signal's handler may post, too.
    """

    _held: deque[Lease] = field(default_factory=deque)
    _read: Places = field(default_factory=Places)
    _written: Places = field(default_factory=Places)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def take(self, text: str, spans: Iterable[Span], is_over: Callable[[], bool]) -> None:
        """Add a lease, until `is_over()`."""
        lease = Lease(text, [span for span in spans if span.nbytes], is_over)
        with self._lock:
            self._held.append(lease)
            for span in lease.spans:
                self._places(span).add(span, lease)

    def check(self, who: str, spans: Iterable[Span]) -> None:
        """Raise UsageError if the memory belongs to another operation than `who`, `recv on 'world' (rank 0 of 2)`."""
        with self._lock:
            self._look_at_some()
            lease = next(filter(None, map(self._clashing, spans)), None)
        if lease is not None:
            raise UsageError(
                f"{who}: its buffer overlaps in memory with that of {lease.text}, which is pending: "
                "await that first, or give each operation memory of its own"
            )

    def _clashing(self, mine: Span) -> Lease | None:
        lease = self._written.overlapping(mine)
        return self._read.overlapping(mine) if lease is None and mine.writes else lease

    def _look_at_some(self) -> None:
        """Let go of what is over, in rotation: whoever has thousands pending pays for a few of them."""
        held = self._held
        for _ in range(min(len(held), LOOKS)):
            lease = held.popleft()
            if not lease.ends():
                held.append(lease)
                continue
            for span in lease.spans:
                self._places(span).drop(span)

    def _places(self, span: Span) -> Places:
        return self._written if span.writes else self._read


def checksum(buffers: Iterable[Buffer]) -> int:
    """Of what is in the buffers."""
    total = 0
    for buffer in buffers:
        total = zlib.crc32(buffer.array().view(np.uint8).data, total)
    return total


def changed(text: str) -> UsageError:
    """The error for a buffer that was changed too early."""
    return UsageError(
        f"{text}: the buffer was changed while the operation was pending, so others may have got the old data, the "
        "new, or a mixture: write to it when the Work is done, or give a copy"
    )
