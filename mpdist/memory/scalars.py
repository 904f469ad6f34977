"""Scalars: ops on single numbers by Python's own arithmetic, which calls nothing, for where there are few of them.

Numbers of 32 bits are added as ones of 64, and rounded when they are stored.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any


def _least(a: Any, b: Any) -> Any:
    return a if a <= b or a != a else b


def _greatest(a: Any, b: Any) -> Any:
    return a if a >= b or a != a else b


SCALAR_FOLDS: Mapping[str, Callable[[Any, Any], Any]] = {
    "sum": operator.add,
    "avg": operator.add,
    "prod": operator.mul,
    "min": _least,
    "max": _greatest,
    "band": operator.and_,
    "bor": operator.or_,
    "bxor": operator.xor,
}
"""Two numbers into one, by the name of the op; avg is to be divided by their number. min and max give a NaN on."""

SCALAR_FORMATS: Mapping[str, str] = {"float32": "f", "float64": "d", "int32": "i", "int64": "q"}
"""As what a memoryview has them, by the name of the element type."""


def wrapped(value: int, itemsize: int) -> int:
    """An integer that is too large for its type, as processors have it."""
    half = 1 << 8 * itemsize - 1
    return (value + half) % (2 * half) - half
