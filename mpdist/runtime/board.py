"""Board: some shared memory in which the ranks of a node agree who reports the end of the job.

When a job ends badly, most ranks notice something: an exception of their own, or
the signal by which the launcher stops them. Only the first is to be read on stderr.
A rank that died without a word is noticed by those that the launcher then stops.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Sequence

_CLAIM = struct.Struct("<i")
_ENTRY = struct.Struct("<i?3x")  # a rank's process id, and whether it is ready to go

# Two ranks may write their claims at the same moment; after this the last one stands.
_SETTLE_SECONDS = 0.01
_LOOK_SECONDS = 0.01


def board_bytes(size: int) -> int:
    """How many bytes a world of so many ranks needs."""
    return _CLAIM.size + size * _ENTRY.size


class Board:
    """One rank's view of the memory."""

    def __init__(self, memory: mmap.mmap | bytearray, rank: int, neighbours: Sequence[int]) -> None:
        """Use `board_bytes(size)` zeroed bytes, which the `neighbours`, ranks of the same node, share."""
        self._memory = memory
        self._rank = rank
        self._pid = os.getpid()
        self._neighbours = neighbours
        self._write(is_ready=False)

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
        self._write(is_ready=True)

    def wait_for_all(self, seconds: float) -> None:
        """Wait until all ranks of the node are ready to go, or the time is over."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all(self._read(rank)[1] for rank in self._neighbours):
            time.sleep(_LOOK_SECONDS)

    def lost(self) -> list[tuple[int, int]]:
        """Rank and process id of neighbours whose process is gone."""
        found = []
        for rank in self._neighbours:
            pid, is_ready = self._read(rank)
            if pid and not is_ready and not _is_alive(pid):
                found.append((rank, pid))
        # Containers may share memory, but not the numbers of processes: then nobody else can be seen.
        return [] if len(found) == len(self._neighbours) - 1 > 1 else found

    def _write(self, *, is_ready: bool) -> None:
        _ENTRY.pack_into(self._memory, _CLAIM.size + self._rank * _ENTRY.size, self._pid, is_ready)

    def _read(self, rank: int) -> tuple[int, bool]:
        pid, is_ready = _ENTRY.unpack_from(self._memory, _CLAIM.size + rank * _ENTRY.size)
        return pid, is_ready


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
    return True
