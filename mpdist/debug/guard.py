"""Guard: in debug mode, operations take leases on their memory.

A send is watched through its request, a receive through its Work, a collective
through its steps.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mpdist.algorithms.uneven import Parcel
from mpdist.debug.leases import Leases, Span, changed, checksum
from mpdist.debug.lines import caller
from mpdist.memory import Buffer, Element, as_buffer, overlap
from mpdist.progress import wire
from mpdist.progress.inbox import Inbox
from mpdist.progress.receive import Receive

if TYPE_CHECKING:
    from numpy import ndarray

    from mpdist.progress.channel import Channel
    from mpdist.progress.collective import Steps
    from mpdist.transport.requests import Request

R = TypeVar("R", bound=Receive)

leases = Leases()


def guard(channel: Channel) -> None:
    """Let the operations of a channel take leases."""
    post = channel.isend

    def isend(spec: list[Any], dst: int, wire_tag: int) -> Request:
        buffer = as_buffer(spec[0])
        leases.check(f"send on {channel.where()}", [Span.of(buffer, writes=False)])
        return GuardedSend(post(spec, dst, wire_tag), channel, buffer, dst, wire_tag)

    channel.isend = isend
    channel.inbox.__class__ = GuardedInbox


class GuardedSend:
    """The request of a message: a lease on what it reads."""

    def __init__(self, request: Request, channel: Channel, buffer: Buffer, dst: int, wire_tag: int) -> None:
        self._request = request
        self._buffer = buffer
        self._is_done = request.Test()
        if self._is_done:
            return
        self._text = f"send to {dst}, tag {wire_tag >> wire.CODE_BITS} on {channel.where()}, called at {caller()}"
        self._checksum = checksum([buffer])
        leases.take(self._text, [Span.of(buffer, writes=False)], lambda: self._is_done)

    def Test(self) -> bool:
        """Whether it is complete.

        Raises:
            UsageError: and the buffer has changed meanwhile.
        """
        if self._is_done:
            return True
        self._is_done = self._request.Test()
        if self._is_done and checksum([self._buffer]) != self._checksum:
            raise changed(self._text)
        return self._is_done


class GuardedInbox(Inbox):
    """The inbox of a channel whose receives take leases."""

    def receive(self, receive: R) -> R:
        buffer = receive._buffer
        spans = [] if buffer is None else [Span.of(buffer, writes=True)]
        leases.check(f"{receive.op} on {self.channel.where()}", spans)
        text = f"{receive.describe()}, called at {caller()}"
        super().receive(receive)
        if spans and not receive._done:
            leases.take(text, spans, lambda: receive._done)
        return receive

    def receive_array(self, x: ndarray[Any, Any], element: Element, nbytes: int, src: int, tag: int) -> Any:
        return self.receive(Receive(self.channel, as_buffer(x, writable=True), src, tag))


def guarded(channel: Channel, op: str, steps: Steps[Any], arguments: Sequence[object]) -> Steps[Any]:
    """The steps of a collective, which hold a lease on its buffers.

    Raises:
        UsageError: a buffer belongs to another operation; in the collective's Work: an input has changed.
    """
    inputs, outputs = _buffers(channel, op, arguments)
    text = f"{op} #{channel.sequence + 1} on {channel.where()}, called at {caller()}"
    spans = [Span.of(each, writes=False) for each in inputs] + [Span.of(each, writes=True) for each in outputs]
    leases.check(f"{op} on {channel.where()}", spans)
    watched = _watched(steps, inputs, checksum(inputs), text)
    ref = weakref.ref(watched)  # it may be dropped before it begins
    leases.take(text, spans, lambda: _is_over(ref()))
    return watched


def _watched(steps: Steps[Any], inputs: list[Buffer], before: int, text: str) -> Steps[Any]:
    result = yield from steps
    if checksum(inputs) != before:
        raise changed(text)
    return result


def _is_over(steps: Steps[Any] | None) -> bool:
    return steps is None or inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED


def _buffers(channel: Channel, op: str, arguments: Sequence[object]) -> tuple[list[Buffer], list[Buffer]]:
    """What a collective reads, and what it writes. Its input comes first, as in all operations."""
    own = _plain(arguments, channel)
    while own and own[0] is not None and not any(True for _ in _found(own[0])):  # what it is done by
        own = own[1:]
    first, *others = own or [None]
    if op == "broadcast" and channel.rank not in others:
        first, others = None, [first, *others]
    outputs = [each for other in others for each in _found(other) if not each.readonly]
    inputs = [each for each in _found(first) if not any(overlap(each, output) for output in outputs)]  # not in place
    return inputs, outputs


def _plain(arguments: Sequence[object], channel: Channel) -> list[object]:
    """The operation's own arguments; a single call of MPI comes with function, arguments and result."""
    own = [each for each in arguments if each is not channel]
    if len(own) < 2 or not callable(own[0]):
        return own
    return list(own[1]) if isinstance(own[1], tuple) else own[1:]  # without what hands even blocks out


def _found(argument: object) -> Iterator[Buffer]:
    """The buffers in an argument, not within a user's object, which may hold itself."""
    blocks = argument.blocks if isinstance(argument, Parcel) else argument
    if isinstance(blocks, Buffer):
        yield blocks
    elif isinstance(blocks, list | tuple):
        yield from (each for each in blocks if isinstance(each, Buffer))
