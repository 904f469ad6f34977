"""Arguments: buffers, element types and ops as mpi4py's calls take them.

Two limits are hidden here. Open MPI counts with 32-bit integers, so larger
blocks travel as one element of a derived type, and larger reductions in slices.
bool is not a type that MPI adds, so its min, max and bitwise forms become logical.

Import it when mpi4py is set up, see `mpi`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

from mpi4py import MPI

from mpdist.errors import Unavailable
from mpdist.memory import Buffer
from mpdist.transport.requests import Request, Requests

# Open MPI 5 has MPI 3.1's 32-bit counts; the slices are kept the same on every MPI.
MAX_COUNT = 2**31 - 1
SLICE_COUNT = 2**30

DATATYPES: dict[str, MPI.Datatype] = {
    "bool": MPI.C_BOOL,
    "int8": MPI.INT8_T,
    "int16": MPI.INT16_T,
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
    "uint8": MPI.UINT8_T,
    "uint16": MPI.UINT16_T,
    "uint32": MPI.UINT32_T,
    "uint64": MPI.UINT64_T,
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "complex64": MPI.C_FLOAT_COMPLEX,
    "complex128": MPI.C_DOUBLE_COMPLEX,
}

OPS: dict[str, MPI.Op] = {
    "sum": MPI.SUM,
    "prod": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
    "land": MPI.LAND,
    "lor": MPI.LOR,
    "lxor": MPI.LXOR,
}

BOOL_OPS = {**OPS, "min": MPI.LAND, "max": MPI.LOR, "band": MPI.LAND, "bor": MPI.LOR, "bxor": MPI.LXOR}


def memory_of(buffer: Buffer) -> Any:
    """The buffer as an object that mpi4py takes together with an explicit count and type."""
    exporter = buffer.exporter
    if exporter is not None:
        return exporter
    return MPI.buffer.fromaddress(buffer.address, buffer.nbytes)


def op_of(name: str, buffer: Buffer) -> MPI.Op:
    """MPI's op of this name for the buffer's elements."""
    return (BOOL_OPS if buffer.element.kind == "bool" else OPS)[name]


def typed(buffer: Buffer) -> list[Any]:
    """The buffer as elements that MPI can reduce."""
    return [memory_of(buffer), buffer.count, DATATYPES[buffer.element.name]]


def whole(buffer: Buffer) -> list[Any]:
    """The buffer as bytes."""
    return blocks(buffer, buffer.nbytes)


def blocks(buffer: Buffer, block_nbytes: int) -> list[Any]:
    """The buffer as equal blocks; mpi4py wants the size of one."""
    if block_nbytes <= MAX_COUNT:
        return [memory_of(buffer), block_nbytes, MPI.BYTE]
    return [memory_of(buffer), 1, _giant(block_nbytes)]


def uneven(buffer: Buffer, counts: Sequence[int], unit: int, starts: Sequence[int] | None) -> list[Any]:
    """The buffer as blocks of `counts` units that begin at `starts`, or lie one behind the other."""
    if starts is None:
        starts = list(accumulate(counts[:-1], initial=0))
    if max(starts) > MAX_COUNT and MPI.VERSION < 4:
        raise Unavailable(
            f"uneven blocks of {sum(counts)} elements in all: this MPI counts with 32 bits, so their sum must stay "
            f"below {MAX_COUNT}; use even blocks, or several calls"
        )
    # Open MPI copies a rank's block to itself at once if both sides have this type, else through memory of its own.
    if (max(starts) + max(counts)) * unit <= MAX_COUNT:
        counts, starts, unit = [count * unit for count in counts], [start * unit for start in starts], 1
    return [memory_of(buffer), (list(counts), list(starts)), _word(unit)]


@lru_cache(maxsize=64)
def _giant(nbytes: int) -> MPI.Datatype:
    """A type of `nbytes` contiguous bytes, more than a 32-bit count can say."""
    pieces, rest = divmod(nbytes, SLICE_COUNT)
    body = MPI.BYTE.Create_contiguous(SLICE_COUNT).Create_contiguous(pieces)
    starts = [0, pieces * SLICE_COUNT]
    giant = MPI.Datatype.Create_struct([1, rest], starts, [body, MPI.BYTE]).Create_resized(0, nbytes)
    giant.Commit()
    return giant


@lru_cache(maxsize=32)
def _word(nbytes: int) -> MPI.Datatype:
    """A unit of `nbytes` bytes: with larger units the counts stay small."""
    return MPI.BYTE if nbytes == 1 else MPI.BYTE.Create_contiguous(nbytes).Commit()


def sliced(post: Callable[[Any, Any], Request], x: Buffer | None, out: Buffer | None) -> Request:
    """Post an element-wise operation, in slices where the count is too large for one call."""
    buffer = x if out is None else out
    assert buffer is not None
    if buffer.count <= SLICE_COUNT:
        return post(None if x is None else typed(x), None if out is None else typed(out))
    datatype = DATATYPES[buffer.element.name]

    def piece(buffer: Buffer | None, start: int) -> Any:
        if buffer is None:
            return None
        part = buffer.array()[start : start + SLICE_COUNT]
        return [part, part.size, datatype]

    slices = Requests([post(piece(x, start), piece(out, start)) for start in range(0, buffer.count, SLICE_COUNT)])
    slices.lease = (x, out)
    return slices
