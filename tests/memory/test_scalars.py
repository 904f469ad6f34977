"""Ops on single numbers do what NumPy's do."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from mpdist.memory import BY_NAME, as_op
from mpdist.memory.ops import ufunc_of
from mpdist.memory.scalars import SCALAR_FOLDS, SCALAR_FORMATS, wrapped

FLOATS = [0.0, -1.5, 3.25, 1e30, -1e30, np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("name", SCALAR_FORMATS)
def test_formats_have_the_elements_of_their_type(name: str) -> None:
    element = BY_NAME[name]
    view: memoryview[Any] = memoryview(bytearray(2 * element.itemsize)).cast(SCALAR_FORMATS[name])  # type: ignore[call-overload]  # a format
    view[1] = 3
    np.testing.assert_array_equal(np.frombuffer(view.obj, element.storage), [0, 3])


@pytest.mark.parametrize("op", sorted(SCALAR_FOLDS.keys() - {"band", "bor", "bxor"}))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_floating_point_numbers(op: str) -> None:
    ufunc: Any = ufunc_of(as_op(op))
    for a, b in itertools.product(FLOATS, repeat=2):
        np.testing.assert_array_equal(SCALAR_FOLDS[op](a, b), ufunc(a, b), f"{op} {a} {b}")


@pytest.mark.parametrize("name", ["int32", "int64"])
@pytest.mark.parametrize("op", sorted(SCALAR_FOLDS.keys() - {"avg"}))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_integers_wrap_as_numpys_do(op: str, name: str) -> None:
    dtype, ufunc = np.dtype(name), ufunc_of(as_op(op))
    limits = np.iinfo(dtype)
    numbers = [0, 1, -1, 5, 77_777, limits.max, limits.min, limits.max // 3]
    for a, b in itertools.product(numbers, repeat=2):
        wanted = ufunc(np.array([a], dtype), np.array([b], dtype))
        assert wrapped(SCALAR_FOLDS[op](a, b), dtype.itemsize) == wanted[0], f"{op} {a} {b}"
