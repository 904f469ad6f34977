"""Send: a message on its way out.

A small message is complete when it is posted. All such sends of a communicator
share one finished Work, whose await costs nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from mpdist.progress.backoff import TURN_CREDIT
from mpdist.progress.work import Requested, Work

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel
    from mpdist.transport.mpi import Request

_NOTHING: Iterator[Any] = iter(())  # exhausted: an await of it ends at once, with None


class Send(Requested[None]):
    """A message, or its pieces, that MPI still reads from the sender's memory."""

    op = "send"
    _result = None

    def __init__(self, channel: Channel, request: Request, dst: int, tag: int, lease: object) -> None:
        self._channel = channel
        self._request = request
        self.dst = dst
        self.tag = tag
        self._lease = lease

    def _release(self) -> None:
        self._lease = None

    def details(self) -> str:
        return f"to {self.dst}, tag {self.tag}"


class Sent(Work[None]):
    """A send that was complete when it was posted."""

    op = "send"
    _done = True
    _result = None

    def __await__(self) -> Generator[Any, None, None]:
        return _NOTHING  # type: ignore[return-value]  # an exhausted iterator serves, and is never made anew


class SentAndTurn(Work[None]):
    """The same, where the event loop is due a turn: it gets it in the await."""

    op = "send"
    _done = True
    _result = None

    def __await__(self) -> Generator[Any, None, None]:
        yield
        self._channel.engine.credit = TURN_CREDIT
