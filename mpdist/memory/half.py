"""The 16-bit floating point types, computed with in float32.

bfloat16 is the upper half of a float32, so widening is a shift; narrowing rounds
to the nearest value, ties to even, as hardware does. Every NaN becomes the one
quiet NaN of its type, so that results do not depend on which kernel made them.
Everything is vectorised NumPy, in blocks that stay in cache.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mpdist.memory.elements import Array, Element
from mpdist.memory.scratch import SCRATCH, blocks

Float32: TypeAlias = npt.NDArray[np.float32]

QUIET_NAN = {"float16": 0x7E00, "bfloat16": 0x7FC0}
INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80}
SIGN = 0x8000

_UINT16 = np.dtype(np.uint16)
_INT16 = np.dtype(np.int16)

# 0-d arrays: NumPy converts a scalar at every call.
_SHIFT = np.array(16, np.uint32)
_ROUND_DOWN = np.array(0x7FFF, np.uint32)
_ONE = np.array(1, np.uint32)


def widen(array: Array, element: Element) -> Float32:
    """A new float32 array with the values of a 1-D storage array; exact."""
    out = np.empty(array.shape, np.float32)
    widen_into(array, out, element)
    return out


def widen_into(array: Array, out: Float32, element: Element) -> None:
    """Write the values of a 1-D storage array to a float32 array of the same length; exact."""
    for part in blocks(array.size):
        np.copyto(out[part], array[part]) if element.name == "float16" else _widen_bfloat16(array[part], out[part])


def _widen_bfloat16(array: Array, out: Float32) -> None:
    bits = out.view(np.uint32)
    np.copyto(bits, array)
    np.left_shift(bits, _SHIFT, bits)


def narrow_into(values: Float32, out: Array, element: Element) -> None:
    """Round 1-D float32 values to `out`, a storage array: nearest, ties to even; too large ones become infinite."""
    narrow = _narrow_float16 if element.name == "float16" else _narrow_bfloat16
    with np.errstate(all="ignore"):
        for part in blocks(values.size):
            narrow(values[part], out[part])


def _narrow_float16(values: Float32, out: Array) -> None:
    np.copyto(out, values, casting="same_kind")
    if has_nan(out, "float16"):
        quieten(out, "float16")


def _narrow_bfloat16(values: Float32, out: npt.NDArray[np.uint16]) -> None:
    rounded = SCRATCH.second[: values.size].view(np.uint32)
    round_bits(values.view(np.uint32), rounded)
    np.right_shift(rounded, _SHIFT, rounded)
    np.copyto(out, rounded, casting="unsafe")
    if np.isnan(np.maximum.reduce(values, initial=0)):  # the rounding carried some of them into other values
        np.copyto(out, QUIET_NAN["bfloat16"], where=np.isnan(values))


def round_bits(bits: npt.NDArray[np.uint32], out: npt.NDArray[np.uint32]) -> None:
    """Round float32 bits to their upper half, nearest and ties to even; the lower half of `out` means nothing.

    A carry moves to the next exponent, at the end to infinity. Not for NaN.
    """
    np.right_shift(bits, _SHIFT, out)
    np.bitwise_and(out, _ONE, out)
    np.add(out, _ROUND_DOWN, out)
    np.add(out, bits, out)


def has_at_least(array: Array, magnitude: int) -> bool:
    """Whether the bits of any of 1-D 16-bit values, without the sign, are at least `magnitude`."""
    return bool(
        np.maximum.reduce(array.view(_UINT16), initial=0) >= magnitude + SIGN
        or np.maximum.reduce(array.view(_INT16), initial=0) >= magnitude
    )


def has_nan(array: Array, name: str) -> bool:
    """Whether any value of a 1-D storage array is a NaN."""
    return has_at_least(array, INFINITY[name] + 1)


def has_negative_nan(array: Array, name: str) -> bool:
    """Whether any value of a 1-D storage array is a NaN with the sign bit: half the cost of looking for both."""
    return bool(np.maximum.reduce(array.view(_UINT16), initial=0) > INFINITY[name] + SIGN)


def quieten(array: Array, name: str) -> None:
    """Make every NaN of a storage array the one quiet NaN of its type."""
    bits = array.view(_UINT16)
    is_nan = (bits & np.uint16(SIGN - 1)) > INFINITY[name]
    np.copyto(bits, QUIET_NAN[name], where=is_nan)
