"""Reduce operations: names, which types they fit, what they compute."""

from __future__ import annotations

from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpdist.errors import UsageError
from mpdist.memory import (
    BY_NAME,
    ELEMENTS,
    OP_NAMES,
    ReduceOp,
    as_op,
    check_op,
    finish,
    fold,
    narrow_into,
    premul_sum,
    premultiply,
    widen,
)

ARITHMETIC = {"sum", "prod"}
ORDER = {"min", "max"}
BITWISE = {"band", "bor", "bxor"}
LOGICAL = {"land", "lor", "lxor"}
FITS: dict[str, set[str]] = {
    "bool": ORDER | BITWISE | LOGICAL,
    "int": ARITHMETIC | ORDER | BITWISE | LOGICAL,
    "uint": ARITHMETIC | ORDER | BITWISE | LOGICAL,
    "float": ARITHMETIC | ORDER | {"avg"},
    "complex": ARITHMETIC | {"avg"},
}
REFERENCE: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
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
GRID = [(name, element) for element in ELEMENTS for name in OP_NAMES if name in FITS[element.kind]]


def stored(values: list[Any], element: Any) -> npt.NDArray[Any]:
    """Values in the element's storage."""
    if not element.is_half:
        return np.array(values).astype(element.storage)
    out = np.empty(len(values), element.storage)
    narrow_into(np.array(values, np.float32), out, element)
    return out


def values_of(array: npt.NDArray[Any], element: Any) -> list[Any]:
    return list((widen(array, element) if element.is_half else array).tolist())


def multiply_and_keep_the_larger(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    larger: npt.NDArray[Any] = np.maximum(a * b, b)
    return larger


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize("name", OP_NAMES)
def test_a_name_is_an_operation(name: str) -> None:
    assert as_op(name).name == name
    assert as_op(as_op(name)) is as_op(name)


def test_the_names_are_those_of_torch_distributed_and_mpi() -> None:
    assert set(OP_NAMES) == ARITHMETIC | ORDER | BITWISE | LOGICAL | {"avg"}


@pytest.mark.parametrize("op", ["add", "SUM", "premul_sum", "", None, 3, ["sum"], ()])
def test_an_unknown_operation_is_refused_with_the_valid_names(op: object) -> None:
    with pytest.raises(UsageError, match=r"sum, avg, prod.*premul_sum.*function of two arrays"):
        as_op(op)


def test_a_function_is_never_taken_for_an_operation_of_that_name() -> None:
    assert as_op(np.add).name == "<add>"
    assert as_op(np.add).function is np.add


def test_what_has_no_name_is_called_by_its_type_and_a_partial_by_its_function() -> None:
    assert as_op(partial(partial(np.add), dtype=np.float64)).name == "<partial(add)>"
    assert as_op(np.vectorize(divmod)).name == "<divmod>"
    assert as_op(methodcaller("fold")).name == "<methodcaller>"
    assert as_op(partial(methodcaller("fold"))).name == "<partial(methodcaller)>"


@pytest.mark.parametrize(("op", "name"), [(sum, "sum"), (min, "min"), (max, "max"), (any, "lor"), (all, "land")])
def test_pythons_functions_of_a_sequence_are_refused(op: Any, name: str) -> None:
    with pytest.raises(UsageError, match=f"built-in function {op.__name__}.*write op='{name}'"):
        as_op(op)


@pytest.mark.parametrize(
    ("op", "name"),
    [(np.sum, "sum"), (np.prod, "prod"), (np.mean, "avg"), (np.average, "avg"), (np.min, "min"),
     (np.amin, "min"), (np.max, "max"), (np.amax, "max"), (np.any, "lor"), (np.all, "land")],
)  # fmt: skip
def test_numpys_functions_of_an_array_are_refused(op: Any, name: str) -> None:
    with pytest.raises(UsageError, match=f"function {op.__name__}.*does not take two; write op='{name}'"):
        as_op(op)


def test_torchs_operations_are_refused_with_the_valid_names() -> None:
    ops = pytest.importorskip("torch.distributed").ReduceOp
    for op in (ops.SUM, ops.AVG):
        with pytest.raises(UsageError, match=r"op is one of torch\.distributed's.*one of sum, avg, prod"):
            as_op(op)


@pytest.mark.parametrize("factor", ["2", None, [1.0], np.ones(1)])
def test_a_factor_is_a_number(factor: Any) -> None:
    with pytest.raises(UsageError, match="needs a number"):
        premul_sum(factor)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("SUM",), "op='SUM' is not a reduction; needed one of sum, avg, prod"),
        ((None,), "op=None is not a reduction"),
        ((["a"],), r"op=\['a'\] is not a reduction"),
        (("premul_sum",), "premul_sum needs a number as factor, got a NoneType"),
        (("max", 2.0), r"op 'max' has no factor, only premul_sum has: mpdist.premul_sum\(factor\)"),
        (("<f>", 2.0, np.hypot), "op '<f>' has no factor"),
    ],
)
def test_an_operation_that_means_nothing_is_refused_when_it_is_made(arguments: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ReduceOp(*arguments)


def test_a_numpy_scalar_is_a_number() -> None:
    assert premul_sum(np.float32(0.5)) == ReduceOp("premul_sum", 0.5)  # type: ignore[arg-type]
    assert str(premul_sum(0.5)) == "premul_sum(0.5)"


# ---------------------------------------------------------------------- what fits


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda element: element.name)
@pytest.mark.parametrize("name", OP_NAMES)
def test_an_operation_fits_a_type_or_says_what_to_do(name: str, element: Any) -> None:
    if name in FITS[element.kind]:
        check_op(as_op(name), element)
        return
    with pytest.raises(UsageError, match=rf"op='{name}' does not fit elements of type {element.name}: \w+"):
        check_op(as_op(name), element)


@pytest.mark.parametrize(
    ("name", "element", "words"),
    [
        ("avg", "int32", "op='sum' and divide"),
        ("sum", "bool", "lor.*land.*astype"),
        ("min", "complex64", "no order"),
        ("band", "float32", "integer"),
        ("land", "bfloat16", "x != 0"),
    ],
)
def test_a_misfit_names_the_remedy(name: str, element: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_op(as_op(name), BY_NAME[element])


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda element: element.name)
def test_a_user_function_fits_every_type(element: Any) -> None:
    check_op(as_op(np.add), element)


@pytest.mark.parametrize(
    ("factor", "fitting"),
    [
        (2, {"int", "uint", "float", "complex"}),
        (0.5, {"float", "complex"}),
        (1j, {"complex"}),
    ],
)
def test_a_factor_must_be_a_value_of_the_type(factor: complex, fitting: set[str]) -> None:
    for element in ELEMENTS:
        if element.kind in fitting:
            check_op(premul_sum(factor), element)
        else:
            with pytest.raises(UsageError, match=element.name):
                check_op(premul_sum(factor), element)


@pytest.mark.parametrize(("factor", "name"), [(256, "uint8"), (-1, "uint64"), (128, "int8"), (2**63, "int64")])
def test_an_integer_factor_outside_the_range_is_refused(factor: int, name: str) -> None:
    with pytest.raises(UsageError, match="not a value of"):
        check_op(premul_sum(factor), BY_NAME[name])


@pytest.mark.parametrize("name", ["float32", "complex128", "int64"])
@pytest.mark.parametrize("digits", [400, 5000])
def test_an_integer_factor_larger_than_any_number_is_refused(digits: int, name: str) -> None:
    with pytest.raises(UsageError, match=f"hundreds of digits is not a value of {name}"):
        check_op(premul_sum(10**digits), BY_NAME[name])


# ---------------------------------------------------------------------- what is computed


@pytest.mark.parametrize(("name", "element"), GRID, ids=lambda part: getattr(part, "name", part))
def test_a_step_computes_what_numpy_does(name: str, element: Any) -> None:
    a, b = [0, 1, 2, 3, 0, 5], [1, 1, 0, 6, 0, 3]
    acc, x = stored(a, element), stored(b, element)
    before = x.tobytes()
    fold(as_op(name), acc, x, element)
    dtype = np.float32 if element.is_half else element.storage
    expected = REFERENCE[name](np.array(a).astype(dtype), np.array(b).astype(dtype)).astype(dtype)
    assert values_of(acc, element) == expected.tolist()
    assert x.tobytes() == before


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_min_and_max_propagate_nan(op: str, name: str) -> None:
    element = BY_NAME[name]
    acc, x = stored([1, np.nan], element), stored([np.nan, 1], element)
    fold(as_op(op), acc, x, element)
    assert np.isnan(values_of(acc, element)).all()


@pytest.mark.parametrize("element", [e for e in ELEMENTS if "avg" in FITS[e.kind]], ids=lambda element: element.name)
def test_the_average_divides_at_the_end(element: Any) -> None:
    acc = stored([3, 6, -9], element)
    finish(as_op("avg"), acc, 3, element)
    assert values_of(acc, element) == [1, 2, -3]


def test_the_other_operations_have_no_end() -> None:
    acc = np.array([3, 6])
    finish(as_op("sum"), acc, 3, BY_NAME["int64"])
    assert acc.tolist() == [3, 6]


@pytest.mark.parametrize("element", [e for e in ELEMENTS if e.kind != "bool"], ids=lambda element: element.name)
def test_premultiplying_leaves_the_input_alone(element: Any) -> None:
    x = stored([1, 2, 3], element)
    product = premultiply(premul_sum(3), x, element)
    assert values_of(x, element) == [1, 2, 3]
    assert values_of(product, element) == [3, 6, 9]
    assert product.dtype == element.storage


def test_premultiplying_without_a_factor_is_a_copy() -> None:
    x = np.arange(3)
    product = premultiply(as_op("sum"), x, BY_NAME["int64"])
    assert product.tolist() == [0, 1, 2]
    assert not np.shares_memory(product, x)


@given(st.lists(st.floats(-100, 100, width=16), min_size=1, max_size=40))
def test_a_half_sum_is_rounded_once_per_step(values: list[float]) -> None:
    torch = pytest.importorskip("torch")
    theirs = torch.tensor(values, dtype=torch.bfloat16)
    ours = theirs.view(torch.int16).numpy().view(np.uint16).copy()
    fold(as_op("sum"), ours, ours[::-1].copy(), BY_NAME["bfloat16"])
    expected = (theirs.float() + theirs.flip(0).float()).to(torch.bfloat16)
    assert ours.tolist() == expected.view(torch.int16).numpy().view(np.uint16).tolist()


# ---------------------------------------------------------------------- the user's function


@pytest.mark.parametrize("element", [e for e in ELEMENTS if e.kind in ("int", "float")], ids=lambda e: e.name)
def test_a_function_sees_arrays_of_the_users_type(element: Any) -> None:
    seen: list[np.dtype[Any]] = []

    def product(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
        seen.extend((a.dtype, b.dtype))
        return multiply_and_keep_the_larger(a, b)

    acc, x = stored([1, 2, 3], element), stored([5, 0, 4], element)
    fold(as_op(product), acc, x, element)
    assert values_of(acc, element) == [5, 0, 12]
    assert seen == [element.numpy or np.dtype(np.float32)] * 2


def test_a_function_may_work_in_place() -> None:
    def add_into(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
        a += b
        return a

    for name in ("float64", "bfloat16"):
        acc = stored([1, 2], BY_NAME[name])
        fold(as_op(add_into), acc, stored([3, 4], BY_NAME[name]), BY_NAME[name])
        assert values_of(acc, BY_NAME[name]) == [4, 6]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda a, b: a.sum(), r"shape \(\)"),
        (lambda a, b: a[:1], r"shape \(1,\)"),
        (lambda a, b: None, "object"),
        (lambda a, b: a + 1j * b, "complex128"),
    ],
)
@pytest.mark.parametrize("name", ["float64", "bfloat16"])
def test_a_result_that_does_not_fit_is_refused(function: Any, words: str, name: str) -> None:
    if name == "bfloat16":
        words = words.replace("complex128", "complex64")
    acc = stored([1, 2], BY_NAME[name])
    with pytest.raises(UsageError, match=words):
        fold(as_op(function), acc, stored([3, 4], BY_NAME[name]), BY_NAME[name])


def test_a_functions_own_error_comes_through() -> None:
    def fail(a: object, b: object) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fold(as_op(fail), np.zeros(2), np.zeros(2), BY_NAME["float64"])
