"""Scratch: two arrays per thread in which blocks are computed, so that no kernel allocates.

A block and its scratch fit a core's L2 cache, whatever the length of the slice
that is worked on.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

# Elements of 4 bytes in a block. Smaller blocks pay more for calls (16 Ki: 15 % more time), larger ones leave L2.
BLOCK_COUNT = 32 * 1024
BLOCK_BYTES = 4 * BLOCK_COUNT

CACHE_LINE = 64


def blocks(count: int, limit: int = BLOCK_COUNT) -> list[slice]:
    """Slices that cut `count` elements into pieces of nearly the same length, at most `limit`."""
    if count <= limit:
        return [slice(0, count)]
    pieces = -(-count // limit)
    step = min(-(-count // (pieces * CACHE_LINE)) * CACHE_LINE, limit)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


class Scratch(threading.local):
    """The two arrays of the calling thread, BLOCK_BYTES each, aligned to cache lines.

    Attributes:
        first, second: as float32; other types are views of them.
    """

    first: npt.NDArray[np.float32]
    second: npt.NDArray[np.float32]

    def __init__(self) -> None:
        raw = np.empty(2 * BLOCK_BYTES + CACHE_LINE, np.uint8)
        start = -raw.ctypes.data % CACHE_LINE  # vector loads across two cache lines take 20 % longer
        both = raw[start : start + 2 * BLOCK_BYTES].view(np.float32)
        self.first, self.second = both[:BLOCK_COUNT], both[BLOCK_COUNT:]


SCRATCH = Scratch()
