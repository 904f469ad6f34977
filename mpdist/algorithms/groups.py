"""Groups: making communicators without holding the event loop.

MPI makes communicators in calls that block until all members have come. So the
members first agree, step by step like any collective, and only when all are
there, at the next look, the blocking call is made: not while it is posted, after
which a member may do something else before it looks. Where several are being made
at once, two ranks might make their calls in different order and wait for each
other: then each call gets a thread of its own.
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
    from mpdist.transport.mpi import Transport
    from mpdist.transport.requests import Request

R = TypeVar("R")

_NONE = -1  # travels in place of color None


class Blocking(Generic[R]):
    """A call that blocks until other ranks make it too, as a request. Made at the second look, of several in threads.

    A thread for each would take 0.3 ms more by MPICH, and up to 14 by Open MPI, whose calls wait for one another.
    """

    def __init__(self, engine: Engine, call: Callable[[], R]) -> None:
        self._engine = engine
        self._call = call
        self._result: R | None = None
        self._error: Exception | None = InterruptedError("by the handler of a signal")
        self._is_seen = self._is_made = False
        self._thread: threading.Thread | None = None

    def _run(self) -> None:
        self._is_made = True
        try:
            self._result = self._call()
            self._error = None
        except Exception as error:  # raised again by `result`
            self._error = error

    def Test(self) -> bool:
        if self._thread is not None:
            return not self._thread.is_alive()
        if not self._is_seen:
            self._is_seen = True
            return False
        if self._engine.creating > 1 and self._engine.is_threaded and not self._is_made:
            self._thread = threading.Thread(target=self._run, name="mpdist-group", daemon=True)
            self._thread.start()
            return False
        if not self._is_made:
            self._run()
        return True

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
        call = Blocking(engine, transport.dup)
        yield call
    finally:
        engine.creating -= 1
    return make(call.result())


def adopt(
    engine: Engine,
    come: Callable[[], Request],
    duplicate: Callable[[], Transport],
    make: Callable[[Transport, int], object],
    number: int,
) -> Steps[object]:
    """A duplicate of a communicator that was made elsewhere.

    Args:
        come: posts what all members meet by.
        number: a member's own; the largest goes to `make`.
    """
    own = dropped.closable(engine.dropped)
    engine.creating += 1
    try:
        yield come()
        call = Blocking(engine, duplicate)
        yield call
        transport = call.result()
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
