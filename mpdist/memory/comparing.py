"""Comparing: floating point numbers as integers of the same order, NaN beyond infinity.

MPI says nothing about NaN in a max or min: what comes out depends on the order of
the numbers, and differs between ranks. Of integers it does not.

    bits of a number without sign       grow with it
    bits of a number with sign          all but the sign flipped, they grow with it, too
    NaN                                 largest integer for max, smallest for min, so that it comes out

-0.0 is less than 0.0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpdist.memory.elements import Array
from mpdist.memory.scratch import blocks

_INTEGERS: dict[int, np.dtype[Any]] = {4: np.dtype(np.int32), 8: np.dtype(np.int64)}
_FLOATS: dict[int, np.dtype[Any]] = {4: np.dtype(np.float32), 8: np.dtype(np.float64)}


def to_integers(values: Array, op: str) -> Array:
    """A new array of integers that compare as 1-D float32 or float64 values do; `op`: max or min."""
    integers = values.view(_INTEGERS[values.itemsize]).copy()
    limits = np.iinfo(integers.dtype)
    beyond = integers.dtype.type(limits.max if op == "max" else limits.min)
    for part in blocks(integers.size):
        _flip_negative(integers[part])
        np.copyto(integers[part], beyond, where=np.isnan(values[part]))
    return integers


def from_integers(integers: Array, out: Array) -> None:
    """The values of such integers, which are lost, and for NaN always the same one."""
    values = integers.view(_FLOATS[integers.itemsize])
    for part in blocks(integers.size):
        _flip_negative(integers[part])
        np.copyto(out[part], values[part])
        np.copyto(out[part], np.nan, where=np.isnan(values[part]))


def _flip_negative(integers: Array) -> None:
    """Flip all bits but the sign of negative ones; done twice, they are as before."""
    flipped = np.right_shift(integers, 8 * integers.itemsize - 1)
    np.bitwise_and(flipped, np.iinfo(integers.dtype).max, flipped)
    np.bitwise_xor(integers, flipped, integers)
