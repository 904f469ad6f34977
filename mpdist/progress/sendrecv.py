"""SendReceive: a send and a receive as one Work."""

from __future__ import annotations

from mpdist.progress.message import Message
from mpdist.progress.unbegun import Wrapped
from mpdist.progress.work import Work


class SendReceive(Wrapped[Message]):
    """Done when both are; its result is the received Message."""

    op = "sendrecv"

    def __init__(self, receive: Work[Message], send: Work[None]) -> None:
        self._channel = receive._channel
        self._receive = receive
        self._send = send
        with self._channel.engine.lock:
            for part in (receive, send):
                if not part._done:  # no loop: who notices that the part is done calls back at once
                    part._callbacks = [*(part._callbacks or ()), (self._part_done, None, None)]
        self._part_done()

    def _part_done(self, _: object = None) -> None:
        with self._channel.engine.lock:
            self._update()
        self._channel.engine.flush()

    def _update(self) -> None:
        if self._done or not self._receive._done:
            return
        error = self._receive._error
        if error is not None and not self._receive._cancelled:
            self._send._abandon()
            self._fail(self._receive._seen_error())
        elif self._receive._cancelled:
            self._send._abandon()
            self._withdraw()
        elif self._send._done:
            if self._send._error is not None:
                self._fail(self._send._seen_error())
            else:
                self._finish(self._receive._result)

    def _poll(self) -> bool:
        if not self._receive._done:
            self._receive._poll()
        if not self._send._done:
            self._send._poll()
        self._part_done()
        return self._done

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

    def details(self) -> str:
        if self._send._done:
            return f"{self._receive.details()} (its send is done)"
        return f"{self._send.details()}, and {self._receive.details()}"
