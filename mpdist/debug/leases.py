"""Leases: which memory belongs to a pending operation, and what was in it.

Until an operation is done its buffers are not the program's: what is sent must not
change, what is received into must not be used by anything else. MPI checks neither, and
a mistake gives wrong data silently. Each posted operation takes a lease on its memory:
one that overlaps another, with a write on either side, is refused; a checksum shows
whether what is sent has changed. Buffers that an operation reads and writes (all_reduce
in place) have no checksum: MPI itself changes them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mpdist.errors import UsageError
from mpdist.memory import Buffer


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


@dataclass
class Leases:
    """All leases of this process."""

    _held: list[Lease] = field(default_factory=list)

    def take(self, text: str, spans: Sequence[Span], is_over: Callable[[], bool]) -> None:
        """Add a lease, until `is_over()`."""
        self._held.append(Lease(text, spans, is_over))

    def check(self, who: str, spans: Iterable[Span]) -> None:
        """Raise UsageError if the memory belongs to another operation than `who`, `recv on 'world' (rank 0 of 2)`."""
        self._held = [lease for lease in self._held if not lease.is_over()]
        for mine in spans:
            for lease in self._held:
                if any(mine.clashes(other) for other in lease.spans):
                    raise UsageError(
                        f"{who}: its buffer overlaps in memory with that of {lease.text}, which is pending: "
                        "await that first, or give each operation memory of its own"
                    )


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
