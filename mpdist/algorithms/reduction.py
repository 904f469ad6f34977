"""Reduction: what MPI cannot do by itself is done before and after its call.

before   half types are widened to float32, sums of short integers to int32; premul_sum multiplies; numbers to be
         compared become integers
MPI      sum, min, ...
after    half types are narrowed, rounded once; avg divides; integers become numbers again
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from mpdist.algorithms.choose import INDIRECT, PLAIN, SCALED
from mpdist.memory import (
    Buffer,
    Element,
    Folder,
    ReduceOp,
    as_buffer,
    check_op,
    from_integers,
    to_integers,
)
from mpdist.memory.scalars import SCALAR_FOLDS, SCALAR_FORMATS

if TYPE_CHECKING:
    from mpdist.memory.elements import Array


@dataclass(frozen=True, eq=False)
class Reduction:
    """One op on one element type, over `size` ranks; compared by identity, which is quick to hash.

    Attributes:
        mpi_op: MPI's part of it.
        is_compared: a min or max of floating point numbers, which MPI is given as integers, see memory/comparing.py.
        is_direct: whether MPI does it all.
        is_short: a sum of integers of 8 or 16 bits, which wraps, though Open MPI's vectors stop at the largest.
    """

    op: ReduceOp
    element: Element
    size: int
    mpi_op: str
    is_compared: bool
    is_direct: bool
    is_short: bool

    @classmethod
    def of(cls, op: ReduceOp, element: Element, size: int) -> Reduction:
        """Raises UsageError where the op does not fit the type."""
        check_op(op, element)
        scaled = op.name in ("avg", "premul_sum")
        is_compared = op.name in ("min", "max") and element.kind == "float"
        mpi_op = "sum" if scaled else op.name
        is_short = mpi_op == "sum" and element.kind in ("int", "uint") and element.itemsize < 4
        is_direct = not (element.is_half or scaled or is_compared or is_short)
        return cls(op, element, size, mpi_op, is_compared, is_direct, is_short)

    @cached_property
    def sized_as(self) -> Mapping[str, str]:
        """By which name the size is known from which on an operation takes another algorithm than MPI's call."""
        return PLAIN if self.is_direct else INDIRECT if self.op.factor is None else SCALED

    @cached_property
    def has_scalars(self) -> bool:
        """Whether Python does it number by number."""
        return self.element.name in SCALAR_FORMATS and self.op.name in SCALAR_FOLDS

    @cached_property
    def folder(self) -> Folder:
        """The same in NumPy, for slices of all ranks; but for premul_sum, where each rank has a factor of its own."""
        return Folder(self.op, self.element, self.size)

    def enter(self, x: Buffer) -> Buffer:
        """x as MPI is to get it: x itself, or a new buffer."""
        if self.is_compared and not self.element.is_half:
            return as_buffer(to_integers(x.array(), self.mpi_op))
        if self.is_short and self.op.factor is None:
            return as_buffer(x.array().astype(np.int32))
        if self.is_direct or (self.op.factor is None and not self.element.is_half):
            return x
        factors = None if self.op.factor is None else [self.op.factor]
        entered = np.empty(x.count, np.float32 if self.element.is_half else self.element.storage)
        Folder(self.op, self.element, None, factors).fold([x.array()], [entered])
        if self.is_short:
            entered = entered.astype(np.int32)
        return as_buffer(to_integers(entered, self.mpi_op) if self.is_compared else entered)

    def room(self, out: Buffer) -> Buffer:
        """Where MPI is to write: out itself, or a new buffer."""
        if self.is_compared:
            return as_buffer(np.empty(out.count, np.int64 if self.element.itemsize == 8 else np.int32))
        if self.is_short:
            return as_buffer(np.empty(out.count, np.int32))
        return as_buffer(np.empty(out.count, np.float32)) if self.element.is_half else out

    def leave(self, result: Buffer, out: Buffer, terms: int | None = None) -> None:
        """MPI's result, which reduces `terms` arrays (missing: one of each rank), into out."""
        if self.is_compared:
            self._leave_compared(result.array(), out.array())
            return
        if self.is_short:
            np.copyto(out.array(), result.array(), casting="unsafe")
            return
        terms = self.size if terms is None else terms
        if result is not out or self.op.name == "avg":
            Folder(self.op, self.element, terms).fold([result.array()], [out.array()])

    def _leave_compared(self, result: Array, out: Array) -> None:
        if not self.element.is_half:
            from_integers(result, out)
            return
        wide = np.empty(result.size, np.float32)
        from_integers(result, wide)
        Folder(self.op, self.element, None).fold([wide], [out])
