"""Moving: copying and reducing, wherever the memory is.

Mapped memory is an array like any other. Private memory of another process is
`Remote`: it is read into scratch memory block by block, small enough for a
core's cache, and written from there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from mpdist.memory.elements import Array
from mpdist.transport.reach import Remote

if TYPE_CHECKING:
    from mpdist.memory import Folder

Memory: TypeAlias = Array | Remote

# What is read of a remote source at a time, and of all of them: it is to stay in a core's cache (1 to 2 MiB), and one
# call costs 5 us.
BLOCK_BYTES = 256 * 1024
SCRATCH_BYTES = 1024 * 1024


def block_bytes(sources: int) -> int:
    """How much of each of so many sources is worked on at a time."""
    return min(BLOCK_BYTES, SCRATCH_BYTES // max(1, sources))


class _Scratch(threading.local):
    """A thread's memory for blocks."""

    def __init__(self) -> None:
        self.bytes = np.empty(0, np.uint8)

    def rows(self, count: int, width: int, dtype: np.dtype[np.generic]) -> list[Array]:
        """`count` arrays of `width` elements."""
        nbytes = count * width * dtype.itemsize
        if nbytes > self.bytes.size:
            self.bytes = np.empty(nbytes, np.uint8)
        return list(self.bytes[:nbytes].view(dtype).reshape(count, width))


_SCRATCH = _Scratch()


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
    remote = sum(type(each) is Remote for each in sources)
    near = [out for out in outs if type(out) is not Remote]
    if remote == 0 and len(near) == len(outs):
        folder.fold(sources, outs)  # type: ignore[arg-type]  # all are arrays
        return
    dtype = folder.element.storage
    rows = remote + (not near)
    count = len(outs[0])
    width = min(count, max(1, block_bytes(remote) // dtype.itemsize))
    scratch = _SCRATCH.rows(rows, width, dtype)
    for start in range(0, count, width):
        part = slice(start, min(start + width, count))
        _fold_block(folder, [each[part] for each in sources], [each[part] for each in outs], scratch)


def _fold_block(folder: Folder, sources: list[Memory], outs: list[Memory], scratch: list[Array]) -> None:
    count = len(outs[0])
    free = iter(scratch)
    arrays: list[Array] = []
    for source in sources:
        if isinstance(source, Remote):
            room = next(free)[:count]
            source.read_into(room)
            arrays.append(room)
        else:
            arrays.append(source)
    near = [out for out in outs if not isinstance(out, Remote)] or [scratch[-1][:count]]
    folder.fold(arrays, near)
    for out in outs:
        if isinstance(out, Remote):
            out.write(near[0])
