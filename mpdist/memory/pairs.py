"""Pairs: 16-bit floating point values computed with two at a time, as the halves of 32-bit words.

The lower and the upper values of n words become two runs of n float32, and at the
end words again: shifts and masks of whole words, which NumPy does with the
widest vectors, where casts between 16 and 32 bits cost a fifth more.

bfloat16  exact float32 values
float16   float32 values times 2^-112, for which the exponents of both types agree, so that denormals need no care;
          without infinities and NaNs, and only where the scaled result is exact: sums, minima, maxima
"""

from __future__ import annotations

import threading
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mpdist.memory.elements import Array
from mpdist.memory.half import INFINITY, QUIET_NAN, Float32, has_at_least, round_bits
from mpdist.memory.scratch import SCRATCH

Words: TypeAlias = npt.NDArray[np.uint32]

_UINT32 = np.dtype(np.uint32)
_INT32 = np.dtype(np.int32)

_SHIFT = np.array(16, np.uint32)
_UPPER = np.array(0xFFFF0000, np.uint32)
_LOWER = np.array(0x0000FFFF, np.uint32)

# A float16's exponent is 3 bits shorter than a float32's, its fraction 13.
_EXPONENT_SHIFT = np.array(3, np.uint32)
_SIGNED_SHIFT = np.array(3, np.int32)
_FRACTION_SHIFT = np.array(13, np.uint32)
_FLOAT16_BITS = np.array(0x8FFFE000, np.uint32)
_ROUND_DOWN = np.array(0x0FFF, np.uint32)
_ONE = np.array(1, np.uint32)
_SIGN = np.array(0x80000000, np.uint32)
_FLOAT16_OVERFLOW = np.float32(65520 * 2.0**-112)


class Run:
    """A scratch array in its views: as values, as bits, and the halves for the lower and the upper values of words."""

    __slots__ = ("bits", "lower", "signed_lower", "signed_upper", "upper", "values")

    def __init__(self, values: Float32) -> None:
        half = len(values) // 2
        self.values = values
        self.bits = values.view(_UINT32)
        self.lower, self.upper = self.bits[:half], self.bits[half:]
        self.signed_lower, self.signed_upper = self.lower.view(_INT32), self.upper.view(_INT32)


class _Runs(threading.local):
    """The views of the calling thread's scratch, for the count last asked for: making them takes as long as a pass."""

    count = -1
    pair: tuple[Run, Run]


_RUNS = _Runs()


def runs(count: int) -> tuple[Run, Run]:
    """Two runs of an even number of values."""
    if _RUNS.count != count:
        _RUNS.pair = Run(SCRATCH.first[:count]), Run(SCRATCH.second[:count])
        _RUNS.count = count
    return _RUNS.pair


def split_bfloat16(x: Array, wide: Run) -> bool:
    """Widen the values of x."""
    words = x.view(_UINT32)
    np.left_shift(words, _SHIFT, wide.lower)
    np.bitwise_and(words, _UPPER, wide.upper)
    return True


def join_bfloat16(wide: Run, spare: Run, out: Array) -> bool:
    """Narrow to `out`, rounded to nearest even; `wide` is kept, `spare` is not."""
    words = out.view(_UINT32)
    round_bits(wide.bits, spare.bits)
    _join(spare, words)
    if np.isnan(np.maximum.reduce(wide.values)):
        _quieten(wide, words)
    return True


def _join(rounded: Run, words: Words) -> None:
    np.right_shift(rounded.lower, _SHIFT, rounded.lower)
    np.bitwise_and(rounded.upper, _UPPER, rounded.upper)
    np.bitwise_or(rounded.lower, rounded.upper, words)


def _quieten(wide: Run, words: Words) -> None:
    is_nan = np.isnan(wide.values)
    lower, upper = is_nan[: len(words)], is_nan[len(words) :]
    nan = QUIET_NAN["bfloat16"]
    words[lower] = words[lower] & _UPPER | np.uint32(nan)
    words[upper] = words[upper] & _LOWER | np.uint32(nan << 16)


def split_float16(x: Array, wide: Run) -> bool:
    """Widen the values of x, times 2^-112; False if one is infinite or NaN."""
    if has_at_least(x, INFINITY["float16"]):
        return False
    np.left_shift(x.view(_UINT32), _SHIFT, wide.lower)
    np.right_shift(wide.signed_lower, _SIGNED_SHIFT, wide.signed_lower)
    np.right_shift(x.view(_INT32), _SIGNED_SHIFT, wide.signed_upper)
    np.bitwise_and(wide.bits, _FLOAT16_BITS, wide.bits)  # away with the copies of the sign
    return True


def join_float16(wide: Run, spare: Run, out: Array) -> bool:
    """Narrow to `out`, rounded to nearest even; both runs are lost. False, before writing, on overflow."""
    if np.maximum.reduce(wide.values) >= _FLOAT16_OVERFLOW or np.minimum.reduce(wide.values) <= -_FLOAT16_OVERFLOW:
        return False
    bits, rounded = wide.bits, spare.bits
    np.right_shift(bits, _FRACTION_SHIFT, rounded)
    np.bitwise_and(rounded, _ONE, rounded)
    np.add(rounded, _ROUND_DOWN, rounded)
    np.add(rounded, bits, rounded)
    np.left_shift(rounded, _EXPONENT_SHIFT, rounded)
    np.bitwise_and(bits, _SIGN, bits)
    np.bitwise_or(rounded, bits, rounded)
    _join(spare, out.view(_UINT32))
    return True
