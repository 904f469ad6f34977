"""Reduction: what happens before and after MPI's call, with NumPy in MPI's place."""

from __future__ import annotations

import numpy as np
import pytest

from mpdist.algorithms.reduction import Reduction
from mpdist.errors import UsageError
from mpdist.memory import BY_NAME, ELEMENTS, as_buffer, as_op, check_op, premul_sum


def reduce_by_hand(how: Reduction, inputs: list[np.ndarray]) -> np.ndarray:
    """Enter each input, add them up as MPI would, leave into an array of the input's type."""
    entered = [how.enter(as_buffer(x)).array() for x in inputs]
    out = as_buffer(np.empty_like(inputs[0]), writable=True)
    room = how.room(out)
    room.array()[:] = np.add.reduce(entered)
    how.leave(room, out)
    return np.asarray(out.owner)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
def test_avg_divides_by_the_number_of_ranks(dtype: str) -> None:
    inputs = [np.array([1, 2, 4], dtype), np.array([3, 2, 8], dtype)]
    how = Reduction.of(as_op("avg"), BY_NAME[dtype], 2)
    assert reduce_by_hand(how, inputs).tolist() == [2, 2, 6]
    assert inputs[0].tolist() == [1, 2, 4]


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32", "uint8", "complex128"])
def test_premul_sum_multiplies_a_copy(dtype: str) -> None:
    x = np.array([1, 2, 4], dtype)
    how = Reduction.of(premul_sum(2), BY_NAME[dtype], 2)
    assert reduce_by_hand(how, [x, x]).tolist() == [4, 8, 16]
    assert x.tolist() == [1, 2, 4]


def test_half_types_are_added_in_float32() -> None:
    how = Reduction.of(as_op("sum"), BY_NAME["float16"], 3)
    inputs = [np.array([2048], np.float16), np.array([1], np.float16), np.array([1], np.float16)]
    assert reduce_by_hand(how, inputs).tolist() == [2050]


def test_avg_of_a_prefix_divides_by_the_prefix() -> None:
    how = Reduction.of(as_op("avg"), BY_NAME["float64"], 4)
    out = as_buffer(np.array([6.0]), writable=True)
    how.leave(out, out, 3)
    assert out.array().tolist() == [2]


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_what_mpi_does_alone_is_neither_copied_before_nor_after(element: object) -> None:
    for name in ("sum", "min", "lor"):
        op = as_op(name)
        try:
            check_op(op, element)  # type: ignore[arg-type]
        except UsageError:
            continue
        how = Reduction.of(op, element, 2)  # type: ignore[arg-type]
        assert how.is_compared == (name == "min" and element.kind == "float")  # type: ignore[attr-defined]
        is_short = element.kind in ("int", "uint") and element.itemsize < 4  # type: ignore[attr-defined]
        assert how.is_short == (is_short and name == "sum")
        assert how.is_direct == (not (element.is_half or how.is_compared or how.is_short))  # type: ignore[attr-defined]
        assert how.mpi_op == name
        if how.is_direct:
            x = as_buffer(np.zeros(2, element.storage))  # type: ignore[attr-defined]
            assert how.enter(x) is x
            assert how.room(x) is x


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_numbers_are_compared_as_integers_and_nan_comes_out(dtype: str, op: str) -> None:
    ufunc = getattr(np, f"{op}imum")
    inputs = [np.array([1, np.nan, -np.inf, 3], dtype), np.array([-2, 1, 5, np.nan], dtype)]
    how = Reduction.of(as_op(op), BY_NAME[dtype], 2)
    entered = [how.enter(as_buffer(x)) for x in inputs]
    out = as_buffer(np.empty(4, dtype), writable=True)
    room = how.room(out)
    assert {buffer.element.kind for buffer in (*entered, room)} == {"int"}
    ufunc(entered[0].array(), entered[1].array(), out=room.array())
    how.leave(room, out)
    np.testing.assert_array_equal(out.array(), ufunc(*inputs))


def test_an_op_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="avg"):
        Reduction.of(as_op("avg"), BY_NAME["int32"], 2)
