"""Receive: waits for a message, checks it, and lets MPI write it.

Type and size are checked before the buffer is touched; what does not fit fails
the receive and stays queued for a better one. A receive that is cancelled before
it meets a message is withdrawn; one that is cancelled later gives the message
back, so that the next receive gets it: nothing is lost.
"""

from __future__ import annotations

import enum
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.errors import CommunicationError, MessageTruncated, UnsupportedBuffer
from mpdist.memory import Buffer, allocate, as_buffer
from mpdist.progress import wire
from mpdist.progress.mailbox import ANY
from mpdist.progress.message import Incoming, Message
from mpdist.progress.pickling import decode
from mpdist.progress.work import Work

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel
    from mpdist.transport.mpi import Request

# Up to this size a matched message has arrived with its envelope on both MPIs, so that MPI's blocking call only copies.
EAGER_BYTES = 2048


class Takes(enum.Enum):
    """Which kind of message a receive is for."""

    ARRAY = "an array"
    OBJECT = "an object"
    EITHER = "an array or an object"
    ENVELOPE = "any message, without receiving it"


class Receive(Work[Message]):
    """A posted receive.

    Attributes:
        src, tag: the pattern; mailbox.ANY for any.
        order: its place in the mailbox, 0 when it does not wait there.
    """

    op = "recv"
    order = 0
    takes = Takes.ARRAY
    _request: Request | None = None
    _incoming: Incoming | None = None
    _reserved = False
    _given_up = False
    _looked_at = False
    _steps: Generator[Request, None, Message] | None = None
    _memory: list[Any]

    _wire = ANY
    """The MPI tag that an exactly fitting message has; ANY where that can't be said."""

    def __init__(self, channel: Channel, buffer: Buffer | None, src: int, tag: int) -> None:
        self._channel = channel
        self._buffer = buffer
        self.src = src
        self.tag = tag
        if buffer is not None and src >= 0 and tag >= 0 and buffer.nbytes <= EAGER_BYTES:
            self._wire = tag << wire.CODE_BITS | buffer.element.code
            self._memory = [channel.transport.memory_of(buffer), buffer.nbytes, channel.byte]
            self._result = Message(buffer.owner, src, tag, buffer.count, buffer.nbytes, buffer.element)

    def __await__(self) -> Generator[Any, None, Message]:
        if self._done or not self._receive_exactly():
            yield from super().__await__()
        if self._error is not None:
            raise self._seen_error()
        return self._result

    def _receive_exactly(self) -> bool:
        """Meet a small message of the very size asked for while nothing else is expected: the latency path.

        All that can be prepared was prepared when the receive was posted, while the message was under way.
        """
        channel = self._channel
        engine = channel.engine
        box = channel.box
        if self._wire < 0 or engine.credit <= 0 or engine.backoff.yields or box.sole is not self:
            return False
        if not engine.lock.acquire(False):
            return False
        improbe = channel._improbe
        any_source, any_tag = channel._any
        status = channel._status
        try:
            for _ in range(engine.backoff.inline_polls):
                handle = improbe(any_source, any_tag, status)
                if handle is None:
                    continue
                if status.tag == self._wire and status.source == self.src and status.count == self._memory[1]:
                    handle.Recv(self._memory)
                    self._done = True
                    box.take_sole()
                    engine.credit -= 1
                    break
                channel.arrived(handle)
                if self._done or box.sole is not self:
                    break
        finally:
            engine.lock.release()
        if engine.finished:
            engine.flush()
        return self._done

    # ------------------------------------------------------------------ meeting a message

    def accept(self, incoming: Incoming) -> bool:
        """Take the message; False if it does not fit: then this Work has failed, and the message is to be kept."""
        buffer = self._buffer
        nbytes = incoming.nbytes
        if (
            buffer is not None
            and buffer.element.code == incoming.code
            and nbytes <= EAGER_BYTES
            and nbytes <= buffer.nbytes
            and incoming.handle is not None
        ):
            exporter = buffer.exporter
            memory = exporter if exporter is not None else self._channel.transport.memory_of(buffer)
            try:
                incoming.handle.Recv([memory, nbytes, self._channel.byte])
            except self._channel.transport.failure as error:
                self._fail(CommunicationError(f"{self.describe()} failed: {error}"))
                return True
            self._incoming = incoming
            element = buffer.element
            self._result = Message(
                buffer.owner, incoming.src, incoming.tag, nbytes // element.itemsize, nbytes, element
            )
            self._done = True
            if self._callbacks is not None:
                self._channel.engine.finished.append(self)
            return True
        return self._accept(incoming)

    def _accept(self, incoming: Incoming) -> bool:
        if self.takes is Takes.ENVELOPE:
            self._finish(self._channel.probed(incoming))
            return True
        try:
            self._check(incoming)
            if self._buffer is None and not incoming.is_object and incoming.result is None:
                self._buffer = _new_buffer(incoming)
        except (MessageTruncated, UnsupportedBuffer) as error:
            self._fail(error)
            return False
        self._incoming = incoming
        self._steps = self._receive(incoming)
        self._channel.engine.active.append(self)
        self._poll()
        return True

    def _check(self, incoming: Incoming) -> None:
        """Raise if the message does not fit this receive."""
        if incoming.is_object:
            if self.takes is Takes.ARRAY:
                raise UnsupportedBuffer(self._misfit(incoming, "a receive of an array", "take it with recv_object"))
            return
        if self.takes is Takes.OBJECT:
            raise UnsupportedBuffer(self._misfit(incoming, "a receive of an object", "take it with recv"))
        buffer = self._buffer
        if buffer is None:
            return
        if buffer.element.code != incoming.code:
            element = incoming.element()
            assert element is not None
            raise UnsupportedBuffer(
                self._misfit(
                    incoming, f"a buffer of {buffer.element.name}", f"receive into {element.name}, or without x"
                )
            )
        if buffer.nbytes < incoming.nbytes:
            need = incoming.nbytes // buffer.element.itemsize
            raise MessageTruncated(
                self._misfit(
                    incoming, f"a buffer of {buffer.count} elements", f"receive into {need} elements, or without x"
                )
            )

    def _misfit(self, incoming: Incoming, got: str, advice: str) -> str:
        return f"{self.describe()}: {incoming.describe()} met {got}; the message stays queued: {advice}"

    def reserve(self, incoming: Incoming) -> None:
        """Hold a message until the event loop has had its turn."""
        self._incoming = incoming
        self._reserved = True

    # ------------------------------------------------------------------ getting it

    def _receive(self, incoming: Incoming) -> Generator[Request, None, Message]:
        if incoming.result is not None:
            return self._reuse(incoming.result)
        if incoming.is_object:
            return (yield from self._receive_object(incoming))
        return (yield from self._receive_array(incoming))

    def _receive_array(self, incoming: Incoming) -> Generator[Request, None, Message]:
        buffer = self._buffer
        assert buffer is not None
        if incoming.parts is None:
            yield incoming.handle.Irecv(
                [self._channel.transport.memory_of(buffer), incoming.nbytes, self._channel.byte]
            )
        else:
            yield Pieces(self._channel, incoming, [buffer.array().view(np.uint8)[: incoming.nbytes]])
        count = incoming.nbytes // buffer.element.itemsize
        return Message(buffer.owner, incoming.src, incoming.tag, count, incoming.nbytes, buffer.element)

    def _receive_object(self, incoming: Incoming) -> Generator[Request, None, Message]:
        head = np.empty(incoming.nbytes, np.uint8)
        yield incoming.handle.Irecv([head, incoming.nbytes, self._channel.byte])
        message = head.data
        sizes = wire.unpack_table(message)
        frames = [wire.frame(message, sizes, 0)]
        if incoming.parts is None:
            frames += [wire.frame(message, sizes, index) for index in range(1, len(sizes))]
        else:
            bodies = [np.empty(size, np.uint8) for size in sizes[1:]]
            yield Pieces(self._channel, incoming, bodies)
            frames += [body.data for body in bodies]
        item = decode(frames)
        return Message(item, incoming.src, incoming.tag, 1, sum(sizes), None)

    def _reuse(self, result: Message) -> Message:
        """The data of a message whose first receive was cancelled after they had come."""
        if self._buffer is None or result.element is None:
            return result
        self._buffer.array()[: result.count] = as_buffer(result.data).array()[: result.count]
        return Message(self._buffer.owner, result.src, result.tag, result.count, result.nbytes, result.element)

    def _poll(self) -> bool:
        if self.order > 0:
            self._channel.poll_once()
            return self._done
        if self._reserved:
            return self._take_reserved()
        if (self._done and not self._given_up) or self._steps is None:
            return self._done
        return self._advance()

    def _take_reserved(self) -> bool:
        incoming = self._incoming
        assert incoming is not None
        self._reserved = False
        if not self.accept(incoming):
            self._channel.box.restore(incoming)
        return self._done

    def _advance(self) -> bool:
        assert self._steps is not None
        try:
            while self._request is None or self._request.Test():
                self._request = next(self._steps)
        except StopIteration as stop:
            self._arrived(stop.value)
            return True
        except Exception as error:  # a failed transfer, or an object that cannot be unpickled
            self._steps = None
            failure = CommunicationError(f"{self.describe()} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail(failure)
            return True
        return False

    def _arrived(self, message: Message) -> None:
        self._steps = self._request = None
        incoming = self._incoming
        assert incoming is not None
        self._channel._ring(incoming.src)  # its send is complete now
        if self._given_up:
            self._give_back(message)
        else:
            self._finish(message)

    # ------------------------------------------------------------------ giving up

    def cancel(self, msg: object = None) -> bool:
        """Withdraw it; False if it has met a message, or is done."""
        with self._channel.engine.lock:
            withdrawn = not self._done and self._leave_queue()
        if withdrawn:
            self._channel.engine.flush()
        return withdrawn

    def _leave_queue(self) -> bool:
        if self._reserved and self._incoming is not None:
            self._reserved = False
            self._withdraw()
            self._channel.give_back(self._incoming)
            return True
        if self._channel.box.withdraw(self):
            self._withdraw()
            return True
        return False

    def _abandon(self) -> None:
        """The await was cancelled: the message, if it came, goes to the next receive."""
        with self._channel.engine.lock:
            if self._given_up or self._cancelled or self._looked_at:
                return
            if not self._done and self._leave_queue():
                return
            self._given_up = True
            if self._done and self._error is None:
                message = self._result
                self._withdraw()
                self._give_back(message)
            elif not self._done:
                self._withdraw()  # the transfer goes on in the Engine's table
        self._channel.engine.flush()

    def _give_back(self, message: Message) -> None:
        incoming = self._incoming
        if incoming is None:
            return
        if message.element is not None:
            kept = as_buffer(message.data).array()[: message.count].copy()
            data = kept.view(message.element.storage)
            message = Message(data, message.src, message.tag, message.count, message.nbytes, message.element)
        incoming.handle = None
        incoming.parts = None
        incoming.result = message
        self._channel.give_back(incoming)

    def _expire(self, error: BaseException) -> None:
        """It took too long: withdrawn, with the error as its result."""
        if self._leave_queue():
            self._cancelled = False
            self._error = None
            self._fail(error)
            return
        self._given_up = True
        self._fail(error)

    def _seen_error(self) -> BaseException:
        self._looked_at = True
        return super()._seen_error()

    def result(self) -> Message:
        self._looked_at = self._looked_at or self._done
        return super().result()

    def details(self) -> str:
        src = "any rank" if self.src == ANY else self.src
        tag = "any tag" if self.tag == ANY else f"tag {self.tag}"
        return f"from {src}, {tag}"


class ReceiveObject(Receive):
    """A receive for an object."""

    op = "recv_object"
    takes = Takes.OBJECT


class ReceiveEither(Receive):
    """A receive for whatever comes; an array into a new array."""

    op = "messages"
    takes = Takes.EITHER


class Probe(Receive):
    """A receive that only matches; its Message is received by the message's own `recv`."""

    op = "probe"
    takes = Takes.ENVELOPE

    def _abandon(self) -> None:
        with self._channel.engine.lock:
            if not self._done:
                self._leave_queue()
                return
            incoming = self._result._incoming  # type: ignore[attr-defined]  # a probe's result is a ProbedMessage
            if incoming is not None and not self._looked_at:
                self._channel._probed.discard(incoming)
                incoming.probed = None
                self._channel.give_back(incoming)


def _new_buffer(incoming: Incoming) -> Buffer:
    element = incoming.element()
    assert element is not None
    return as_buffer(allocate(element, (incoming.nbytes // element.itemsize,)), writable=True)


class Pieces:
    """The pieces of one message as one request: each is received as soon as it has come."""

    def __init__(self, channel: Channel, incoming: Incoming, bodies: list[np.ndarray[Any, Any]]) -> None:
        self._channel = channel
        self._incoming = incoming
        self._regions: list[np.ndarray[Any, Any]] = []
        for body in bodies:
            start = 0
            for size in wire.piece_sizes(body.nbytes):
                self._regions.append(body[start : start + size])
                start += size
        self._started = 0
        self._requests: list[Request] = []

    def Test(self) -> bool:
        parts = self._incoming.parts
        assert parts is not None
        if len(parts) < len(self._regions):
            self._channel.poll_once()
        while self._started < len(parts) and self._started < len(self._regions):
            handle, nbytes = parts[self._started]
            region = self._regions[self._started]
            self._requests.append(handle.Irecv([region, nbytes, self._channel.byte]))
            self._started += 1
        self._requests = [request for request in self._requests if not request.Test()]
        return self._started == len(self._regions) and not self._requests
