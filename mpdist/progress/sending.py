"""Sending: how messages are posted on a channel.

An array goes as it is, with its type in the tag; what MPI would refuse for its
size goes in pieces; a message to this rank is copied into its own inbox. A small
message is complete when it is posted.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any

from mpdist.memory import Buffer, as_buffer
from mpdist.progress import wire
from mpdist.progress.backoff import USUAL_CREDIT, message_credit
from mpdist.progress.fastbox import BOX_BYTES, SLOT_DATA_BYTES, put
from mpdist.progress.interruption import is_interruption
from mpdist.progress.message import Incoming, Message
from mpdist.progress.pickling import decode
from mpdist.progress.send import Send, Sent, SentAndTurn, pending, unlisted

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel
    from mpdist.progress.work import Work
    from mpdist.transport.requests import Request

# Out-of-band buffers of an object are copied behind its pickle where all of it is no larger than this.
INLINE_OBJECT_BYTES = 64 * 1024


def send(channel: Channel, buffer: Buffer, dst: int, tag: int) -> Work[None]:
    """Post an array; the arguments are checked."""
    if dst not in channel.addressed:
        if dst == channel.rank:
            return _send_to_self(channel, buffer, tag)
        channel.addressed.add(dst)
    nbytes = buffer.nbytes
    if nbytes > wire.PIECE_BYTES:
        head = wire.pack_size(nbytes)
        return _send_pieces(channel, head, wire.ARRAY_IN_PIECES + buffer.element.code, [buffer], dst, tag, buffer)
    if nbytes <= BOX_BYTES and (dst in channel.opened or channel.fastboxes.opens(dst)):
        box = channel.opened.get(dst)  # another thread may have shut it
        wire_tag = wire.wire_tag(tag, buffer.element.code)
        is_long = nbytes > SLOT_DATA_BYTES
        sent = None if box is None else put(channel, box, buffer.array().view("u1"), nbytes, wire_tag, is_long)
        if sent is not None:
            return sent
    memory = buffer.exporter
    if memory is None:
        memory = channel.transport.memory_of(buffer)
    if channel.flags[channel.world_ranks[dst]]:  # waking takes much longer than posting
        channel.ring(dst)
    return _post(channel, [memory, nbytes, channel.byte], dst, tag, buffer.element.code, buffer)


def send_frames(channel: Channel, frames: list[memoryview], dst: int, tag: int) -> Work[None]:
    """Post a pickle (frame 0) and its out-of-band buffers."""
    if dst == channel.rank:
        copies = [memoryview(bytearray(frame)) for frame in frames]
        incoming = Incoming(None, dst, tag, wire.OBJECT, sum(frame.nbytes for frame in frames))
        incoming.result = Message(decode(copies), dst, tag, 1, incoming.nbytes, None)
        return _deliver_to_self(channel, incoming)
    channel.addressed.add(dst)
    if sum(frame.nbytes for frame in frames) <= INLINE_OBJECT_BYTES:
        head = wire.pack_frames(frames, inline=True)
        return _post(channel, [head, len(head), channel.byte], dst, tag, wire.OBJECT, head)
    if frames[0].nbytes > wire.PACK_BYTES:
        frames = [memoryview(b""), *frames]
    head = wire.pack_frames(frames, inline=False)
    bodies = [as_buffer(_body(frames, indices)) for indices in wire.bodies([frame.nbytes for frame in frames])]
    return _send_pieces(channel, head, wire.OBJECT_IN_PIECES, bodies, dst, tag, frames)


def _body(frames: list[memoryview], indices: list[int]) -> memoryview | bytearray:
    """One frame from where it is, or several copied together."""
    return frames[indices[0]] if len(indices) == 1 else wire.pack_body([frames[index] for index in indices])


def _post(channel: Channel, spec: list[Any], dst: int, tag: int, code: int, lease: object) -> Work[None]:
    request = None
    try:
        request = channel.isend(spec, dst, wire.wire_tag(tag, code))
        return posted(channel, request, dst, tag, lease)
    except BaseException as error:
        if is_interruption(error):
            keep(channel, request, dst, tag, lease)
        raise


def posted(channel: Channel, request: Request, dst: int, tag: int, lease: object) -> Work[None]:
    """The Work of a posted message; its receiver is woken.

    Rung after the message is posted: a receiver that falls asleep meanwhile looks once more before it does, and
    one that is woken on this processor finds the message.
    """
    if dst in channel.opened:
        channel.fastboxes.shut(dst)
    engine = channel.engine
    if channel.flags[channel.world_ranks[dst]]:
        channel.ring(dst)
    if engine.doorbell.has_rung:
        engine.doorbell.give_way()
    if request.Test():
        engine.credit -= USUAL_CREDIT
        sent = Sent() if engine.credit > 0 else SentAndTurn()
        sent._channel = channel
        return sent
    return pending(channel, request, dst, tag, lease)


def keep(channel: Channel, request: Request | None, dst: int, tag: int, lease: object) -> None:
    """Go on with a message whose posting a signal's handler has interrupted: its memory is MPI's until it has gone.

    Args:
        request: None if the handler came before it had a name: whether MPI has the message is not known, and the
            memory is kept for good.
    """
    engine = channel.engine
    if dst in channel.opened:
        channel.fastboxes.shut(dst)
    if request is None:
        engine.wrecks.append(unlisted(channel, None, dst, tag, lease))
    elif not any(isinstance(work, Send) and work._request is request for work in list(engine.active)):
        pending(channel, request, dst, tag, lease)._abandon()


def _sent(channel: Channel) -> Sent:
    """A Work of its own for each message: a set of Works, or a dict of them, must not merge two."""
    work = Sent() if channel.engine.credit > 0 else SentAndTurn()
    work._channel = channel
    return work


def _send_to_self(channel: Channel, buffer: Buffer, tag: int) -> Work[None]:
    """A message to this rank is complete at once: it is copied into the inbox."""
    rank = channel.rank
    incoming = Incoming(None, rank, tag, buffer.element.code, buffer.nbytes)
    data = buffer.array().copy()
    incoming.result = Message(data, rank, tag, buffer.count, buffer.nbytes, buffer.element)
    return _deliver_to_self(channel, incoming)


def _deliver_to_self(channel: Channel, incoming: Incoming) -> Work[None]:
    channel.check_usable("send")
    engine = channel.engine
    engine.credit -= message_credit(incoming.nbytes)
    with engine.lock:
        channel.inbox.deliver(incoming)
    engine.flush()
    return _sent(channel)


def _send_pieces(
    channel: Channel, head: bytes | bytearray, code: int, bodies: list[Buffer], dst: int, tag: int, owner: object
) -> Work[None]:
    byte, lease = channel.byte, (head, bodies, owner)
    specs: list[list[Any]] = [[head, len(head), byte]]
    for body in bodies:
        octets = body.array().view("u1")
        start = 0
        for size in wire.piece_sizes(body.nbytes):
            specs.append([octets[start : start + size], size, byte])
            start += size
    tags = [wire.wire_tag(tag, code)] + [wire.wire_tag(tag, wire.PIECE)] * (len(specs) - 1)
    requests: list[Request] = []
    request = None
    try:
        with channel.engine.lock:  # another thread's pieces must not come in between
            # All or none: within one expression, and MPI's calls, no handler of a signal can raise.
            requests += map(channel.isend, specs, repeat(dst), tags)
        request = channel.transport.together(requests)
        return posted(channel, request, dst, tag, lease)
    except BaseException as error:
        if is_interruption(error) and requests:
            keep(channel, request or channel.transport.together(requests), dst, tag, lease)
        raise
