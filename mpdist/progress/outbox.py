"""Outbox: messages whose data are still on their way to host memory, and those that wait behind them.

Messages from one rank to another must not overtake each other. So while one waits
for its data, all that its channel sends queues up here; a channel that never sends
such a message has no outbox, and pays nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from mpdist.errors import DeviceFailed
from mpdist.progress import wire

if TYPE_CHECKING:
    from mpdist.memory.mark import Mark
    from mpdist.progress.channel import Channel
    from mpdist.transport.requests import Request


class Outbox:
    """What a channel is to send, in order; it takes the place of the channel's `isend` while it is not empty."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._queue: deque[Request | Held] = deque()
        self._isend = channel.isend
        self._lock = threading.RLock()
        channel.fastboxes.end()  # what is put there would overtake

    def hold(self, mark: Mark | Request) -> None:
        """Let the messages that are posted from now on wait for this."""
        with self._lock:
            if not self._queue:
                self._isend = self._channel.isend
                self._channel.isend = self.isend
            self._queue.append(mark)

    def isend(self, spec: list[Any], dst: int, wire_tag: int) -> Request:
        """Post a message when those before it have been posted."""
        with self._lock:
            if not self._queue:
                return self._isend(spec, dst, wire_tag)
            held = Held(self, spec, dst, wire_tag)
            self._queue.append(held)
            return held

    def advance(self) -> None:
        """Post what may be posted; if the data of one cannot be had, none that waits goes, for order is promised."""
        with self._lock:
            self._advance()

    def _advance(self) -> None:
        queue = self._queue
        while queue:
            first = queue[0]
            if isinstance(first, Held):
                first.begin(self._isend)
            elif not self._has_come(first):
                return
            if queue:
                queue.popleft()
            if isinstance(first, Held):
                self._channel.ring(first.dst)
        if self._channel.isend == self.isend:
            self._channel.isend = self._isend

    def _has_come(self, mark: Request) -> bool:
        try:
            return mark.Test()
        except DeviceFailed as error:
            for each in self._queue:
                if isinstance(each, Held) and each.is_last:
                    each.begin(self._isend)
                elif isinstance(each, Held):
                    each.error = error
            self._queue.clear()
            self._channel.give_up(f"the data of a message could not be had: {error}")
            return True


class Held:
    """The request of a message in the outbox."""

    __slots__ = ("_is_looked_at", "_outbox", "_request", "_spec", "_wire_tag", "dst", "error")

    def __init__(self, outbox: Outbox, spec: list[Any], dst: int, wire_tag: int) -> None:
        self._outbox = outbox
        self._spec = spec
        self.dst = dst
        self._wire_tag = wire_tag
        self.error: DeviceFailed | None = None
        self._is_looked_at = False
        self._request: Request | None = None

    def begin(self, isend: Any) -> None:
        """Its turn has come. Once: whoever does it may be interrupted afterwards, and look again."""
        if self._request is None:
            self._request = isend(self._spec, self.dst, self._wire_tag)

    @property
    def is_last(self) -> bool:
        """Whether it says that nothing more comes: true also of messages that were given up."""
        return self._wire_tag & wire.CODE_MASK == wire.LAST

    def Test(self) -> bool:
        if not self._is_looked_at:  # by whoever posts it: what goes wrong is for the Work to say
            self._is_looked_at = True
            return False
        if self._request is None:
            self._outbox.advance()
        if self.error is not None:
            raise self.error
        return self._request is not None and self._request.Test()
