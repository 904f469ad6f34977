"""Groups: making communicators without holding the event loop.

MPI makes communicators, but for duplicates, in calls that block until all members
have come. So the members first agree, step by step like any collective, and only
when all are there the call is made. Where several are being made at once, two ranks
might make their calls in different order and wait for each other: then each call
that blocks gets a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from mpdist.algorithms import dropped
from mpdist.algorithms.meeting import meet, tag_of
from mpdist.memory import as_buffer
from mpdist.progress.collective import Steps

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel
    from mpdist.progress.engine import Engine
    from mpdist.transport.mpi import Duplicate, Transport
    from mpdist.transport.requests import Request

R = TypeVar("R")

_NONE = -1  # travels in place of color None


class Blocking(Generic[R]):
    """A call that blocks until other ranks make it too, as a request."""

    def __init__(self, engine: Engine, call: Callable[[], R]) -> None:
        self._call = call
        self._result: R | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if engine.creating > 1 and engine.is_threaded:
            self._thread = threading.Thread(target=self._run, name="mpdist-group", daemon=True)
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except Exception as error:  # raised again by `result`
            self._error = error

    def Test(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def result(self) -> R:
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set by the call, which has returned


Make = Callable[["Transport"], object]
"""Makes the communicator of a new transport."""


def split(transport: Transport, engine: Engine, make: Make, color: int | None, key: int) -> Steps[object]:
    """The part of the ranks that gave the same color; None for color None."""
    own = dropped.closable(engine.dropped)
    mine = np.array([_NONE if color is None else color, key, len(own)], np.int64)
    everyone = np.empty((transport.size, len(mine)), np.int64)
    engine.creating += 1
    try:
        yield transport.iall_gather(as_buffer(mine), as_buffer(everyone))
        yield from dropped.close_common(transport, own, engine.dropped, int(everyone[:, -1].max()))
        call = Blocking(engine, lambda: transport.split(color, key))
        yield call
    finally:
        engine.creating -= 1
    part = call.result()
    return None if part is None else make(part)


def dup(transport: Transport, engine: Engine, make: Make) -> Steps[object]:
    """The same ranks, with messages and an order of their own."""
    own = dropped.closable(engine.dropped)
    most = np.array(len(own), np.int64)
    engine.creating += 1
    try:
        yield transport.iall_reduce(None, as_buffer(most), "max")
        yield from dropped.close_common(transport, own, engine.dropped, int(most))
        duplicate = transport.idup()
        yield duplicate
    finally:
        engine.creating -= 1
    return make(duplicate.transport())


def adopt(
    engine: Engine,
    come: Callable[[], Request],
    post: Callable[[], Duplicate],
    make: Callable[[Transport, int], object],
    number: int,
) -> Steps[object]:
    """A duplicate of a communicator that was made elsewhere.

    Args:
        come: posts what all members meet by.
        post: posts the making of the duplicate, when all have met.
        number: a member's own; the largest goes to `make`.
    """
    own = dropped.closable(engine.dropped)
    engine.creating += 1
    try:
        yield come()
        duplicate = post()
        yield duplicate
        transport = duplicate.transport()
        facts, most = np.array([number, len(own)], np.int64), np.empty(2, np.int64)
        yield transport.iall_reduce(as_buffer(facts), as_buffer(most), "max")
        yield from dropped.close_common(transport, own, engine.dropped, int(most[1]))
    finally:
        engine.creating -= 1
    return make(transport, int(most[0]))


def subgroup(
    _: Transport, parent: Channel, meeting: Channel, make: Make, ranks: Sequence[int], name: str
) -> Steps[object]:
    """These ranks of the parent; the others do not take part."""
    members = [parent.world_ranks[rank] for rank in ranks]
    engine = parent.engine
    own = dropped.closable(engine.dropped)
    engine.creating += 1
    try:
        counts = yield from meet(meeting, members, name, len(own))
        call = Blocking(engine, lambda: engine.maker.subgroup(members, tag_of(meeting, name)))
        yield call
        yield from dropped.close_common(call.result(), own, engine.dropped, max(counts))
    finally:
        engine.creating -= 1
    return make(call.result())
