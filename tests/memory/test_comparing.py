"""Floating point numbers as integers of the same order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpdist.memory.comparing import from_integers, to_integers

FLOATS = {"float32": 32, "float64": 64}


def values(dtype: str) -> np.ndarray:
    limits = np.finfo(dtype)
    positive = [0.0, limits.smallest_subnormal, limits.tiny, 1.0, 1 + limits.eps, limits.max, np.inf]
    return np.array([*(-value for value in reversed(positive)), *positive], dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_integers_have_the_order_of_the_numbers(dtype: str) -> None:
    integers = to_integers(values(dtype), "max").tolist()
    assert all(low < high for low, high in itertools.pairwise(integers))


@pytest.mark.parametrize("dtype", FLOATS)
@given(st.data())
def test_the_numbers_come_back(dtype: str, data: st.DataObject) -> None:
    x = np.array(data.draw(st.lists(st.floats(width=FLOATS[dtype]))), dtype)
    for op in ("max", "min"):
        out = np.empty_like(x)
        from_integers(to_integers(x, op), out)
        np.testing.assert_array_equal(out, x)
        assert (np.signbit(out) == np.signbit(x))[~np.isnan(x)].all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["max", "min"])
def test_nan_comes_out_and_is_always_the_same_one(dtype: str, op: str) -> None:
    ufunc = getattr(np, f"{op}imum")
    nans = np.array([np.nan, -np.nan, np.nan], dtype)
    nans.view(f"int{FLOATS[dtype]}")[2] += 5
    for nan, other in itertools.product(nans, values(dtype)):
        x, y = np.array([nan, other]), np.array([other, nan])
        out = np.empty_like(x)
        from_integers(ufunc(to_integers(x, op), to_integers(y, op)), out)
        assert out.tobytes() == np.full(2, np.nan, dtype).tobytes()


def test_long_arrays_are_done_whole_and_the_input_stays() -> None:
    x = np.random.default_rng(0).standard_normal(100_003)
    before, out = x.copy(), np.empty_like(x)
    from_integers(to_integers(x, "min"), out)
    np.testing.assert_array_equal(out, before)
    np.testing.assert_array_equal(x, before)
