"""Transfer: how a matched message gets into memory.

A program posts MPI's receives, yields their requests, and returns the Message.
What memory it needs is found before, so that a message for which there is none
is still with MPI. What has been posted is kept with the message: a program that
a signal's handler has ended is begun again, and posts nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpdist.errors import MpdistError, UnsupportedBuffer
from mpdist.memory import Buffer, allocate, as_buffer
from mpdist.progress import wire
from mpdist.progress.interruption import is_interruption
from mpdist.progress.message import Incoming, Message
from mpdist.progress.pickling import decode
from mpdist.progress.shown.taking import take_to_host

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel
    from mpdist.transport.requests import Request

N = TypeVar("N")
Octets = np.ndarray[Any, np.dtype[np.uint8]]
Room = Buffer | Octets | None
"""Where a message goes: an array's Buffer, an object's bytes; None for data that are here, and stay where they are."""

Transfer = Generator["Request", None, Message]

# How many pieces one look takes at the most, so that an object of many does not hold a turn.
LOOK_PIECES = 16


class NoRoom(MpdistError):
    """Memory for a message could not be had; the message is as it was."""


def room_for(incoming: Incoming, buffer: Buffer | None) -> Room:
    """Memory for a message: the receiver's, else new.

    Raises:
        NoRoom: it could not be allocated.
        UnsupportedBuffer: bfloat16 without ml_dtypes.
    """
    element = incoming.element()
    if buffer is not None or (incoming.result is not None and (element is None or element.numpy is not None)):
        return buffer
    if element is None:
        return _new(_octets, incoming.nbytes)
    return as_buffer(_new(allocate, element, incoming.nbytes // element.itemsize), writable=True)


def _new(make: Callable[..., N], *arguments: Any) -> N:
    try:
        return make(*arguments)
    except UnsupportedBuffer:
        raise
    except Exception as error:
        if is_interruption(error):
            raise
        raise NoRoom(f"{type(error).__name__}: {error}") from error


def _octets(nbytes: int) -> Octets:
    return np.empty(nbytes, np.uint8)


def transfer(channel: Channel, incoming: Incoming, room: Room) -> Transfer:
    """Receive a message into its room."""
    if incoming.result is not None:
        assert not isinstance(room, np.ndarray)
        return _reuse(incoming.result, room)
    if isinstance(room, Buffer):
        if incoming.shown is not None:
            yield from take_to_host(incoming.shown, room.array().view(np.uint8)[: incoming.nbytes])
            return _array_message(incoming, room)
        return (yield from _receive_array(channel, incoming, room))
    assert room is not None
    return (yield from _receive_object(channel, incoming, room))


def receive_now(channel: Channel, incoming: Incoming, room: Room) -> Message:
    """The same for a small message, which is here: MPI's blocking call only copies it."""
    memory = channel.transport.memory_of(room) if isinstance(room, Buffer) else room
    incoming.handle.Recv([memory, incoming.nbytes, channel.byte])
    if isinstance(room, Buffer):
        return _array_message(incoming, room)
    assert room is not None
    return _object_message(incoming, room, [])


def _receive_array(channel: Channel, incoming: Incoming, buffer: Buffer) -> Transfer:
    if incoming.parts is None:
        yield from _receive_whole(channel, incoming, channel.transport.memory_of(buffer))
    else:
        pieces = incoming.request
        if pieces is None:
            pieces = Pieces(channel, incoming, [buffer.array().view(np.uint8)[: incoming.nbytes]])
            incoming.request = pieces
        yield pieces
    return _array_message(incoming, buffer)


def _receive_whole(channel: Channel, incoming: Incoming, memory: Any) -> Generator[Request, None, None]:
    """Receive MPI's message; where a handler of a signal came in between, what is left of that."""
    if incoming.request is None:
        if not incoming.handle:  # receive_now has got it
            return
        # Not a call of its own, after which a handler could raise before the request has a name.
        (incoming.request,) = map(incoming.handle.Irecv, ([memory, incoming.nbytes, channel.byte],))
    yield incoming.request


def _receive_object(channel: Channel, incoming: Incoming, head: Octets) -> Transfer:
    if incoming.head is None:
        yield from _receive_whole(channel, incoming, head)
    else:
        head = incoming.head
    if incoming.parts is None:
        return _object_message(incoming, head, [])
    if incoming.head is None:
        incoming.head, incoming.handle, incoming.request = head, None, None
    pieces = incoming.request
    if pieces is None:
        sizes = wire.unpack_table(head.data)
        bodies = [_new(_octets, wire.body_bytes([sizes[index] for index in body])) for body in wire.bodies(sizes)]
        incoming.request = pieces = Pieces(channel, incoming, bodies)
    yield pieces
    return _object_message(incoming, head, pieces.bodies)


def _array_message(incoming: Incoming, buffer: Buffer) -> Message:
    element = buffer.element
    count = incoming.nbytes // element.itemsize
    return Message(buffer.owner, incoming.src, incoming.tag, count, incoming.nbytes, element)


def _object_message(incoming: Incoming, head: Octets, bodies: list[Octets]) -> Message:
    """The object of a message; its frames lie in the message, or in bodies of their own."""
    sizes = wire.unpack_table(head.data)
    frames = wire.unpack_frames(head.data, sizes, inline=incoming.parts is None)
    if bodies:
        frames += [head.data] * (len(sizes) - 1)
        for indices, body in zip(wire.bodies(sizes), bodies, strict=True):
            for index, frame in zip(
                indices, wire.unpack_body(body.data, [sizes[index] for index in indices]), strict=True
            ):
                frames[index] = frame
    item = decode(frames if sizes[0] else frames[1:])
    return Message(item, incoming.src, incoming.tag, 1, sum(sizes), None)


def _reuse(result: Message, buffer: Buffer | None) -> Message:
    """The data of a message to this rank itself, or of one whose first receive was cancelled after they had come."""
    if buffer is None or result.element is None:
        return result
    buffer.array()[: result.count] = as_buffer(result.data).array()[: result.count]
    return Message(buffer.owner, result.src, result.tag, result.count, result.nbytes, result.element)


def kept(message: Message) -> Message:
    """The message with data of its own, which nobody else writes."""
    if message.element is None:
        return message
    data = as_buffer(message.data).array()[: message.count].copy().view(message.element.storage)
    return Message(data, message.src, message.tag, message.count, message.nbytes, message.element)


class Pieces:
    """The pieces of one message as one request: each is received as soon as it has come."""

    def __init__(self, channel: Channel, incoming: Incoming, bodies: list[Octets]) -> None:
        self._channel = channel
        self._incoming: Incoming | None = incoming  # until they have come: it keeps them, too
        self.bodies = bodies
        self._regions: list[Octets] = []
        for body in bodies:
            start = 0
            for size in wire.piece_sizes(body.nbytes):
                self._regions.append(body[start : start + size])
                start += size
        self._requests: list[Request] = []
        self._complete = 0

    def Test(self) -> bool:
        if self._incoming is None:
            return True
        parts = self._incoming.parts
        assert parts is not None
        channel = self._channel
        for _ in range(LOOK_PIECES):
            if len(parts) >= len(self._regions) or not channel.inbox.poll_once():
                break
        requests = self._requests
        for number in range(len(requests), min(len(parts), len(self._regions))):
            handle, nbytes = parts[number]
            # Not a call of its own, after which a handler could raise before the request is listed.
            requests += map(handle.Irecv, ([self._regions[number], nbytes, channel.byte],))
            channel.engine.has_advanced = True
        while self._complete < len(requests) and requests[self._complete].Test():
            self._complete += 1
            channel.engine.has_advanced = True
        if len(requests) < len(self._regions):
            return False
        channel.inbox.all_pieces_came(self._incoming)
        if self._complete < len(requests):
            return False
        self._incoming = None
        return True
