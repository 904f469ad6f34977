"""Native: collectives by MPI's own non-blocking calls.

Every function is a program: it posts, yields the request, and returns the
result when resumed. Arguments are checked by the caller; `None` stands for the
buffer that a rank does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.algorithms.reduction import Reduction
from mpdist.memory import Buffer, ReduceOp, as_buffer, fold
from mpdist.progress.collective import Steps, single_step

if TYPE_CHECKING:
    from mpdist.transport.mpi import Transport


@single_step
def all_reduce(transport: Transport, x: Buffer | None, out: Buffer, how: Reduction) -> Steps[Any]:
    """x None: in place."""
    if how.is_direct:
        yield transport.iall_reduce(x, out, how.mpi_op)
        return out.owner
    source = how.enter(out if x is None else x)
    if source is x or source is out:  # avg: MPI may write into out
        yield transport.iall_reduce(None if source is out else source, out, how.mpi_op)
        how.leave(out, out)
        return out.owner
    yield transport.iall_reduce(None, source, how.mpi_op)
    how.leave(source, out)
    return out.owner


@single_step
def reduce(transport: Transport, x: Buffer, out: Buffer | None, how: Reduction, dst: int) -> Steps[Any]:
    room = None if out is None else how.room(out)
    yield transport.ireduce(how.enter(x), room, how.mpi_op, dst)
    if out is None or room is None:
        return None
    how.leave(room, out)
    return out.owner


@single_step
def scan(transport: Transport, x: Buffer, out: Buffer, how: Reduction) -> Steps[Any]:
    room = how.room(out)
    yield transport.iscan(how.enter(x), room, how.mpi_op)
    how.leave(room, out, transport.rank + 1)
    return out.owner


@single_step
def exscan(transport: Transport, x: Buffer, out: Buffer, how: Reduction) -> Steps[Any]:
    """Rank 0 has nothing before it: its result is None, its out untouched."""
    entered = how.enter(x)
    room = how.room(out) if transport.rank else as_buffer(np.empty(entered.count, entered.element.storage))
    yield transport.iexscan(entered, room, how.mpi_op)
    if transport.rank == 0:
        return None
    how.leave(room, out, transport.rank)
    return out.owner


@single_step
def reduce_scatter(transport: Transport, x: Buffer, out: Buffer, how: Reduction) -> Steps[Any]:
    room = how.room(out)
    yield transport.ireduce_scatter(how.enter(x), room, how.mpi_op)
    how.leave(room, out)
    return out.owner


@single_step
def reduce_scatterv(transport: Transport, x: Buffer, out: Buffer, counts: Sequence[int], how: Reduction) -> Steps[Any]:
    """Blocks of `counts` elements."""
    room = how.room(out)
    yield transport.ireduce_scatterv(how.enter(x), room, counts, how.mpi_op)
    how.leave(room, out)
    return out.owner


@single_step
def gather(transport: Transport, x: Buffer, out: Buffer | None, dst: int) -> Steps[Any]:
    yield transport.igather(x, out, dst)
    return None if out is None else out.owner


# ---------------------------------------------------------------------- a function as op: gather, fold in rank order


def _gathered(transport: Transport, x: Buffer) -> tuple[np.ndarray[Any, Any], Any]:
    """Room for the x of all ranks, one a row, and the request that fills it."""
    rows = np.empty((transport.size, x.count), x.element.storage)
    return rows, transport.iall_gather(x, as_buffer(rows))


def _fold(op: ReduceOp, rows: np.ndarray[Any, Any], x: Buffer) -> np.ndarray[Any, Any]:
    total: np.ndarray[Any, Any] = rows[0].copy()
    for row in rows[1:]:
        fold(op, total, row, x.element)
    return total


@single_step
def all_reduce_by_function(transport: Transport, x: Buffer, out: Buffer, op: ReduceOp) -> Steps[Any]:
    rows, request = _gathered(transport, x)
    yield request
    out.array()[:] = _fold(op, rows, x)
    return out.owner


@single_step
def reduce_by_function(transport: Transport, x: Buffer, out: Buffer | None, op: ReduceOp, dst: int) -> Steps[Any]:
    rows = np.empty((transport.size if out is not None else 0, x.count), x.element.storage)
    yield transport.igather(x, None if out is None else as_buffer(rows), dst)
    if out is None:
        return None
    out.array()[:] = _fold(op, rows, x)
    return out.owner


@single_step
def scan_by_function(transport: Transport, x: Buffer, out: Buffer, op: ReduceOp) -> Steps[Any]:
    rows, request = _gathered(transport, x)
    yield request
    out.array()[:] = _fold(op, rows[: transport.rank + 1], x)
    return out.owner


@single_step
def exscan_by_function(transport: Transport, x: Buffer, out: Buffer, op: ReduceOp) -> Steps[Any]:
    rows, request = _gathered(transport, x)
    yield request
    if transport.rank == 0:
        return None
    out.array()[:] = _fold(op, rows[: transport.rank], x)
    return out.owner


@single_step
def reduce_scatter_by_function(
    transport: Transport, x: Buffer, out: Buffer, counts: Sequence[int], op: ReduceOp
) -> Steps[Any]:
    rows, request = _gathered(transport, x)
    yield request
    start = sum(counts[: transport.rank])
    out.array()[:] = _fold(op, rows[:, start : start + out.count], x)
    return out.owner
