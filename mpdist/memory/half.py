"""The 16-bit floating point types, computed with in float32.

bfloat16 is the upper half of a float32, so widening is a shift; narrowing rounds
to the nearest value, ties to even, as hardware does. Everything is vectorised
NumPy, in chunks that stay in cache.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mpdist.memory.elements import Array, Element

Float32: TypeAlias = npt.NDArray[np.float32]

# Elements converted at a time: the temporaries (at most 12 bytes an element) stay within a core's cache.
CHUNK_COUNT = 1 << 15

_SHIFT = np.uint32(16)
_ROUND_DOWN = np.uint32(0x7FFF)
_ONE = np.uint32(1)
_QUIET_NAN = np.uint32(0x0040)


def chunks(count: int) -> list[slice]:
    """Slices that cut `count` elements into pieces of at most CHUNK_COUNT."""
    return [slice(start, min(start + CHUNK_COUNT, count)) for start in range(0, count, CHUNK_COUNT)]


def widen(array: Array, element: Element) -> Float32:
    """A new float32 array with the values of a 1-D storage array; exact."""
    out = np.empty(array.shape, np.float32)
    widen_into(array, out, element)
    return out


def widen_into(array: Array, out: Float32, element: Element) -> None:
    """Write the values of a storage array to a float32 array of the same shape; exact."""
    if element.name == "bfloat16":
        np.left_shift(array, _SHIFT, out=out.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(out, array)


def narrow_into(values: Float32, out: Array, element: Element) -> None:
    """Round 1-D float32 values to `out`, a storage array: nearest, ties to even; too large ones become infinite."""
    if element.name == "bfloat16":
        for part in chunks(values.size):
            _round_bfloat16(values[part], out[part])
        return
    with np.errstate(all="ignore"):
        np.copyto(out, values, casting="same_kind")


def _round_bfloat16(values: Float32, out: npt.NDArray[np.uint16]) -> None:
    bits = values.view(np.uint32)
    upper = bits >> _SHIFT
    rounded = upper & _ONE
    rounded += _ROUND_DOWN
    rounded += bits  # a carry moves to the next exponent, at the end to infinity
    rounded >>= _SHIFT
    is_nan = np.isnan(values)
    if is_nan.any():
        np.copyto(rounded, upper | _QUIET_NAN, where=is_nan)
    np.copyto(out, rounded, casting="unsafe")
