"""Objects: collectives of anything that pickles; sizes first, then the bytes.

An object is one message of frames (see progress.wire), padded to a unit so that
32-bit counts reach 128 GiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.algorithms.header import Header, pack, room, unpack
from mpdist.memory import Buffer, as_buffer
from mpdist.progress import wire
from mpdist.progress.collective import Steps
from mpdist.progress.pickling import decode, encode

if TYPE_CHECKING:
    from mpdist.transport.mpi import Transport

UNIT = wire.ALIGNMENT


def packed(item: object) -> Buffer:
    """An object as bytes, a multiple of UNIT of them."""
    message = wire.pack_frames(encode(item), inline=True)
    message += bytes(-len(message) % UNIT)
    return as_buffer(message)


def unpacked(message: np.ndarray[Any, Any]) -> Any:
    """Inverse of packed; arrays live in the message's memory."""
    view: memoryview = message.data
    sizes = wire.unpack_table(view)
    return decode(wire.unpack_frames(view, sizes, inline=True))


def broadcast_object(transport: Transport, item: Buffer | Header | None, original: object, src: int) -> Steps[Any]:
    """src's object to all; a Header in its place is src's refusal."""
    head = room(1)
    if item is not None:
        head = pack([item if isinstance(item, Header) else Header(nbytes=item.nbytes)])
    yield transport.ibroadcast(head, src)
    header = unpack(head)[0].check()
    message = item if isinstance(item, Buffer) else _room([header.nbytes])
    yield transport.ibroadcast(message, src)
    return original if transport.rank == src else unpacked(message.array())


def gather_object(transport: Transport, item: Buffer, dst: int) -> Steps[Any]:
    is_dst = transport.rank == dst
    sizes = np.zeros(transport.size, np.int64)
    yield transport.igather(_size(item), as_buffer(sizes) if is_dst else None, dst)
    if not is_dst:
        yield transport.igatherv(item, None, (), UNIT, dst)
        return None
    landing = _room(sizes)
    yield transport.igatherv(item, landing, _units(sizes), UNIT, dst)
    return _objects(landing, sizes)


def all_gather_object(transport: Transport, item: Buffer) -> Steps[Any]:
    sizes = np.zeros(transport.size, np.int64)
    yield transport.iall_gather(_size(item), as_buffer(sizes))
    landing = _room(sizes)
    yield transport.iall_gatherv(item, landing, _units(sizes), UNIT)
    return _objects(landing, sizes)


def scatter_object(transport: Transport, items: Sequence[Buffer] | Header | None, src: int) -> Steps[Any]:
    """Object r of src to rank r; a Header in their place is src's refusal."""
    heads = None
    message = None
    counts: list[int] = []
    if isinstance(items, Header):
        heads = pack([items] * transport.size)
    elif items is not None:
        heads = pack([Header(nbytes=item.nbytes) for item in items])
        message = as_buffer(np.concatenate([item.array() for item in items]))
        counts = _units([item.nbytes for item in items])
    mine = room(1)
    yield transport.iscatter(heads, mine, src)
    landing = _room([unpack(mine)[0].check().nbytes])
    yield transport.iscatterv(message, counts, UNIT, landing, src)
    return unpacked(landing.array())


def all_to_all_object(transport: Transport, items: Sequence[Buffer]) -> Steps[Any]:
    sent = np.array([item.nbytes for item in items], np.int64)
    sizes = np.zeros(transport.size, np.int64)
    yield transport.iall_to_all(as_buffer(sent), as_buffer(sizes))
    landing = _room(sizes)
    message = as_buffer(np.concatenate([item.array() for item in items]))
    yield transport.iall_to_allv(message, _units(sent), landing, _units(sizes), UNIT)
    return _objects(landing, sizes)


def _size(item: Buffer) -> Buffer:
    return as_buffer(np.array([item.nbytes], np.int64))


def _room(sizes: Sequence[int] | np.ndarray[Any, Any]) -> Buffer:
    return as_buffer(np.empty(int(sum(sizes)), np.uint8))


def _units(sizes: Sequence[int] | np.ndarray[Any, Any]) -> list[int]:
    return [int(size) // UNIT for size in sizes]


def _objects(landing: Buffer, sizes: np.ndarray[Any, Any]) -> list[Any]:
    """The objects of all ranks; each in memory of its own, so that keeping one does not keep all."""
    message = landing.array()
    ends = np.cumsum(sizes).tolist()
    return [unpacked(message[end - size : end].copy()) for end, size in zip(ends, sizes.tolist(), strict=True)]
