"""DeviceReceive: a receive into an array on a device, which hears how its data come when it meets the message.

The type and the size are checked as ever, and nothing writes before the program's stream
has come to the call. Data that the sender shows are taken from its device; others are
written by MPI, where it may be given the array. The rest goes through host memory: what
MPI may not be given, a message in pieces, one of this rank to itself, and one whose
first receive was cancelled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mpdist.errors import CommunicationError, DeviceFailed, UnsupportedBuffer
from mpdist.memory import Buffer
from mpdist.memory.accelerator import Accelerator
from mpdist.memory.mark import Mark
from mpdist.progress.marks import Attended, copied
from mpdist.progress.message import Incoming, Message
from mpdist.progress.receive import Receive
from mpdist.progress.shown.showing import may_show, showing_of
from mpdist.progress.shown.taking import take_to_device
from mpdist.progress.transfer import NoRoom, Octets, Transfer, transfer

if TYPE_CHECKING:
    from mpdist.memory.elements import Array
    from mpdist.progress.channel import Channel


class DeviceReceive(Receive):
    """A receive into a Buffer on a device."""

    is_repeatable = False
    _buffer: Buffer

    def __init__(
        self,
        channel: Channel,
        x: Buffer,
        src: int,
        tag: int,
        accelerator: Accelerator,
        host: Callable[[], Buffer],
        is_given: bool,
    ) -> None:
        """Take the device, what gives host memory for such an array, and whether MPI may be given it."""
        super().__init__(channel, x, src, tag)
        self._accelerator = accelerator
        self._host = host
        self._is_given = is_given
        self._ready: Mark = accelerator.ready(x)

    def _poll(self) -> bool:
        """While this one's data are copied, the copies of others can be queued behind it."""
        if super()._poll():
            return True
        inbox = self._channel.inbox
        if self.order <= 0 and inbox.box.receives and inbox.poll():
            inbox.engine.has_advanced = True
        return False

    def accept(self, incoming: Incoming) -> bool:
        try:
            self._check(incoming)
        except (CommunicationError, UnsupportedBuffer) as error:
            self._fail(error)
            return False
        self._incoming = incoming
        return self._start_transfer(incoming)

    def _program(self, incoming: Incoming) -> Transfer:
        try:
            yield from copied([self._ready])
        except DeviceFailed as error:
            raise NoRoom(str(error)) from error
        channel, x = self._channel, self._buffer
        if incoming.result is not None:
            return (yield from self._through_host(incoming))
        if incoming.shown is not None:
            yield from take_to_device(incoming.shown, x)
            return self._message(incoming)
        if incoming.parts is None and self._is_given:
            channel.engine.attend(self._accelerator)
            memory = [channel.transport.memory_of(x), incoming.nbytes, channel.byte]
            yield Attended(incoming.handle.Irecv(memory), self._accelerator)
            return self._message(incoming)
        message = yield from self._through_host(incoming)
        if may_show(channel, incoming.nbytes):
            showing_of(channel, x.device).judge(incoming.src, x.device)
        return message

    def _message(self, incoming: Incoming) -> Message:
        x = self._buffer
        count = incoming.nbytes // x.element.itemsize
        return Message(x.owner, incoming.src, incoming.tag, count, incoming.nbytes, x.element)

    def _through_host(self, incoming: Incoming) -> Transfer:
        channel, x = self._channel, self._buffer
        try:
            room = self._host()
            octets = _octets(room.array())  # lent here, where a lack of memory is told
        except MemoryError as error:
            raise NoRoom(f"{type(error).__name__}: {error}") from error
        came = yield from transfer(channel, incoming, room)
        yield from copied([self._accelerator.copy_in(octets[: came.nbytes], x, 0)])
        return Message(x.owner, came.src, came.tag, came.count, came.nbytes, x.element)

    def _keep(self, incoming: Incoming, message: Message) -> bool:
        """Let the next receive have what came: from a copy on the host."""
        x = self._buffer
        data = np.empty(message.count, x.element.storage)
        try:
            self._accelerator.copy_out(x, 0, _octets(data)).wait()
        except DeviceFailed as error:
            self._lose(str(error))
            return False
        message = Message(data, message.src, message.tag, message.count, message.nbytes, message.element)
        return super()._keep(incoming, message)


def _octets(values: Array) -> Octets:
    return values.view(np.uint8)
