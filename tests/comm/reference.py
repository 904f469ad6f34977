"""What reductions must give: computed in one process, from the inputs of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
from comm.arrays import Values, kind_of, plain

UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.logical_and,
    "lor": np.logical_or,
    "lxor": np.logical_xor,
}
OPS_OF_KIND = {
    "b": ("min", "max", "band", "bor", "bxor", "land", "lor", "lxor"),
    "i": tuple(UFUNCS),
    "u": tuple(UFUNCS),
    "f": ("sum", "prod", "min", "max", "avg"),
    "c": ("sum", "prod", "avg"),
}
HALVES = ("float16", "bfloat16")


def ops_for(dtype: str) -> tuple[str, ...]:
    """The named operations that fit the type."""
    return OPS_OF_KIND[kind_of(dtype)]


def reduced(op: str, arrays: Sequence[Values], dtype: str) -> Values:
    """The reduction of all arrays, rounded to the type once."""
    if op == "avg":
        total = reduce(np.add, [array.astype("complex128" if kind_of(dtype) == "c" else "float64") for array in arrays])
        return rounded(total / len(arrays), dtype)
    wide = arrays if dtype not in HALVES else [array.astype(np.float64) for array in arrays]
    return rounded(reduce(UFUNCS[op], wide), dtype)


def rounded(values: Values, dtype: str) -> Values:
    """The nearest values of the type; float32 holds those of bfloat16."""
    if dtype != "bfloat16":
        return values.astype(plain(dtype))
    bits = values.astype(np.float32).view(np.uint32)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return kept.astype(np.uint32).view(np.float32)
