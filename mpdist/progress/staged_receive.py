"""StagedReceive: a message that goes through host memory into an array on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpdist.errors import DeviceFailed
from mpdist.progress.message import Incoming, Message
from mpdist.progress.receive import Receive
from mpdist.progress.transfer import NoRoom, Room
from mpdist.progress.unbegun import Wrapped

if TYPE_CHECKING:
    from mpdist.memory.mark import Mark
    from mpdist.progress.work import Work


class ReceiveBeside(Receive):
    """The receive into host memory, which is lent when the message is there: only then can it be missing."""

    def _find_room(self, incoming: Incoming) -> Room:
        assert self._buffer is not None
        try:
            self._buffer.array()
        except MemoryError as error:
            raise self._no_room(incoming, NoRoom(f"{type(error).__name__}: {error}")) from error
        return super()._find_room(incoming)


class StagedReceive(Wrapped[Message]):
    """Done when the message has come and has been copied on."""

    op = "recv"
    _copied: Mark | None = None

    def __init__(self, receive: Work[Message], copy_in: Callable[[int], Mark], x: Any) -> None:
        """Take the receive into host memory, what copies so many bytes of that to the device, and the user's array."""
        self._channel = receive._channel
        self._receive = receive
        self._copy_in = copy_in
        self._x = x
        with self._channel.engine.lock:
            if receive._done:
                self._arrived(receive)
            else:
                receive._callbacks = [*(receive._callbacks or ()), (self._arrived, None, None)]

    def _arrived(self, _: object) -> None:
        """The message is in host memory, or never will be."""
        engine = self._channel.engine
        with engine.lock:
            if self._done:
                return
            receive = self._receive
            if receive._cancelled:
                self._withdraw()
            elif receive._error is not None:
                self._fail(receive._seen_error())
            else:
                try:
                    self._begin_copy(receive._result)
                except DeviceFailed as error:
                    self._fail(error)
        engine.flush()

    def _begin_copy(self, message: Message) -> None:
        self._copied = self._copy_in(message.nbytes)
        self._channel.engine.active.append(self)
        self._channel.engine.ticking.stir()

    def _poll(self) -> bool:
        copied = self._copied
        if copied is None:
            if not self._done:
                self._receive._poll()
            return self._done
        try:
            if not copied.Test():
                return False  # also when nobody waits any more: the copy still writes
        except DeviceFailed as error:
            if not self._done:
                self._fail(error)
            return True
        if not self._done:
            came = self._receive._result
            self._finish(Message(self._x, came.src, came.tag, came.count, came.nbytes, came.element))
        return True

    def _abandon(self) -> None:
        """The message goes to the next receive."""
        if not self._looked_at:
            self._receive._abandon()
            with self._channel.engine.lock:
                if not self._done:
                    self._withdraw()

    def _expire(self, error: BaseException) -> None:
        self._fail(error)
        self._receive._abandon()

    def cancel(self, msg: object = None) -> bool:
        return self._receive.cancel(msg)

    def details(self) -> str:
        return self._receive.details()
