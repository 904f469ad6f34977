"""Ways: by which way the arrays of a device travel. Decided here, for each operation.

A rank decides for itself, so whatever it decides it must make the calls of MPI that a
rank makes whose arrays are elsewhere: the same calls, of the same sizes, in the same
order. So an array is given to MPI only where the algorithm, which is chosen by what is
equal on all ranks, is MPI's own call. With one rank on each node that is so for every
size, if MPI may be given the memory of GPUs at all, and anywhere with
MPDIST_ALGORITHM=native; else shared memory takes the large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from mpdist.algorithms import native, uneven
from mpdist.algorithms.reduction import Reduction
from mpdist.memory import Buffer
from mpdist.progress import wire
from mpdist.progress.collective import one_call

if TYPE_CHECKING:
    from mpdist.progress.collective import Program

Takes = Callable[[str], bool]
"""Whether MPI may be given the device's memory for an operation."""


class Way(Enum):
    """How an array of a device travels."""

    STAGED = "staged"
    """Through pinned host memory."""
    GIVEN = "given"
    """MPI gets the array itself."""


# Larger ones are more than one call with a simple type, see `transport/arguments.py`. Nobody has tried those here.
MAX_BYTES = 2**31 - 1

# Programs that hand their arrays to one call of MPI, and look at none; reductions only if MPI does all of it.
_PROGRAMS: Mapping[str, Program] = {
    "all_reduce": native.all_reduce,
    "reduce": native.reduce,
    "scan": native.scan,
    "exscan": native.exscan,
    "reduce_scatter": native.reduce_scatter,
    "gather": native.gather,
}
_CALLS = {"broadcast": "ibroadcast", "all_gather": "iall_gather", "all_to_all": "iall_to_all"}


def way_of_message(op: str, nbytes: int, takes: Takes) -> Way:
    """The way of a message that is sent, or that an array of this size waits for."""
    return Way.GIVEN if nbytes <= wire.PIECE_BYTES and takes(op) else Way.STAGED


def way(op: str, program: Program, arguments: Sequence[Any], takes: Takes, scatter_limit: int) -> Way:
    """The way of a collective.

    Args:
        program, arguments: what is to be posted.
        scatter_limit: from how many bytes a block on scatter is not MPI's call.
    """
    if op == "scatter":
        is_single = program is uneven.scatter and _is_single_scatter(arguments, scatter_limit)
    elif op in _CALLS:
        is_single = program is one_call and getattr(arguments[0], "__name__", "") == _CALLS[op]
    else:
        is_single = _PROGRAMS.get(op) is program and all(
            each.is_direct for each in arguments if isinstance(each, Reduction)
        )
    if not is_single or any(buffer.nbytes > MAX_BYTES for buffer in _buffers(arguments)):
        return Way.STAGED
    return Way.GIVEN if takes(op) else Way.STAGED


def _is_single_scatter(arguments: Sequence[Any], limit: int) -> bool:
    """Whether the blocks go out by MPI's call, and into an array that is here already."""
    _, parcel, out, *_ = arguments
    if out is None or out.nbytes >= limit:
        return False
    return parcel is None or (bool(parcel.blocks) and parcel.heads[0].is_even and parcel.heads[0].nbytes < limit)


def _buffers(argument: Any) -> Iterator[Buffer]:
    if isinstance(argument, Buffer):
        yield argument
    elif isinstance(argument, list | tuple):
        for each in argument:
            yield from _buffers(each)
    elif isinstance(argument, uneven.Parcel):
        yield from _buffers(argument.blocks)
