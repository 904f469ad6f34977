"""SendReceive: a send and a receive as one Work.

The receive is what it waits for first: as long as that is pending, nobody asks
how the send fares. An await that meets the message at once looks at the parts
itself; else whoever notices the end of a part calls back.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from mpdist.errors import UsageError
from mpdist.progress.array_receive import ArrayReceive
from mpdist.progress.backoff import USUAL_CREDIT
from mpdist.progress.message import Message
from mpdist.progress.unbegun import Wrapped
from mpdist.progress.work import Work


class SendReceive(Wrapped[Message]):
    """Done when both are; its result is the received Message."""

    op = "sendrecv"
    _follows_send = False
    """Whether the receive is done, and the send will call back."""

    def __init__(self, receive: Work[Message], send: Work[None]) -> None:
        self._channel = receive._channel
        self._receive = receive
        self._send = send
        with self._channel.engine.lock:
            if receive._done:
                self._update()
            else:
                self._follow(receive)

    def _follow(self, part: Work[Any]) -> None:
        # No loop: who notices that the part is done calls back at once.
        part._callbacks = [*(part._callbacks or ()), (self._part_done, None, None)]

    def _part_done(self, _: object = None) -> None:
        if not self._done:
            with self._channel.engine.lock:
                self._update()
            self._channel.engine.flush()

    def _update(self) -> None:
        """See what has become of the parts. Under the Engine's lock."""
        receive, send = self._receive, self._send
        if self._done or not receive._done:
            return
        if receive._error is not None:
            send._abandon()
            if receive._cancelled:
                self._withdraw()
            else:
                self._fail(receive._seen_error())
        elif not send._done:
            if not self._follows_send:
                self._follows_send = True
                self._follow(send)
        elif send._error is not None:
            self._fail(send._seen_error())
        else:
            self._finish(receive._result)

    # ------------------------------------------------------------------ waiting

    def __await__(self) -> Generator[Any, None, Message]:
        engine, receive = self._channel.engine, self._receive
        try:
            if self._channel.inbox.box.sole is receive and engine.credit > 0 and isinstance(receive, ArrayReceive):
                with engine.lock:
                    self._meet(receive)  # type: ignore[arg-type]  # mypy takes what isinstance says from its __init__
                if engine.finished:
                    engine.flush()
        except BaseException:  # of a signal's handler
            if isinstance(receive, ArrayReceive):
                receive._take_back()
            self._abandon()
            raise
        if not self._done:
            try:
                return (yield from super().__await__())
            except BaseException as error:
                if not isinstance(error, UsageError):  # as in ArrayReceive
                    self._abandon()
                raise
        self._looked_at = True
        if self._error is not None:
            raise self._seen_error()
        return self._result

    def _meet(self, receive: ArrayReceive) -> None:
        """Look at the receive, then at the send, for a while; without callbacks, where only we wait for them."""
        if self._done or receive._done or len(receive._callbacks or ()) > 1:  # another thread has driven; others wait
            return
        receive._meet()
        if not receive._looked_at:  # it waits, or came the general way, and calls back
            return
        receive._callbacks = None
        if not self._send._done:
            self._meet_send(receive)
        self._update()

    def _meet_send(self, receive: ArrayReceive) -> None:
        """Look at the send, for a while; if it is still on its way, a cancelled await gives the message back."""
        try:
            self._look_at_send()
        finally:
            if not self._send._done:
                receive._matched()
                receive._looked_at = False

    def _look_at_send(self) -> None:
        engine, send = self._channel.engine, self._send
        for _ in engine.quick_polls:
            if send._poll():
                engine.credit -= USUAL_CREDIT
                return

    def _poll(self) -> bool:
        if not self._receive._done:
            self._receive._poll()
        if not self._send._done:
            self._send._poll()
        self._update()
        return self._done

    # ------------------------------------------------------------------ giving up

    def _abandon(self) -> None:
        """The receive gives its message back; the send goes on, and nobody waits for it."""
        if not self._looked_at:
            self._receive._abandon()
            self._part_done()

    def _expire(self, error: BaseException) -> None:
        """It took too long: the receive is withdrawn, the send goes on."""
        self._fail(error)
        self._send._abandon()
        self._receive._abandon()

    def cancel(self, msg: object = None) -> bool:
        return self._receive.cancel(msg)

    # ------------------------------------------------------------------ words

    def details(self) -> str:
        if self._send._done:
            return f"{self._receive.details()} (its send is done)"
        return f"{self._send.details()}, and {self._receive.details()}"
