"""Neighbours: the arenas of all ranks of this node, each mapped by everyone.

A rank hands out memory of its own arena only, so that an allocation asks nobody;
what lies there is told to others as an offset, for every process has the files
mapped somewhere else.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpdist.memory.arena import Arena, Block
from mpdist.memory.elements import Array
from mpdist.transport import reach as reaching
from mpdist.transport.notices import ENTRIES, Notices
from mpdist.transport.reach import Reach
from mpdist.transport.sharing import shared_files

if TYPE_CHECKING:
    from mpdist.memory import Buffer
    from mpdist.transport.mpi import Transport

# Address space costs nothing but itself: all arenas of a node together are this many times its memory.
OVERSIZE = 2
MIN_ARENA_BYTES = 1 << 30

# Stores become visible in the order in which they were made, and loads are made in order: nothing is needed
# between data and flag. Elsewhere (Arm, Power) a full fence goes between them.
_IS_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")


class Neighbours:
    """Memory that this rank shares with the ranks of its node.

    Attributes:
        arena: what this rank hands out.
        kept: blocks that other ranks may use for ever.
        fence: orders the memory accesses before it against those after it; None where the processor does.
        reach: the others' private memory; None where the kernel keeps it private.
        notices: what ranks offer each other; None where there was no memory for it.
        boxes_with_stretches: fastboxes of this rank with memory for long data.
    """

    notices: Notices | None = None
    boxes_with_stretches = 0

    def __init__(
        self,
        descriptor: int,
        maps: Sequence[mmap.mmap],
        world_ranks: Sequence[int],
        own: int,
        fence: Callable[[], object] | None,
        reach: Reach | None,
    ) -> None:
        self.arena = Arena(descriptor, maps[own])
        self.fence = fence
        self.reach = reach
        self._maps = dict(zip(world_ranks, maps, strict=True))
        self.kept: list[Block] = []
        self._has_said = False

    def has(self, world_rank: int) -> bool:
        """Whether that rank is one of them."""
        return world_rank in self._maps

    def memory(self, world_rank: int) -> mmap.mmap:
        """A rank's arena."""
        return self._maps[world_rank]

    def words(self, world_rank: int, offset: int, count: int) -> memoryview:
        """64-bit words of a rank's arena: each is read or written in one piece."""
        return self.numbers(world_rank, offset, 8 * count, "q")

    def numbers(self, world_rank: int, offset: int, nbytes: int, form: str) -> memoryview[Any]:
        """Memory of a rank's arena, as numbers of a format of `struct`."""
        return memoryview(self._maps[world_rank])[offset : offset + nbytes].cast(form)  # type: ignore[call-overload, no-any-return]  # one of them

    def array(self, world_rank: int, offset: int, count: int, dtype: npt.DTypeLike) -> Array:
        """`count` elements of a rank's arena."""
        view: Array = np.frombuffer(self._maps[world_rank], dtype, count, offset)
        return view

    def offset_of(self, buffer: Buffer) -> int | None:
        """Where the buffer lies in this rank's arena; None for private memory."""
        nbytes, owner = buffer.nbytes, buffer.owner
        if not nbytes:
            return None
        if type(owner) is np.ndarray:
            base = owner.base
            if base is None:
                return None
            if type(base) is np.ndarray and base.nbytes == nbytes:  # maybe all of a block, which knows where it is
                block: object = base.base
                if type(block) is Block and block.is_of(self.arena):
                    return block.offset
        return self.arena.offset_of(buffer.address, buffer.nbytes)

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        """A new array that the node's ranks can read; a private one, said once, where no memory is left for it."""
        array = self.arena.empty(shape, dtype)
        if array is not None:
            return array
        private = np.empty(shape, dtype)  # raises where there is none, either
        self._say_once(f"an array of shape {shape}", "it and others are made in private memory, which is slower")
        return private

    def allocate(self, nbytes: int, what: str) -> Block | None:
        """A new block; None, said once, where no memory is left for it."""
        block = self.arena.allocate(nbytes)
        if block is None:
            self._say_once(what, "MPI's own calls take its place, which is slower")
        return block

    def _say_once(self, what: str, consequence: str) -> None:
        if self._has_said:
            return
        self._has_said = True
        used = self.arena.used_bytes / 2**20
        print(
            f"mpdist: no shared memory is left for {what} ({used:.0f} MiB are in use by this rank): {consequence}",
            file=sys.stderr,
        )


def connect(node: Transport, folder: str = "", has_reach: bool = True) -> Neighbours | None:
    """Map the arenas of the node's ranks; collective and blocking, at start.

    Args:
        folder: where the files are made; empty: in memory, without a name.
        has_reach: whether private memory may be read and written through the kernel.

    Returns:
        None, on all ranks of the node, where memory cannot be shared.
    """
    files = shared_files(node, _arena_bytes(node.size), folder)
    if files is None:
        return None
    descriptor, maps = files
    fence = None if _IS_ORDERED else node.fence()
    reach = reaching.connect(node) if has_reach else None
    shared = Neighbours(descriptor, maps, node.world_ranks(), node.rank, fence, reach)
    shared.notices = _notices(shared, node)
    return shared


def _notices(shared: Neighbours, node: Transport) -> Notices | None:
    """In the first block of each arena."""
    block = shared.arena.allocate(mmap.PAGESIZE)
    if not all(node.all_gather_now(block is not None and block.offset == 0)):
        return None
    assert block is not None
    shared.kept.append(block)
    ranks = node.world_ranks()
    tables = {rank: shared.words(rank, 0, 2 * ENTRIES) for rank in ranks}
    return Notices(tables, ranks[node.rank], shared.fence)


def _arena_bytes(ranks: int) -> int:
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        memory = MIN_ARENA_BYTES
    page = mmap.PAGESIZE
    return max(MIN_ARENA_BYTES, OVERSIZE * memory // ranks) // page * page
