"""Tensors whose values every rank can compute, and what reductions of them must give."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

INTEGERS = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
TINY = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Types that are moved, and not reduced."""

REDUCIBLE = (torch.bool, *INTEGERS, *FLOATS, *COMPLEX)
MOVABLE = (*REDUCIBLE, *TINY)

ARITHMETIC = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG)
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)

# After so many elements numbers repeat: a prime, so that no block or piece has the same as another.
PERIOD = 65_537


def ops_for(dtype: torch.dtype) -> tuple[Any, ...]:
    """The reduce ops that have a meaning for a type."""
    if dtype is torch.bool:
        return (*ARITHMETIC[:4], *BITWISE)
    if dtype in INTEGERS:
        return (*ARITHMETIC, *BITWISE)
    if dtype in COMPLEX:
        return (ReduceOp.SUM, ReduceOp.AVG)  # torch reduces them as pairs of real numbers, and refuses the others
    return ARITHMETIC


def numbers(shape: Sequence[int] | int, dtype: torch.dtype, seed: int) -> Tensor:
    """Small whole numbers, the same for a seed on every rank; sums and products of four are exact in every type.

    They repeat after PERIOD elements: new ones take longer than what is tested.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    count = math.prod(shape)
    low = 0 if dtype in (torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64) else -3
    some = (min(count, PERIOD),)
    values = torch.randint(low, 2 if dtype is torch.bool else 4, some, generator=generator, device="cpu")
    if dtype in COMPLEX:
        others = torch.randint(-3, 4, some, generator=generator, device="cpu")
        values = torch.complex(values.double(), others.double())
    values = values.to(dtype)
    if count > PERIOD:
        values = joined([values] * -(-count // PERIOD))[:count]
    return placed(values.reshape(shape))


placed: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731  # tests of a device bring them there


def everyone(shape: Sequence[int] | int, dtype: torch.dtype, ranks: Sequence[int]) -> list[Tensor]:
    """The inputs of these ranks."""
    return [numbers(shape, dtype, rank) for rank in ranks]


def wide(tensor: Tensor) -> Tensor:
    """The same values in a type that torch computes with."""
    if tensor.dtype in COMPLEX:
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)


def reduced(op: Any, inputs: Sequence[Tensor]) -> Tensor:
    """What a reduction must give, computed here."""
    dtype = inputs[0].dtype
    values = [wide(tensor.cpu()) for tensor in inputs]
    if op == ReduceOp.AVG:
        total = reduce(torch.add, values)
        if dtype in INTEGERS:
            return total.div(len(values), rounding_mode="trunc").to(dtype)
        return (total / len(values)).to(dtype)
    functions = {
        ReduceOp.SUM: torch.logical_or if dtype is torch.bool else torch.add,
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.BAND: torch.bitwise_and,
        ReduceOp.BOR: torch.bitwise_or,
        ReduceOp.BXOR: torch.bitwise_xor,
    }
    return reduce(functions[op], values).to(dtype)


def strided(tensor: Tensor) -> Tensor:
    """The same values in memory with gaps."""
    holder = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
    view = holder[..., 0]
    view.copy_(tensor)
    return view


def assert_same(got: Tensor, wanted: Tensor, case: object) -> None:
    """Equal values and types; the case is named if not."""
    got, wanted = got.cpu(), wanted.cpu()
    assert got.dtype == wanted.dtype, (case, got.dtype, wanted.dtype)
    assert got.shape == wanted.shape, (case, got.shape, wanted.shape)
    if got.numel() > PERIOD and torch.equal(bits(got), bits(wanted)):  # in a tenth of the time
        return
    left, right = (each.view(torch.uint8) if each.dtype in TINY else wide(each) for each in (got, wanted))
    if got.is_complex():
        torch.testing.assert_close(left, right, msg=lambda text: f"{case}: {text}")
        return
    assert torch.equal(left, right), f"{case}: got {got}, wanted {wanted}"


def bits(tensor: Tensor) -> Tensor:
    """All of a tensor of more than one element, as bytes."""
    return tensor.detach().resolve_conj().reshape(-1).view(torch.uint8)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """torch.cat, also of types that torch does not join."""
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)
