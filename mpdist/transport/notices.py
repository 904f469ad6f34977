"""Notices: where each rank of a node has put what it wants others to find, under a name.

A table in the first page of each rank's arena, which its owner alone writes: so a
rank can offer something without asking whether others will ever want it, and none
waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from mmap import PAGESIZE

ENTRIES = PAGESIZE // 16
_KEY, _OFFSET = 0, 1


class Notices:
    """The tables of all ranks of a node.

    Args:
        tables: by rank of the world, 2 * ENTRIES words each, zeroed.
        own: this rank.
        fence: orders memory accesses; None where the processor does.
    """

    def __init__(self, tables: Mapping[int, memoryview], own: int, fence: Callable[[], object] | None = None) -> None:
        self._tables = tables
        self._mine = tables[own]
        self._fence = fence

    def put(self, name: str, offset: int) -> bool:
        """Let others find this offset of the arena; False if the table is full."""
        for at in range(0, 2 * ENTRIES, 2):
            if self._mine[at + _KEY] == 0:
                self._mine[at + _OFFSET] = offset
                if self._fence is not None:
                    self._fence()
                self._mine[at + _KEY] = _key(name)
                return True
        return False

    def remove(self, name: str) -> None:
        """Nobody needs to find it any more."""
        key = _key(name)
        for at in range(0, 2 * ENTRIES, 2):
            if self._mine[at + _KEY] == key:
                self._mine[at + _KEY] = 0

    def find(self, world_rank: int, name: str) -> int | None:
        """What a rank has put down; None if nothing."""
        key = _key(name)
        table = self._tables[world_rank]
        for at in range(0, 2 * ENTRIES, 2):
            if table[at + _KEY] == key:
                if self._fence is not None:
                    self._fence()
                return table[at + _OFFSET]
        return None


def _key(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "little") + 1
