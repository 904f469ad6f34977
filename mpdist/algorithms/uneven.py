"""Uneven: blocks whose sizes only their owners know. Headers first, then the data.

Blocks travel from where they lie, into `out` where it lies; other results are views of one allocation.
A rank whose `out` does not fit takes its blocks all the same, into scratch memory,
and fails afterwards: the others rely on it, and the next collective on the order.
Where MPI counts with 32 bits and one rank would have more elements than that, all
refuse, before the data: totals travel beside the headers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.algorithms.blocks import are_apart, concatenated, placed, readable
from mpdist.algorithms.header import Header, pack, room, unpack
from mpdist.errors import SizeMismatch, Unavailable, UnsupportedBuffer, UsageError
from mpdist.memory import Buffer, Element, allocate, allocate_like, as_buffer
from mpdist.progress.collective import Steps

if TYPE_CHECKING:
    from mpdist.memory.elements import Array
    from mpdist.transport.mpi import Transport
    from mpdist.transport.requests import Request


# MPICH moves 64 KiB at a look. A turn of the event loop takes as long as some of them: 16 MiB took twice the time.
LOOKS = 8
LARGE_BYTES = 256 * 1024


class Looks:
    """A request of large data: it moves at each look, so several are one."""

    def __init__(self, request: Request) -> None:
        self._test = request.Test

    def Test(self) -> bool:
        """Whether it is complete."""
        return any(self._test() for _ in range(LOOKS))


def _moving(request: Request, nbytes: int) -> Request:
    """The request that moves so many bytes from or to this rank."""
    return Looks(request) if nbytes >= LARGE_BYTES else request


@dataclass(frozen=True)
class Parcel:
    """The root's blocks, or only its refusal.

    Attributes:
        heads: one for each rank.
        blocks: the same; of one array that is cut evenly only that; none where the root refuses.
    """

    heads: list[Header]
    blocks: Sequence[Buffer] = ()

    @classmethod
    def of_blocks(cls, blocks: Sequence[Buffer]) -> Parcel:
        """Blocks of any size; MPI may read no byte twice, so those that overlap are copied."""
        apart = blocks if are_apart(blocks) else [concatenated([block]) for block in blocks]
        return cls([Header.of(block) for block in blocks], apart)

    @classmethod
    def of_rows(cls, whole: Buffer, size: int, shape: Sequence[int]) -> Parcel:
        """`size` equal blocks of this shape, without copy."""
        head = Header(whole.element.code, list(shape), whole.nbytes // size, is_even=True)
        return cls([head] * size, [whole])

    @classmethod
    def refused(cls, text: str, size: int) -> Parcel:
        return cls([Header(refusal=text)] * size)


Spread = Callable[["Transport", Buffer | None, Buffer, int], Steps[None]]
"""Hands even blocks of a root out: x, out, src."""


def scatter(
    transport: Transport, spread: Spread, parcel: Parcel | None, out: Buffer | None, src: int, like: object
) -> Steps[Any]:
    """Blocks of src, one for each rank; the others give no parcel."""
    mine = room(1)
    if parcel is not None:
        parcel = _limited(parcel, transport.max_total)
    yield transport.iscatter(None if parcel is None else pack(parcel.heads), mine, src)
    head = unpack(mine)[0].check()
    target, misfit = _target(out, like, head)
    unit = head.element.itemsize
    if head.is_even:
        yield from spread(transport, None if parcel is None else parcel.blocks[0], target, src)
    elif parcel is None:
        yield _moving(transport.iscatterv(None, (), unit, target, src), target.nbytes)
    else:
        counts = [each.nbytes // unit for each in parcel.heads]
        memory, starts = readable(parcel.blocks, unit, transport.max_total)
        yield _moving(transport.iscatterv(memory, counts, unit, target, src, starts), sum(counts) * unit)
    if misfit is not None:
        raise misfit
    return target.owner


def gather(transport: Transport, x: Buffer, outs: Sequence[Buffer] | None, dst: int, like: object) -> Steps[Any]:
    """Blocks of any size to dst, which gets a list."""
    is_dst = transport.rank == dst
    heads = room(transport.size) if is_dst else None
    totals = None if transport.max_total is None else np.array([x.count])
    yield _with_totals(transport, transport.igather(pack([Header.of(x)]), heads, dst), totals)
    _check_totals(transport, totals)
    if heads is None:
        yield _moving(transport.igatherv(x, None, (), x.element.itemsize, dst), x.nbytes)
        return None
    headers = unpack(heads)
    landing = Landing(headers, outs, like, transport.max_total)
    yield _moving(
        transport.igatherv(x, landing.memory, landing.counts, landing.unit, dst, landing.starts), landing.nbytes
    )
    return landing.results()


def all_gather(transport: Transport, x: Buffer, outs: Sequence[Buffer] | None, like: object) -> Steps[Any]:
    """Blocks of any size to all."""
    heads = room(transport.size)
    yield transport.iall_gather(pack([Header.of(x)]), heads)
    headers = unpack(heads)
    _check_total(transport, sum(prod(head.shape) for head in headers))
    landing = Landing(headers, outs, like, transport.max_total)
    yield _moving(
        transport.iall_gatherv(x, landing.memory, landing.counts, landing.unit, landing.starts), landing.nbytes
    )
    return landing.results()


def all_to_all(
    transport: Transport, blocks: Sequence[Buffer], outs: Sequence[Buffer] | None, like: object
) -> Steps[Any]:
    """Block r of each rank to rank r."""
    heads = room(transport.size)
    totals = None if transport.max_total is None else _sent_and_received(transport, blocks)
    heading = transport.iall_to_all(pack([Header.of(block) for block in blocks]), heads)
    yield _with_totals(transport, heading, totals)
    _check_totals(transport, totals)
    landing = Landing(unpack(heads), outs, like, transport.max_total)
    unit = landing.unit
    sent = [block.nbytes // unit for block in blocks]
    memory, starts = readable(blocks, unit, transport.max_total)
    request = transport.iall_to_allv(memory, sent, landing.memory, landing.counts, unit, starts, landing.starts)
    yield _moving(request, sum(sent) * unit + landing.nbytes)
    return landing.results()


# Totals are compared only where there is a limit; else they are None.


def _sent_and_received(transport: Transport, blocks: Sequence[Buffer]) -> Array:
    """What, summed over all ranks, is how many elements each of them receives and sends."""
    totals = np.zeros((2, transport.size), np.int64)
    totals[0] = [block.count for block in blocks]
    totals[1, transport.rank] = totals[0].sum()
    return totals


def _with_totals(transport: Transport, headers: Request, totals: Array | None) -> Request:
    """The headers, and at the same time the sum of the totals over all ranks."""
    if totals is None:
        return headers
    return transport.together([headers, transport.iall_reduce(None, as_buffer(totals, writable=True), "sum")])


def _check_totals(transport: Transport, totals: Array | None) -> None:
    """Raise Unavailable on all ranks if one has too much."""
    if totals is not None:
        _check_total(transport, int(totals.max()))


def _check_total(transport: Transport, total: int) -> None:
    if transport.max_total is not None and total > transport.max_total:
        raise Unavailable(_too_many(total, transport.max_total))


def _limited(parcel: Parcel, max_total: int | None) -> Parcel:
    """The root's blocks, or its refusal if they are too much together."""
    total = sum(prod(head.shape) for head in parcel.heads)
    if max_total is None or total <= max_total or parcel.heads[0].is_even or not parcel.blocks:
        return parcel
    return Parcel.refused(_too_many(total, max_total), len(parcel.heads))


def _too_many(total: int, max_total: int) -> str:
    return (
        f"uneven blocks of {total} elements on one rank: this MPI counts with 32 bits, so there may be {max_total} "
        "in all; use blocks of equal size, or several calls"
    )


class Landing:
    """Where blocks of these headers arrive, and how they are handed out.

    Args:
        outs: where they are wanted; None: in new memory of the kind of `like`.
        most: to which number MPI counts; None: any.

    Attributes:
        unit: bytes of what is counted: an element, or one byte where the blocks cannot be handed out.
        counts: how many units each block has.
        nbytes: of all blocks.
        memory: of all blocks.
        starts: where in it each begins; None: one behind the other.
    """

    def __init__(
        self, headers: Sequence[Header], outs: Sequence[Buffer] | None, like: object, most: int | None = None
    ) -> None:
        self._headers = headers
        self._outs = outs
        self._misfit = misfit(headers, outs)
        self._flat: object | None = None
        self.unit = 1 if self._misfit is not None else headers[0].element.itemsize
        self.counts = [head.nbytes // self.unit for head in headers]
        self.nbytes = sum(self.counts) * self.unit
        self.starts: list[int] | None = None
        if self._misfit is None and outs is not None:
            there = placed(outs, self.unit, most)
            if there is not None:
                self.memory, self.starts = there
                return
        if self._misfit is None and outs is None:
            self._flat = allocate_like(like, (sum(self.counts),))
        memory = self._flat if self._flat is not None else np.empty(self.nbytes, np.uint8)
        self.memory = as_buffer(memory, writable=True)

    def results(self) -> list[Any]:
        """The blocks: views of the allocation, or the given arrays.

        Raises:
            UsageError: the blocks do not fit.
        """
        if self._misfit is not None:
            raise self._misfit
        if self._outs is not None and self.starts is not None:
            return [out.owner for out in self._outs]
        ends = accumulate(self.counts)
        spans = [slice(end - count, end) for end, count in zip(ends, self.counts, strict=True)]
        if self._outs is None:
            flat: Any = self._flat
            return [flat[span].reshape(tuple(head.shape)) for span, head in zip(spans, self._headers, strict=True)]
        arrived = self.memory.array().view(self._headers[0].element.storage)
        for out, span in zip(self._outs, spans, strict=True):
            out.array()[:] = arrived[span]
        return [out.owner for out in self._outs]


def misfit(headers: Sequence[Header], outs: Sequence[Buffer] | None) -> UsageError | None:
    """Why blocks of these headers can't be handed out, or None."""
    try:
        one_element(headers)
        for rank, (out, head) in enumerate(zip(outs or (), headers, strict=outs is not None)):
            check_fit(out, head, f"out[{rank}]")
    except UsageError as error:
        return error
    return None


def one_element(headers: Sequence[Header]) -> Element:
    """The element type that all blocks share."""
    names = {head.element.name for head in headers}
    if len(names) > 1:
        listed = ", ".join(f"rank {rank}: {head.element.name}" for rank, head in enumerate(headers))
        raise UnsupportedBuffer(f"blocks of different element types ({listed}); give all ranks the same")
    return headers[0].element


def check_fit(out: Buffer, head: Header, what: str) -> None:
    """Raise if a block does not fit the array given for it."""
    if out.element.code != head.code:
        raise UnsupportedBuffer(f"{what} is {out.element.name}, its block is {head.element.name}; give it that type")
    if out.nbytes != head.nbytes:
        need = prod(head.shape)
        raise SizeMismatch(f"{what} has {out.count} elements, its block has {need}; give it that many")


def _target(out: Buffer | None, like: object, head: Header) -> tuple[Buffer, UsageError | None]:
    """Where the block goes: `out`, or new memory like the root's array, or of NumPy's; else scratch, and why."""
    shape = tuple(head.shape)
    try:
        if out is not None:
            check_fit(out, head, "out")
            return out, None
        array = allocate(head.element, shape) if like is None else allocate_like(like, shape)
        return as_buffer(array, writable=True), None
    except UsageError as error:
        return as_buffer(np.empty(head.nbytes, np.uint8)), error
