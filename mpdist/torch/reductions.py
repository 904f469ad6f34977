"""Reductions: torch's reduce ops, as mpdist's.

Two tables. Most ops have the same name; bool, which MPI does not add, takes the logical op that gives what torch's
arithmetic would. An average of integers is a sum, divided afterwards and cut off, as torch does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from mpdist.memory import ReduceOp as OwnOp
from mpdist.memory import premul_sum
from mpdist.torch.errors import WrongCall
from mpdist.torch.staging import is_known

Kind = ReduceOp.RedOpType

SUM = ReduceOp.SUM

_NAMES: dict[Any, str] = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}
_BOOL_NAMES: dict[str, str] = {
    "sum": "lor",
    "prod": "land",
    "min": "land",
    "max": "lor",
    "band": "land",
    "bor": "lor",
    "bxor": "lxor",
}
_BITWISE = ("band", "bor", "bxor")
_PREMUL_SUM = ReduceOp.PREMUL_SUM
_BOOL = torch.bool
_SCALED = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


@dataclass(frozen=True)
class Reduction:
    """What the communicator is to do, and what comes afterwards.

    Attributes:
        op: of the communicator.
        then: done with the result in place, given the number of ranks; None for nothing.
    """

    op: str | OwnOp
    then: Callable[[Tensor, int], object] | None = None


def reduce_op(opts: Any) -> Any:
    """torch's op in options, or the bare op of a short form."""
    return getattr(opts, "reduceOp", opts if opts is not None else SUM)


def kind_of(op: Any) -> Any:
    """Which op it is; torch's object of an op with a factor shows neither."""
    return getattr(op, "op", op)


def name_of(op: Any, dtype: torch.dtype) -> str | OwnOp | None:
    """mpdist's op where the communicator does all of it, else None; it refuses types that it does not know."""
    if op == SUM and dtype is not _BOOL:
        return "sum"
    reduction = _translated(op, dtype)
    return reduction.op if reduction.then is None else None


def reduction_of(op: Any, dtype: torch.dtype) -> Reduction:
    """How tensors of this type are reduced.

    Raises:
        WrongCall: the type is only moved, or the op has no meaning for it.
    """
    if not is_known(dtype):
        raise WrongCall(
            f"tensors of {dtype} are moved, not reduced: cast them to a type of 16 bits or more, or to complex64"
        )
    return _translated(op, dtype)


def _translated(op: Any, dtype: torch.dtype) -> Reduction:
    kind = kind_of(op)
    if kind == _PREMUL_SUM:
        return Reduction(premul_sum(_factor(op, dtype)))
    name = _NAMES.get(kind)
    if name is None:
        raise WrongCall(f"the reduce op {kind} is not one of {', '.join(str(each) for each in _NAMES)}, PREMUL_SUM")
    if dtype is _BOOL:
        if name not in _BOOL_NAMES:
            raise WrongCall(f"the reduce op {name.upper()} has no meaning for bool; cast the tensor to a number first")
        return Reduction(_BOOL_NAMES[name])
    if name in _BITWISE and dtype not in _SCALED:
        raise WrongCall(f"Cannot use ReduceOp.{name.upper()} with non-integral dtype {dtype}")
    if name == "avg" and dtype in _SCALED:
        return Reduction("sum", _divide)
    return Reduction(name)


def _factor(op: Any, dtype: torch.dtype) -> int | float | complex:
    """Of a PREMUL_SUM; a tensor of one element serves."""
    factor = op.factor if hasattr(op, "factor") else op.__getstate__()[1]
    value = factor.item() if isinstance(factor, Tensor) else factor
    if dtype in _SCALED and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _divide(total: Tensor, size: int) -> None:
    if total.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch has no arithmetic for them
        host = total.cpu()  # itself, if it is there
        numbers = host.view(-1).numpy()
        numbers //= size
        total.copy_(host)
        return
    total.div_(size, rounding_mode="trunc")
