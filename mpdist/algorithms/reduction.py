"""Reduction: what MPI cannot do by itself is done before and after its call.

before   half types are widened to float32; premul_sum multiplies
MPI      sum, min, ...
after    half types are narrowed, rounded once; avg divides
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpdist.memory import (
    BY_NAME,
    Buffer,
    Element,
    ReduceOp,
    as_buffer,
    check_op,
    finish,
    narrow_into,
    premultiply,
    widen,
)

_FLOAT32 = BY_NAME["float32"]


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

    def enter(self, x: Buffer) -> Buffer:
        """x as MPI is to get it: x itself, or a new buffer."""
        if self.element.is_half:
            wide = widen(x.array(), self.element)
            if self.op.factor is not None:
                wide *= np.float32(self.op.factor)  # type: ignore[arg-type]  # check_op lets no complex factor through
            return as_buffer(wide)
        if self.op.factor is not None:
            return as_buffer(premultiply(self.op, x.array(), self.element))
        return x

    def room(self, out: Buffer) -> Buffer:
        """Where MPI is to write: out itself, or a new buffer."""
        return as_buffer(np.empty(out.count, np.float32)) if self.element.is_half else out

    def leave(self, result: Buffer, out: Buffer, terms: int | None = None) -> None:
        """MPI's result, which reduces `terms` arrays (missing: one of each rank), into out."""
        terms = self.size if terms is None else terms
        if self.element.is_half:
            finish(self.op, result.array(), terms, _FLOAT32)
            narrow_into(result.array(), out.array(), self.element)
            return
        if result is not out:
            out.array()[:] = result.array()
        finish(self.op, out.array(), terms, self.element)
