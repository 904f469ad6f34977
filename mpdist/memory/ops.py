"""Reduce operations: what they are called, which element types they fit, and what they compute in NumPy.

float16 and bfloat16 are computed in float32 and rounded once per step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType
from typing import Any, TypeAlias

import numpy as np

from mpdist.errors import UsageError
from mpdist.memory.elements import Array, Element
from mpdist.memory.half import narrow_into, widen
from mpdist.memory.scratch import blocks

UserFunction: TypeAlias = Callable[[Any, Any], Any]
Factor: TypeAlias = int | float | complex


@dataclass(frozen=True, slots=True)
class ReduceOp:
    """A reduction.

    Attributes:
        name: "sum" and so on; "premul_sum"; for a user's function its name in angle brackets, see `function_name`.
        factor: what premul_sum multiplies each rank's input by.
        function: the user's function of two arrays.

    Raises:
        UsageError: there is no such operation, premul_sum has no number as factor, or another one has a factor.
    """

    name: str
    factor: Factor | None = None
    function: UserFunction | None = None

    def __post_init__(self) -> None:
        if self.function is None and not (isinstance(self.name, str) and self.name in _UFUNCS):
            raise _unknown(self.name)
        if self.name == "premul_sum":
            if not isinstance(self.factor, int | float | complex):
                raise UsageError(
                    f"premul_sum needs a number as factor, got a {type(self.factor).__name__}; use float(factor)"
                )
        elif self.factor is not None:
            raise UsageError(f"op {self.name!r} has no factor, only premul_sum has: mpdist.premul_sum(factor)")

    @property
    def code(self) -> int:
        """1 to 15, one for all functions of users."""
        return _FUNCTION_CODE if self.function is not None else _CODES[self.name]

    def __str__(self) -> str:
        return self.name if self.factor is None else f"{self.name}({self.factor!r})"


ReduceOpLike: TypeAlias = str | ReduceOp | UserFunction

# What one step computes. avg divides at the end, premul_sum multiplies at the start.
_UFUNCS: dict[str, np.ufunc] = {
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
    "premul_sum": np.add,
}
_CODES: dict[str, int] = {name: code for code, name in enumerate(_UFUNCS, 1)}
_FUNCTION_CODE = 15
_OPS: dict[str, ReduceOp] = {name: ReduceOp(name) for name in _UFUNCS if name != "premul_sum"}
OP_NAMES: tuple[str, ...] = tuple(_OPS)
NAMES_BY_CODE: dict[int, str] = {code: name for name, code in _CODES.items()} | {_FUNCTION_CODE: "a function"}

# Of one sequence or array, with a start, a key or an axis: with two arrays they give something else, or an error.
_OF_ONE: dict[object, str] = {
    **dict.fromkeys((sum, np.sum), "sum"),
    **dict.fromkeys((np.mean, np.average), "avg"),
    np.prod: "prod",
    **dict.fromkeys((min, np.min, np.amin), "min"),
    **dict.fromkeys((max, np.max, np.amax), "max"),
    **dict.fromkeys((any, np.any), "lor"),
    **dict.fromkeys((all, np.all), "land"),
}
_KINDS_OF_ONE = BuiltinFunctionType, type(np.sum)

# By the module of their type: those of whose calls they are.
_FOREIGN = {"mpi4py.MPI": "mpi4py", "torch._C._distributed_c10d": "torch.distributed"}


def function_name(function: object) -> str:
    """A function's qualified name; of what has none that of its type, or what a partial calls: no address is in it.

    So it is the same on all ranks.
    """
    if isinstance(function, partial):
        return f"partial({function_name(function.func)})"
    named = function if hasattr(function, "__name__") else type(function)
    return str(getattr(named, "__qualname__", named.__name__))


def premul_sum(factor: Factor) -> ReduceOp:
    """The sum over ranks of factor * x; each rank may have its own factor.

    Raises:
        UsageError: factor is not a number.
    """
    return ReduceOp("premul_sum", factor.item() if isinstance(factor, np.generic) else factor)


def as_op(op: object) -> ReduceOp:
    """The operation of a name, a ReduceOp or a function of two arrays.

    Raises:
        UsageError: unknown; the text lists what is valid.
    """
    known = _OPS.get(op) if isinstance(op, str) else None
    if known is not None:
        return known
    if isinstance(op, ReduceOp):
        return op
    if isinstance(op, _KINDS_OF_ONE) and op in _OF_ONE:
        raise UsageError(f"op={op!r} reduces one sequence or array, and does not take two; write op={_OF_ONE[op]!r}")
    library = _FOREIGN.get(type(op).__module__)
    if library is not None:
        raise UsageError(f"op is one of {library}'s, for its own calls; give the name: one of {', '.join(OP_NAMES)}")
    if callable(op):
        return ReduceOp(f"<{function_name(op)}>", function=op)
    raise _unknown(op)


def _unknown(op: object) -> UsageError:
    return UsageError(
        f"op={op!r} is not a reduction; needed one of {', '.join(OP_NAMES)}, mpdist.premul_sum(factor), "
        "or a function of two arrays"
    )


# ---------------------------------------------------------------------- which type takes which operation

_CAST_BOOL = "use op='lor' or 'land', or cast first: x.astype(np.int64)"
_BITWISE_REAL = "bits of floating point numbers have no use; reduce x.view() of an integer type if they are meant"
_LOGICAL_REAL = "compare first (x != 0) and reduce the bool array"
_UNORDERED = "complex numbers have no order; reduce abs(x), or x.real and x.imag"
_INTEGER_AVERAGE = "the mean of integers is no integer; use op='sum' and divide, or cast to a floating point type"

# (kind, operation) -> what to do instead.
_MISFITS: dict[tuple[str, str], str] = {
    **{("bool", name): _CAST_BOOL for name in ("sum", "prod", "avg", "premul_sum")},
    **{(kind, "avg"): _INTEGER_AVERAGE for kind in ("int", "uint")},
    **{(kind, name): _BITWISE_REAL for kind in ("float", "complex") for name in ("band", "bor", "bxor")},
    **{(kind, name): _LOGICAL_REAL for kind in ("float", "complex") for name in ("land", "lor", "lxor")},
    **{("complex", name): _UNORDERED for name in ("min", "max")},
}


def check_op(op: ReduceOp, element: Element) -> None:
    """Check that the operation fits the element type.

    Raises:
        UsageError: it does not; the text says what to do instead.
    """
    remedy = _MISFITS.get((element.kind, op.name))
    if remedy is not None:
        raise UsageError(f"op={op.name!r} does not fit elements of type {element.name}: {remedy}")
    if op.factor is not None:
        _check_factor(op.factor, element)


def _is_floating(factor: Factor) -> bool:
    """Whether it is a floating point number; integers of hundreds of digits are none."""
    try:
        complex(factor)
    except OverflowError:
        return False
    return True


def _check_factor(factor: Factor, element: Element) -> None:
    if element.kind == "complex" or (element.kind == "float" and not isinstance(factor, complex)):
        if _is_floating(factor):
            return
    elif isinstance(factor, int) and element.kind in ("int", "uint"):
        limits = np.iinfo(element.storage)
        if limits.min <= factor <= limits.max:
            return
    shown = f"{factor!r}" if _is_floating(factor) else "with hundreds of digits"
    raise UsageError(
        f"premul_sum's factor {shown} is not a value of {element.name}: use another factor, or cast x first"
    )


# ---------------------------------------------------------------------- computing


def ufunc_of(op: ReduceOp) -> np.ufunc:
    """What one step computes; not for a user's function."""
    return _UFUNCS[op.name]


def fold(op: ReduceOp, acc: Array, x: Array, element: Element) -> None:
    """One step, in place: acc = acc op x.

    Args:
        acc: 1-D array of the element's storage dtype, writable.
        x: the same; not written to.

    Raises:
        UsageError: a user's function returned something that does not fit acc.
    """
    if op.function is not None:
        _fold_by_user(op, acc, x, element)
        return
    ufunc = _UFUNCS[op.name]
    if not element.is_half:
        if acc.size == 1:  # NumPy multiplies one complex number by other rules where the result is an operand
            acc[...] = ufunc(acc, x)
        else:
            ufunc(acc, x, out=acc)
        return
    for part in blocks(acc.size):
        wide = widen(acc[part], element)
        ufunc(wide, widen(x[part], element), out=wide)
        narrow_into(wide, acc[part], element)


def _fold_by_user(op: ReduceOp, acc: Array, x: Array, element: Element) -> None:
    """Call the function once, with arrays of the type that the user knows; bfloat16 comes as float32."""
    assert op.function is not None
    if element.numpy is not None:
        np.copyto(acc, _checked(op, op.function(acc, x), acc), casting="same_kind")
        return
    wide = widen(acc, element)
    result = _checked(op, op.function(wide, widen(x, element)), wide)
    narrow_into(result.astype(np.float32, copy=False), acc, element)


def _checked(op: ReduceOp, result: object, wanted: Array) -> Array:
    array = np.asarray(result)
    if array.shape == wanted.shape and np.can_cast(array.dtype, wanted.dtype, "same_kind"):
        return array
    raise UsageError(
        f"the function {op.name} given as op returned {array.dtype} of shape {array.shape}; "
        f"needed {wanted.dtype} of shape {wanted.shape}, as the two that it is given"
    )


def finish(op: ReduceOp, acc: Array, size: int, element: Element) -> None:
    """What comes after the last step, in place: avg divides by the number of ranks."""
    if op.name != "avg":
        return
    if element.is_half:
        _scale_half(acc, acc, element, np.divide, size)
    else:
        divide(acc, size, acc)


def divide(x: Array, size: int, out: Array) -> None:
    """x / size of floating point or complex numbers, each part rounded to nearest."""
    function, *arguments = division(x, size, out)
    function(*arguments)


def division(x: Array, size: int, out: Array) -> tuple[Any, Array, float, Array]:
    """NumPy's function that does the same, and its arguments."""
    if x.dtype.kind == "c":
        x, out = x.view(x.real.dtype), out.view(out.real.dtype)  # NumPy would divide by a complex number
    if size & (size - 1) == 0:
        return np.multiply, x, 1 / size, out  # exact, and faster
    return np.divide, x, size, out


def premultiply(op: ReduceOp, x: Array, element: Element) -> Array:
    """What comes before the first step: a new storage array, factor * x for premul_sum, else a copy of x."""
    out = np.empty_like(x)
    if op.factor is None:
        np.copyto(out, x)
        return out
    with np.errstate(all="ignore"):
        if element.is_half:
            _scale_half(x, out, element, np.multiply, op.factor)
        else:
            np.multiply(x, element.storage.type(op.factor), out=out)
    return out


def _scale_half(x: Array, out: Array, element: Element, ufunc: np.ufunc, factor: Factor) -> None:
    for part in blocks(x.size):
        wide = widen(x[part], element)
        ufunc(wide, np.float32(factor), out=wide)  # type: ignore[arg-type]  # complex is refused by check_op
        narrow_into(wide, out[part], element)
