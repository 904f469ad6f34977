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
from mpdist.memory import Buffer, Element, allocate, as_buffer
from mpdist.progress import wire
from mpdist.progress.backoff import message_credit
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
        order: its place in the mailbox, not positive when it does not wait there.
    """

    op = "recv"
    order = 0
    takes = Takes.ARRAY
    _request: Request | None = None
    _incoming: Incoming | None = None
    _reserved = False
    _given_up = False
    _steps: Generator[Request, None, Message] | None = None

    _buffer: Buffer | None

    def __init__(self, channel: Channel, buffer: Buffer | None, src: int, tag: int) -> None:
        self._channel = channel
        self._buffer = buffer
        self.src = src
        self.tag = tag

    # ------------------------------------------------------------------ meeting a message

    def accept(self, incoming: Incoming) -> bool:
        """Take the message; False if it does not fit: then this Work has failed, and the message is to be kept."""
        if self.takes is Takes.ENVELOPE:
            self._finish(self._channel.probed(incoming))
            return True
        try:
            self._check(incoming)
            if self._buffer is None and not incoming.is_object:
                self._buffer = _new_buffer(incoming)
        except (MessageTruncated, UnsupportedBuffer) as error:
            self._fail(error)
            return False
        self._incoming = incoming
        if incoming.handle is not None and incoming.parts is None and incoming.nbytes <= EAGER_BYTES:
            return self._receive_eagerly(incoming)
        self._steps = self._receive(incoming)
        self._channel.engine.active.append(self)
        self._advance()
        return True

    def _receive_eagerly(self, incoming: Incoming) -> bool:
        """A message that is here: MPI's blocking call only copies it."""
        memory = np.empty(incoming.nbytes, np.uint8) if self._buffer is None else self._buffer
        spec = memory if isinstance(memory, np.ndarray) else self._channel.transport.memory_of(memory)
        try:
            incoming.handle.Recv([spec, incoming.nbytes, self._channel.byte])
            self._finish(self._message(incoming, memory))
        except Exception as error:  # a failed transfer, or an object that cannot be unpickled
            self._broke(error)
        return True

    def _message(self, incoming: Incoming, memory: np.ndarray[Any, Any] | Buffer) -> Message:
        if isinstance(memory, np.ndarray):
            return self._object(incoming, memory, [])
        element = memory.element
        count = incoming.nbytes // element.itemsize
        return Message(memory.owner, incoming.src, incoming.tag, count, incoming.nbytes, element)

    def _check(self, incoming: Incoming) -> None:
        """Raise if the message does not fit this receive."""
        if incoming.is_object:
            if self.takes is Takes.EITHER and not self._channel.engine.allow_pickle:
                raise UnsupportedBuffer(self._misfit(incoming, "MPDIST_ALLOW_PICKLE=0", "allow objects to receive it"))
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
        return self._message(incoming, buffer)

    def _receive_object(self, incoming: Incoming) -> Generator[Request, None, Message]:
        head = np.empty(incoming.nbytes, np.uint8)
        yield incoming.handle.Irecv([head, incoming.nbytes, self._channel.byte])
        bodies = []
        if incoming.parts is not None:
            bodies = [np.empty(size, np.uint8) for size in wire.unpack_table(head.data)[1:]]
            yield Pieces(self._channel, incoming, bodies)
        return self._object(incoming, head, bodies)

    @staticmethod
    def _object(incoming: Incoming, head: np.ndarray[Any, Any], bodies: list[np.ndarray[Any, Any]]) -> Message:
        """The object of a message; its frames lie in the message, or in bodies of their own."""
        sizes = wire.unpack_table(head.data)
        inline = range(1) if incoming.parts is not None else range(len(sizes))
        frames = [wire.frame(head.data, sizes, index) for index in inline]
        item = decode(frames + [body.data for body in bodies])
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
            self._channel.give_back(incoming)
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
            self._broke(error)
            return True
        return False

    def _broke(self, error: Exception) -> None:
        self._steps = self._request = None
        if self._done:  # it was given up before
            return
        failure = CommunicationError(f"{self.describe()} failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self._fail(failure)

    def _arrived(self, message: Message) -> None:
        self._steps = self._request = None
        incoming = self._incoming
        assert incoming is not None
        self._channel.ring(incoming.src)  # its send is complete now
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
        incoming.order = incoming.order or self.order
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

    def _desert(self, error: BaseException) -> None:
        self._channel.box.withdraw(self)
        super()._desert(error)

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


class ArrayReceive(Receive):
    """A receive into a NumPy array: the latency path.

    While it waits alone, its await probes, compares and receives without anything in between. Whatever is
    unusual (another message, other receives, a turn that is due) goes the general way.
    """

    def __init__(
        self, channel: Channel, x: np.ndarray[Any, Any], element: Element, nbytes: int, src: int, tag: int
    ) -> None:
        self._channel = channel
        self._memory: list[Any] = [x, nbytes, channel.byte]
        self._element = element
        self.src = src
        self.tag = tag

    @property
    def _buffer(self) -> Buffer:  # type: ignore[override]  # made only where the general way needs it
        return as_buffer(self._memory[0], writable=True)

    def __await__(self) -> Generator[Any, None, Message]:
        if not self._done:
            channel = self._channel
            engine = channel.engine
            box = channel.box
            if box.sole is self and engine.credit > 0:
                engine.lock.acquire()
                element = self._element
                x, nbytes, _ = self._memory
                src = self.src
                any_user_tag = self.tag < 0
                mask = wire.CODE_MASK if any_user_tag else -1
                want = element.code if any_user_tag else self.tag << wire.CODE_BITS | element.code
                improbe = channel.improbe
                any_source, any_tag, status = channel.any_message
                # Made while the message is still under way; where it came from is filled in.
                message = Message(x, src, self.tag, nbytes // element.itemsize, nbytes, element)
                try:
                    for _ in engine.quick_polls:
                        handle = improbe(any_source, any_tag, status)
                        if handle is None:
                            continue
                        mpi_tag = status.tag
                        source = status.source
                        if mpi_tag & mask == want and (source == src or src < 0) and status.count == nbytes:
                            box.sole = None
                            box.receives = self.order = 0
                            message.src = source
                            message.tag = mpi_tag >> wire.CODE_BITS
                            self._result = message
                            if nbytes > EAGER_BYTES:
                                self._land(handle, message)
                                break
                            handle.Recv(self._memory)
                            self._done = True
                            engine.credit -= 1
                            break
                        channel.arrived(handle)
                        if box.sole is not self:
                            break
                except channel.transport.failure as error:
                    self._broke(error)
                finally:
                    engine.lock.release()
                if engine.finished or self._callbacks is not None:
                    self._announce()
            if not self._done:
                return (yield from super().__await__())
        if self._error is not None:
            raise self._seen_error()
        return self._result

    def _land(self, handle: Any, message: Message) -> None:
        """Let MPI write a message that may still be with its sender."""
        engine = self._channel.engine
        request = handle.Irecv(self._memory)
        engine.credit -= message_credit(message.nbytes)
        test = request.Test
        for _ in engine.quick_polls:
            if test():
                self._done = True
                self._channel.ring(message.src)  # its send is complete now
                return
        self._incoming = Incoming(None, message.src, message.tag, self._element.code, message.nbytes)
        self._request = request
        self._steps = self._landed()
        engine.active.append(self)

    def _landed(self) -> Generator[Request, None, Message]:
        return self._result
        yield  # a program without further steps

    def _announce(self) -> None:
        engine = self._channel.engine
        self._looked_at = self._done
        if self._done and self._callbacks is not None and self not in engine.finished:
            engine.finished.append(self)
        engine.flush()


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
            if self._error is not None:
                return
            incoming = self._result._incoming  # type: ignore[attr-defined]  # a probe's result is a ProbedMessage
            if incoming is not None and not self._looked_at:
                self._channel._probed.discard(incoming)
                incoming.probed = None
                incoming.order = incoming.order or self.order
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
