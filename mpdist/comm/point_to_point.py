"""Point to point: a message from one rank to another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from numpy import may_share_memory, ndarray

from mpdist.comm.operation import Operations, operation
from mpdist.comm.staged_messages import receive_on_device, send_from_device
from mpdist.comm.wildcards import ANY_SOURCE, ANY_TAG, Source, Tag
from mpdist.errors import ClosedError, UsageError
from mpdist.memory import BY_DTYPE, HOST, as_buffer, overlap
from mpdist.progress.fastbox import BOX_BYTES, SLOT_DATA_BYTES, put
from mpdist.progress.interruption import is_interruption
from mpdist.progress.mailbox import ANY
from mpdist.progress.pickling import encode
from mpdist.progress.receive import Probe, Receive, ReceiveEither, ReceiveObject
from mpdist.progress.sending import keep, posted, send, send_frames
from mpdist.progress.sendrecv import SendReceive
from mpdist.progress.wire import CODE_BITS, PIECE_BYTES

if TYPE_CHECKING:
    from mpdist.progress.message import Message, ProbedMessage
    from mpdist.progress.work import Work


class PointToPoint(Operations):
    """Messages between two ranks."""

    allow_pickle: bool

    def send(self, x: object, dst: int, tag: int = 0) -> Work[None]:
        """Send an array to rank `dst`.

        Args:
            x: contiguous array of any library, of any size.
            tag: 0 to 2**20 - 1.

        Returns:
            A Work of None. Until it is done, `x` must not change.

        Raises:
            UnsupportedBuffer: strided, Fortran-ordered, or of a type that cannot be sent.
            InvalidRank: no such rank.
        """
        # The latency path: what the general one does, without a Buffer. What is wrong raises before anything is posted,
        # a strided array in mpi4py; then the general one says what. The first message to a member goes there too, where
        # the member is noted.
        if type(x) is not ndarray or type(dst) is not int or (x.ndim != 1 and not x.flags.c_contiguous):
            return self._send(x, dst, tag)
        channel = self._channel
        box = channel.opened.get(dst)
        nbytes = x.nbytes
        if box is not None and tag is box.tag and x.dtype is box.dtype and nbytes <= BOX_BYTES:
            wire_tag = box.wire_tag
        elif (
            type(tag) is not int
            or dst not in channel.addressed
            or not 0 <= tag <= channel.max_tag
            or nbytes > PIECE_BYTES
            or (element := BY_DTYPE.get(x.dtype)) is None
        ):
            return self._send(x, dst, tag)
        else:
            wire_tag = tag << CODE_BITS | element.code
            if box is not None:
                box.tag, box.dtype, box.wire_tag = tag, x.dtype, wire_tag
        request = None
        try:
            if nbytes <= BOX_BYTES:
                if box is not None:
                    sent = put(channel, box, x, nbytes, wire_tag, nbytes > SLOT_DATA_BYTES)
                    if sent is not None:
                        return sent
                elif channel.fastboxes.opens(dst):
                    return self._send(x, dst, tag)
            request = channel.isend([x, nbytes, channel.byte], dst, wire_tag)
            return posted(channel, request, dst, tag, x)
        except BaseException as error:
            if is_interruption(error):
                keep(channel, request, dst, tag, x)
                raise
            if not isinstance(error, (BufferError, ValueError)):
                raise
        return self._send(x, dst, tag)

    def _send(self, x: object, dst: int, tag: int) -> Work[None]:
        try:
            buffer, dst, tag = as_buffer(x), self._rank(dst, "dst"), self._tag(tag)
            if buffer.device is not HOST:
                return send_from_device(self._channel, buffer, dst, tag)
            return send(self._channel, buffer, dst, tag)
        except UsageError as error:
            raise self._explained("send", error) from error.__cause__

    def recv(self, x: object = None, src: Source = ANY_SOURCE, tag: Tag = ANY_TAG) -> Work[Message]:
        """Receive an array.

        Args:
            x: writable contiguous array of the sent element type, at least as large as the message;
                missing: a new NumPy array.
            src: rank it comes from.
            tag: its tag.

        Returns:
            A Work of the Message; `message.data` is the array, `message.count` the number of elements received.
            A message that does not fit fails the Work (MessageTruncated, UnsupportedBuffer) and stays queued, as does
            one for which there is no memory (CommunicationError).
            Cancelling its await loses no message: the next receive that matches gets it. A message that was already
            on its way into `x` goes on, so `x` is still written after the cancellation, until that next receive is
            done: it gets a copy of the data; give it memory of its own, not `x`. `work.cancel()` is False then.

        Raises:
            UnsupportedBuffer: `x` is read-only, strided, or of a type that cannot be received.
            InvalidRank: no such rank.
        """
        inbox = self._channel.inbox
        # The latency path, as in send.
        if type(x) is ndarray and type(src) is int and src in inbox.boxes:
            if tag is ANY_TAG:
                received = inbox.receive_at_once(x, src, ANY)
            else:
                received = inbox.receive_at_once(x, src, tag) if type(tag) is int and tag >= 0 else None
            if received is not None:
                return received
        return self._post_receive(x, src, tag)

    def _post_receive(self, x: object, src: Source, tag: Tag) -> Work[Message]:
        """Post a receive, whether its message is there already or not."""
        channel = self._channel
        if (
            type(x) is ndarray
            and (element := BY_DTYPE.get(x.dtype)) is not None
            and (src is ANY_SOURCE or (type(src) is int and 0 <= src < self.size))
            and (tag is ANY_TAG or (type(tag) is int and 0 <= tag <= channel.max_tag))
            and (nbytes := x.nbytes) <= PIECE_BYTES
            and x.flags.carray
        ):  # the latency path, as in send
            return channel.inbox.receive_array(
                x, element, nbytes, ANY if src is ANY_SOURCE else src, ANY if tag is ANY_TAG else tag
            )
        try:
            buffer = None if x is None else as_buffer(x, writable=True)
            if buffer is not None and buffer.device is not HOST:
                return receive_on_device(channel, buffer, *self._pattern(src, tag))
            return channel.inbox.receive(Receive(channel, buffer, *self._pattern(src, tag)))
        except UsageError as error:
            if type(x) is int:  # as probe() and recv_object() have it
                meant = f"src={x}" if src is ANY_SOURCE else f"src={x}, tag={src}"
                error = type(error)(f"{error}. Did you mean recv({meant})?")
            raise self._explained("recv", error) from error.__cause__

    def sendrecv(
        self, x: object, dst: int, out: object = None, src: Source | None = None, tag: int = 0
    ) -> Work[Message]:
        """Send `x` to `dst` and receive from `src`, by default `dst`, with the same tag; neither waits for the other.

        Args:
            out: as `x` of recv; it must not overlap `x`.

        Returns:
            A Work of the received Message, done when both are.
        """
        try:
            dst, tag = self._rank(dst, "dst"), self._tag(tag)
            _check_apart(x, out)
            # Not met at once: the other may wait for what is sent here, and a cancelled await gives the message back.
            receive = self._post_receive(out, dst if src is None else src, tag)
            try:
                return SendReceive(receive, self.send(x, dst, tag))
            except BaseException:  # a receive that nobody knows would take a message
                receive._abandon()
                raise
        except UsageError as error:
            raise self._explained("sendrecv", error) from error.__cause__
        except ClosedError as error:
            raise self._channel.unusable("sendrecv") from error.__cause__

    @operation
    def probe(self, src: Source = ANY_SOURCE, tag: Tag = ANY_TAG) -> Work[ProbedMessage]:
        """Match a message without receiving it.

        Returns:
            A Work of a Message without data. `message.recv(x=None)` receives it; no other receive gets it.
        """
        probe = Probe(self._channel, *self._pattern(src, tag), receive_on_device)
        return self._channel.inbox.receive(probe)  # type: ignore[return-value]  # a probe's Message is a ProbedMessage

    def _pattern(self, src: Source, tag: Tag) -> tuple[int, int]:
        return (
            ANY if src is ANY_SOURCE else self._rank(src, "src"),
            ANY if tag is ANY_TAG else self._tag(tag),
        )

    @operation
    def send_object(self, item: object, dst: int, tag: int = 0) -> Work[None]:
        """Send anything that pickles; arrays in it travel without copy, and must not change until it is done."""
        self._check_pickle()
        self._channel.check_usable("send_object")
        return send_frames(self._channel, encode(item), self._rank(dst, "dst"), self._tag(tag))

    @operation
    def recv_object(self, src: Source = ANY_SOURCE, tag: Tag = ANY_TAG) -> Work[Message]:
        """Receive an object; `message.data` is it."""
        self._check_pickle()
        return self._channel.inbox.receive(ReceiveObject(self._channel, None, *self._pattern(src, tag)))

    async def messages(self, src: Source = ANY_SOURCE, tag: Tag = ANY_TAG) -> AsyncIterator[Message]:
        """Messages as they come, arrays and objects, until the communicator is closed.

        `async for message in comm.messages(tag=3): ...`
        """
        pattern = self._pattern(src, tag)
        kind = ReceiveEither if self.allow_pickle else Receive
        while True:
            receive = kind(self._channel, None, *pattern)
            receive.is_listener = True
            try:
                message = await self._channel.inbox.receive(receive)
            except ClosedError:
                if not (self._channel.is_closed or self._channel.is_ending):
                    raise
                return
            yield message

    def _check_pickle(self) -> None:
        if not self.allow_pickle:
            raise UsageError(
                "objects are refused, because MPDIST_ALLOW_PICKLE=0: unpickling runs code that the sender chose; "
                "send arrays, or set MPDIST_ALLOW_PICKLE=1"
            )


def _check_apart(x: object, out: object) -> None:
    """Raise unless `x` can be sent, and `out`, if given, be received into, beside it.

    Raises:
        UnsupportedBuffer: one of them can't.
        UsageError: they overlap.
    """
    if type(x) is ndarray and x.dtype in BY_DTYPE and x.flags.c_contiguous:  # the latency path: without a Buffer
        if out is None:
            return
        # Of contiguous arrays it compares the bounds, as `overlap` does.
        if type(out) is ndarray and out.dtype in BY_DTYPE and out.flags.carray and not may_share_memory(x, out):
            return
    source = as_buffer(x)
    if out is not None and overlap(source, as_buffer(out, writable=True)):
        raise UsageError("x and out overlap in memory; give out memory of its own")
