"""Reduction: what MPI cannot do by itself is done before and after its call.

before   half types are widened to float32; premul_sum multiplies
MPI      sum, min, ...
after    half types are narrowed, rounded once; avg divides
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mpdist.memory import (
    Buffer,
    Element,
    Folder,
    ReduceOp,
    as_buffer,
    check_op,
)


@dataclass(frozen=True)
class Reduction:
    """One op on one element type, over `size` ranks.

    Attributes:
        mpi_op: MPI's part of it.
        is_direct: whether MPI does it all.
    """

    op: ReduceOp
    element: Element
    size: int
    mpi_op: str
    is_direct: bool

    @classmethod
    def of(cls, op: ReduceOp, element: Element, size: int) -> Reduction:
        """Raises UsageError where the op does not fit the type."""
        check_op(op, element)
        scaled = op.name in ("avg", "premul_sum")
        return cls(op, element, size, "sum" if scaled else op.name, not (element.is_half or scaled))

    @cached_property
    def folder(self) -> Folder:
        """The same in NumPy, for slices of all ranks; but for premul_sum, where each rank has a factor of its own."""
        return Folder(self.op, self.element, self.size)

    def enter(self, x: Buffer) -> Buffer:
        """x as MPI is to get it: x itself, or a new buffer."""
        if self.is_direct or (self.op.factor is None and not self.element.is_half):
            return x
        factors = None if self.op.factor is None else [self.op.factor]
        entered = np.empty(x.count, np.float32 if self.element.is_half else self.element.storage)
        Folder(self.op, self.element, None, factors).fold([x.array()], [entered])
        return as_buffer(entered)

    def room(self, out: Buffer) -> Buffer:
        """Where MPI is to write: out itself, or a new buffer."""
        return as_buffer(np.empty(out.count, np.float32)) if self.element.is_half else out

    def leave(self, result: Buffer, out: Buffer, terms: int | None = None) -> None:
        """MPI's result, which reduces `terms` arrays (missing: one of each rank), into out."""
        terms = self.size if terms is None else terms
        if result is not out or self.op.name == "avg":
            Folder(self.op, self.element, terms).fold([result.array()], [out.array()])
