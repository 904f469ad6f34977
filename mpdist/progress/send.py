"""Send: a message on its way out."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from mpdist.progress.backoff import TURN_CREDIT
from mpdist.progress.work import Requested, Work

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel
    from mpdist.transport.requests import Request

_NOTHING: Iterator[Any] = iter(())  # exhausted: an await of it ends at once, with None

# None of these has an __init__: it would double what one costs, and there is one for each message.


class Send(Requested[None]):
    """A message, or its pieces, that MPI still reads from the sender's memory, `lease`.

    `progress/sending.py` makes it, and sets the attributes.
    """

    __slots__ = ("_callbacks", "_channel", "_done", "_error", "_lease", "_looked_at", "_request", "dst", "tag")

    op = "send"
    _result = None
    _lease: object
    dst: int
    tag: int

    def _complete(self) -> None:
        engine = self._channel.engine
        if not self._done:  # it may have expired meanwhile
            self._done = True
            if self._callbacks is not None:
                engine.finished.append(self)
        self._request: Request | None = None
        self._lease = None
        active = engine.active
        if active and active[-1] is self:
            active.pop()

    def _release(self) -> None:
        self._lease = None

    def details(self) -> str:
        return f"to {self.dst}, tag {self.tag}"


class Sent(Work[None]):
    """A send that was complete when it was posted."""

    __slots__ = ("_channel",)

    op = "send"
    _done = True
    _result = None

    # An exhausted iterator serves, which is never made anew, and is asked for without a call of Python.
    __await__ = _NOTHING.__iter__  # type: ignore[assignment]


class SentAndTurn(Sent):
    """The same, where the event loop is due a turn: it gets it in the await."""

    def __await__(self) -> Generator[Any, None, None]:
        yield
        self._channel.engine.credit = TURN_CREDIT


def pending(channel: Channel, request: Request, dst: int, tag: int, lease: object) -> Send:
    """The Work of a message that MPI has, and that the Engine looks at from now on."""
    engine = channel.engine
    work = unlisted(channel, request, dst, tag, lease)
    with engine.lock:  # another thread's driver may be looking at the end of the table
        engine.active.append(work)
    if engine.ticking.is_asleep or not engine.ticking.is_on:
        engine.ticking.stir()
    return work


def unlisted(channel: Channel, request: Request | None, dst: int, tag: int, lease: object) -> Send:
    """The same of one at which nobody looks."""
    work = Send()
    work._channel = channel
    work._request = request
    work._lease = lease
    work.dst = dst
    work.tag = tag
    work._done = work._looked_at = False
    work._error = work._callbacks = None
    return work
