"""Board: a few bytes of shared memory in which the ranks of a node agree who reports the end of the job.

When a job ends badly, most ranks notice something: an exception of their own, or
the signal by which the launcher stops them. Only the first is to be read on stderr.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Sequence

_CLAIM = struct.Struct("<i")
# Two ranks may write their claims at the same moment; after this the last one stands.
_SETTLE_SECONDS = 0.01
_LOOK_SECONDS = 0.01


def board_bytes(size: int) -> int:
    """How many bytes a world of so many ranks needs."""
    return _CLAIM.size + size


class Board:
    """The bytes: the number of the rank that reports, and for each rank whether it is ready to go."""

    def __init__(self, memory: mmap.mmap | bytearray, rank: int, neighbours: Sequence[int]) -> None:
        """Use `board_bytes(size)` zeroed bytes, which the `neighbours`, ranks of the same node, share."""
        self._memory = memory
        self._rank = rank
        self._neighbours = neighbours

    def claim(self) -> bool:
        """Whether this rank is to report."""
        if self._reporter() not in (0, self._rank + 1):
            return False
        _CLAIM.pack_into(self._memory, 0, self._rank + 1)
        time.sleep(_SETTLE_SECONDS)
        return self._reporter() == self._rank + 1

    def _reporter(self) -> int:
        return int(_CLAIM.unpack_from(self._memory)[0])

    def leave(self) -> None:
        """This rank has done all it had to do."""
        self._memory[_CLAIM.size + self._rank] = 1

    def wait_for_all(self, seconds: float) -> None:
        """Wait until all ranks of the node are ready to go, or the time is over."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if all(self._memory[_CLAIM.size + rank] for rank in self._neighbours):
                return
            time.sleep(_LOOK_SECONDS)
