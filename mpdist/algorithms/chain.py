"""Chain: large broadcasts and all_gathers over a rail from node to node, all_to_alls with one other at a time.

Slice by slice each node sends what it has on to the next, so that all links are
busy at once and each carries the data once: MPI's own calls send them from some
nodes several times, or from several to one at once. Where that gains nothing, it
is MPI's own call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpdist.algorithms.crossing import WINDOW
from mpdist.algorithms.shared.turn import Turn
from mpdist.memory import as_buffer

if TYPE_CHECKING:
    from mpdist.memory import Buffer
    from mpdist.progress.collective import Steps
    from mpdist.progress.engine import Engine
    from mpdist.transport.mpi import Transport
    from mpdist.transport.requests import Request

Part = tuple["Buffer", int]

# A slice is long enough that Python's share of it is small, and short enough that the last node waits little for its
# first: so many for each link, within these limits.
SLICES = 16
LEAST_BYTES = 256 * 1024
MOST_BYTES = 4 * 1024 * 1024


def slice_bytes(nbytes: int, nodes: int) -> int:
    """How long the slices of so much are."""
    return min(max(LEAST_BYTES, nbytes // (SLICES * (nodes - 1))), MOST_BYTES)


def is_shorter(slices: int, nodes: int) -> bool:
    """Whether a chain ends before a tree of whole messages: in steps of one slice over one link."""
    return slices + nodes - 2 < slices * (nodes - 1).bit_length()


def broadcast(engine: Engine, rail: Transport, x: Buffer, root: int) -> Steps[None]:
    """Copy x of a node into x of all others."""
    if not is_shorter(-(-x.nbytes // slice_bytes(x.nbytes, rail.size)), rail.size):
        yield rail.ibroadcast(x, root)
        return
    parts = _cut(x, rail.size)
    place = (rail.rank - root) % rail.size
    coming = [(part, (rail.rank - 1) % rail.size) for part in parts if place > 0]
    going = [(part, (rail.rank + 1) % rail.size) for part in parts if place < rail.size - 1]
    yield from _stream(engine, rail, x.nbytes, coming, going, 0 if coming else len(going))


def all_gather(engine: Engine, rail: Transport, x: Buffer, out: Buffer) -> Steps[None]:
    """Copy x of all nodes into out of all, in the order of nodes: each sends its own on, and then what it is sent."""
    rows = out.array().reshape(rail.size, x.count)
    own = _cut(x, rail.size)
    others = [_cut(as_buffer(rows[(rail.rank - step) % rail.size]), rail.size) for step in range(1, rail.size)]
    coming = [(part, (rail.rank - 1) % rail.size) for block in others for part in block]
    going = [(part, (rail.rank + 1) % rail.size) for block in [own, *others[:-1]] for part in block]
    beside = zip(_cut(as_buffer(rows[rail.rank]), rail.size), own, strict=True)
    yield from _stream(engine, rail, x.nbytes, coming, going, len(own), beside)


def all_to_all(engine: Engine, rail: Transport, x: Buffer, out: Buffer) -> Steps[None]:
    """Copy row r of x of each node into out of the r-th node: step by step to one that is one further off."""
    if x.nbytes < rail.size * LEAST_BYTES:  # many small messages had better be under way at once
        yield rail.iall_to_all(x, out)
        return
    sent, received = (buffer.array().reshape(rail.size, -1) for buffer in (x, out))
    before = [(rail.rank - step) % rail.size for step in range(1, rail.size)]
    after = [(rail.rank + step) % rail.size for step in range(1, rail.size)]
    coming = [(part, peer) for peer in before for part in _cut(as_buffer(received[peer]), rail.size)]
    going = [(part, peer) for peer in after for part in _cut(as_buffer(sent[peer]), rail.size)]
    own = (_cut(as_buffer(rows[rail.rank]), rail.size) for rows in (received, sent))
    yield from _stream(engine, rail, x.nbytes, coming, going, len(going), zip(*own, strict=True))


def _cut(x: Buffer, nodes: int) -> list[Buffer]:
    whole = x.array()
    width = max(1, slice_bytes(x.nbytes, nodes) // x.element.itemsize)
    return [as_buffer(whole[start : start + width]) for start in range(0, x.count, width)]


def _stream(
    engine: Engine,
    rail: Transport,
    nbytes: int,
    coming: Sequence[Part],
    going: Sequence[Part],
    lead: int,
    beside: Iterable[tuple[Buffer, Buffer]] = (),
) -> Steps[None]:
    """Receive slices and send others, in the order that all nodes know.

    Args:
        nbytes: what must be the same on all nodes, or their slices do not meet.
        coming, going: a slice, and the node that it comes from, or goes to.
        lead: so many of `going` can go at once; each further one when one more of `coming` has come.
        beside: what is copied meanwhile: where to, and what.
    """
    tag = rail.tag_of_next(nbytes)
    received: deque[Request] = deque()
    sent: deque[Request] = deque()
    ahead, aside = iter(coming), iter(beside)
    come = 0
    turn = Turn(engine)

    def receive(due: int) -> Steps[None]:
        nonlocal come
        while True:
            while len(received) <= WINDOW and (part := next(ahead, None)) is not None:
                received.append(rail.ireceive_from(*part, tag))
            if come >= due:
                return
            yield received.popleft()
            come += 1
            if turn.is_over:
                yield turn

    for number, part in enumerate(going):
        # In step with what is sent, even where nothing waits for it: the node before sends no more than is received.
        yield from receive(min(len(coming), max(number - lead + 1, number - WINDOW)))
        if len(sent) == WINDOW:
            yield sent.popleft()
        sent.append(rail.isend_to(*part, tag))
        if (pair := next(aside, None)) is not None:
            _copy(*pair)
        if turn.is_over:
            yield turn
    for pair in aside:
        _copy(*pair)
        if turn.is_over:
            yield turn
    yield from receive(len(coming))
    yield from sent


def _copy(target: Buffer, source: Buffer) -> None:
    np.copyto(target.array(), source.array())
