"""Ordered: reductions that fold in the order of ranks, wherever the ranks are.

Slices go to their owners by all_to_all, are folded there, and come back by
all_gather. The result is the same, bit for bit, as that of the algorithms in
shared memory, which fold in that order too; MPI's own calls promise nothing.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.algorithms.reduction import Reduction
from mpdist.algorithms.shared.reduction import cuts
from mpdist.memory import Buffer, Folder, as_buffer, premultiply, widen

if TYPE_CHECKING:
    from mpdist.memory.elements import Array
    from mpdist.progress.channel import Channel
    from mpdist.progress.collective import Steps
    from mpdist.transport.mpi import Transport


def all_reduce(transport: Transport, _: Channel, x: Buffer | None, out: Buffer, how: Reduction) -> Steps[Any]:
    """x None: in place."""
    mine, counts = yield from _own_slice(transport, out if x is None else x, how)
    yield transport.iall_gatherv(as_buffer(mine), out, counts, out.element.itemsize)
    return out.owner


def reduce(transport: Transport, _: Channel, x: Buffer, out: Buffer | None, how: Reduction, dst: int) -> Steps[Any]:
    mine, counts = yield from _own_slice(transport, x, how)
    yield transport.igatherv(as_buffer(mine), out, counts, x.element.itemsize, dst)
    return None if out is None else out.owner


def reduce_scatter(transport: Transport, _: Channel, x: Buffer, out: Buffer, how: Reduction) -> Steps[Any]:
    sent = _scaled(x, how)
    rows = np.empty((transport.size, out.count), sent.dtype)
    yield transport.iall_to_all(as_buffer(sent), as_buffer(rows))
    _folder(how).fold(list(rows), [out.array()])
    return out.owner


def _own_slice(transport: Transport, x: Buffer, how: Reduction) -> Steps[tuple[Array, list[int]]]:
    """This rank's slice of the result, and how many elements those of all ranks have."""
    at = cuts(x.count, transport.size, transport.size)
    counts = [high - low for low, high in itertools.pairwise(at)]
    width = counts[transport.rank]
    sent = _scaled(x, how)
    rows = np.empty((transport.size, width), sent.dtype)
    everyone = [width] * transport.size
    yield transport.iall_to_allv(as_buffer(sent), counts, as_buffer(rows), everyone, sent.itemsize)
    mine = np.empty(width, how.element.storage)
    _folder(how).fold(list(rows), [mine])
    return mine, counts


def _scaled(x: Buffer, how: Reduction) -> Array:
    """x times this rank's factor of premul_sum, of 16-bit types in float32; x itself for all other ops."""
    if how.op.factor is None:
        return x.array()
    if how.element.is_half:
        with np.errstate(all="ignore"):
            wide: Array = widen(x.array(), how.element)
            wide *= np.float32(how.op.factor)  # type: ignore[arg-type]  # check_op lets no complex factor through
        return wide
    return premultiply(how.op, x.array(), how.element)


def _folder(how: Reduction) -> Folder:
    return Folder(how.op, how.element, how.size)
