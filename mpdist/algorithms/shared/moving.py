"""Moving: copying and reducing, wherever the memory is.

Mapped memory is an array like any other. Private memory of another process is
`Remote`: it is read into scratch memory block by block, small enough for a
core's cache, and written from there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpdist.memory.elements import Array
from mpdist.transport.reach import Remote

if TYPE_CHECKING:
    from mpdist.memory import Folder

Memory: TypeAlias = Array | Remote

# What is worked on at a time is to stay in a core's cache (1 to 2 MiB): of one remote source, which is read into
# scratch memory, and of all sources together. Larger ones take fewer calls of the kernel, but longer turns.
BLOCK_BYTES = 512 * 1024
SCRATCH_BYTES = 1024 * 1024

# So many views of scratch memory are kept; making one takes 2 us.
KNOWN_ROWS = 64


def block_bytes(remote: int) -> int:
    """How much of each source is worked on at a time where so many of them are remote."""
    return min(BLOCK_BYTES, SCRATCH_BYTES // max(1, remote))


class _Scratch(threading.local):
    """A thread's memory for blocks."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)
        self._known: dict[tuple[int, int, np.dtype[np.generic]], list[Array]] = {}

    def rows(self, count: int, width: int, dtype: np.dtype[np.generic]) -> list[Array]:
        """`count` arrays of `width` elements."""
        known = self._known.get((count, width, dtype))
        if known is None:
            nbytes = count * width * dtype.itemsize
            if nbytes > self._bytes.size:
                self._bytes = np.empty(nbytes, np.uint8)
                self._known.clear()
            if len(self._known) == KNOWN_ROWS:
                self._known.clear()
            known = list(self._bytes[:nbytes].view(dtype).reshape(count, width))
            self._known[count, width, dtype] = known
        return known


SCRATCH = _Scratch()


def copy(target: Memory, source: Memory) -> None:
    """Copy one of two into the other; at most one of them is remote."""
    if type(source) is Remote:
        source.read_into(target)  # type: ignore[arg-type]  # the other is not
    elif type(target) is Remote:
        target.write(source)  # type: ignore[arg-type]  # the other is not
    else:
        np.copyto(target, source)  # type: ignore[arg-type]  # both are arrays


def fold(folder: Folder, sources: Sequence[Memory], outs: Sequence[Memory]) -> None:
    """Reduce sources in their order into all of outs, any of them remote."""
    count = len(outs[0])
    folding = Folding(folder, sources, outs)
    for start in range(0, count, folding.width):
        folding.fold(start, min(start + folding.width, count))


class Folding:
    """Sources to be reduced in their order into all of outs, any of them remote, part by part.

    Where NumPy folds each source in one call, a part is read, added and forgotten source by source: of four sources
    that takes two thirds to three quarters of the time of reading all of them first.

    Attributes:
        width: elements of a part at the most.
    """

    def __init__(self, folder: Folder, sources: Sequence[Memory], outs: Sequence[Memory]) -> None:
        self._folder = folder
        self._sources: Sequence[Any] = sources
        self._outs: Sequence[Any] = outs
        remote = len([each for each in sources if type(each) is Remote])
        self._near: list[Any] = [out for out in outs if type(out) is not Remote]
        is_near = remote == 0 and len(self._near) == len(outs)
        self._is_by_source = folder.pair_steps > 0 and len(sources) > 1
        dtype = folder.element.storage
        nbytes = SCRATCH_BYTES // len(sources) if self._is_by_source or is_near else block_bytes(remote)
        self.width = max(1, nbytes // dtype.itemsize)
        self._scratch: list[Array] = []
        if self._is_by_source or not is_near:
            rows = 2 if self._is_by_source else remote + (not self._near)
            self._scratch = SCRATCH.rows(rows, min(self.width, len(outs[0])), dtype)

    def fold(self, start: int, end: int) -> None:
        """Reduce a part."""
        if self._is_by_source:
            self._fold_by_source(start, end)
            return
        rooms = iter(self._scratch)
        arrays: list[Array] = []
        for source in self._sources:
            if type(source) is Remote:
                room = next(rooms)[: end - start]
                source.read_into(room, start)
                arrays.append(room)
            else:
                arrays.append(source[start:end])
        near = [each[start:end] for each in self._near] or [self._scratch[-1][: end - start]]
        self._folder.fold(arrays, near)
        for out in self._outs:
            if type(out) is Remote:
                out.write(near[0], start)

    def _fold_by_source(self, start: int, end: int) -> None:
        sum_room, room = (each[: end - start] for each in self._scratch)
        near, sources, join = self._near, self._sources, self._folder.join
        result = near[0][start:end] if near else sum_room
        first, *between, last = sources
        # Any other source may lie where the result goes, so this is written last.
        acc = result if near and near[0] is first else sum_room
        so_far = _seen(first, start, end, acc)
        for source in between:
            join(so_far, _seen(source, start, end, room), acc)
            so_far = acc
        join(so_far, _seen(last, start, end, room), result, is_last=True)
        for out in self._outs:
            if type(out) is Remote:
                out.write(result, start)
            elif out is not near[0]:
                np.copyto(out[start:end], result)


def _seen(source: Any, start: int, end: int, room: Array) -> Array:
    """A part of a source; of a remote one in this room."""
    if type(source) is not Remote:
        part: Array = source[start:end]
        return part
    source.read_into(room, start)
    return room
