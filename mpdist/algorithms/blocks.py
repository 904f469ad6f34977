"""Blocks: several arrays as one call of MPI takes them: memory, and where in it each of them begins.

MPI leaves alone what lies between two blocks. So they go from and to where they lie, be it in one array or in arrays
of their own. They are copied one behind the other only where MPI cannot say where they are: a distance is no multiple
of an element, or more than it counts to.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mpdist.memory import HOST, Buffer


class Placed(NamedTuple):
    """Blocks in memory.

    Attributes:
        memory: from the first of their bytes to the last; it keeps them alive.
        starts: where each begins, in the unit that MPI counts; None: they lie one behind the other.
    """

    memory: Buffer
    starts: list[int] | None = None


def placed(blocks: Sequence[Buffer], unit: int, most: int | None) -> Placed | None:
    """The blocks where they lie.

    Args:
        unit: bytes of what MPI counts.
        most: to which number it counts; None: any.

    Returns:
        None where MPI cannot say where they are, or where all are empty.
    """
    spans = [(block.address, block.nbytes) for block in blocks if block.nbytes]
    if not spans:
        return None
    low = min(spans)[0]
    starts = []
    for block in blocks:
        start, rest = divmod(block.address - low, unit) if block.nbytes else (0, 0)
        if rest or (most is not None and start > most):
            return None
        starts.append(start)
    return Placed(_memory(blocks, low, max(map(sum, spans)) - low), starts)


def readable(blocks: Sequence[Buffer], unit: int, most: int | None) -> Placed:
    """The blocks where they lie, else copied."""
    return placed(blocks, unit, most) or Placed(concatenated(blocks))


def joined(blocks: Sequence[Buffer]) -> Buffer:
    """The blocks one behind the other: themselves if they lie so, else a copy."""
    full = [block for block in blocks if block.nbytes]
    if not full or any(one.address + one.nbytes != other.address for one, other in pairwise(full)):
        return concatenated(blocks)
    return _memory(blocks, full[0].address, sum(block.nbytes for block in full))


def concatenated(blocks: Sequence[Buffer]) -> Buffer:
    """The blocks one behind the other, copied."""
    packed = np.concatenate([block.array() for block in blocks])
    return Buffer(packed, packed.size, packed.nbytes, blocks[0].element, HOST, False, packed)


def are_apart(blocks: Sequence[Buffer]) -> bool:
    """Whether no two share memory."""
    spans = sorted((block.address, block.address + block.nbytes) for block in blocks if block.nbytes)
    return all(end <= start for (_, end), (start, _) in pairwise(spans))


def _memory(blocks: Sequence[Buffer], address: int, nbytes: int) -> Buffer:
    element = blocks[0].element
    is_readonly = any(block.readonly for block in blocks)
    return Buffer(None, nbytes // element.itemsize, nbytes, element, HOST, is_readonly, blocks, address)
