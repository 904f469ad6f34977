"""ArrayReceive: a receive into a NumPy array, the latency path.

While it waits alone, its await probes, compares and receives without anything
in between. Whatever is unusual (another message, other receives, a turn that is
due) goes the general way.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from mpdist.errors import UsageError
from mpdist.memory import Buffer, Element, as_buffer
from mpdist.progress import wire
from mpdist.progress.backoff import USUAL_CREDIT, message_credit
from mpdist.progress.fastbox import BOX_BYTES, CREDIT_BITS, SIZE_BITS
from mpdist.progress.message import Incoming, Message
from mpdist.progress.receive import EAGER_BYTES, Receive
from mpdist.progress.received import memory_of_long, take

if TYPE_CHECKING:
    from numpy import ndarray

    from mpdist.progress.fastbox_reader import FastboxReader
    from mpdist.progress.inbox import Inbox
    from mpdist.transport.requests import Request

# An array too long for boxes may get a small message: its receive looks once in so many probes, a mask of their number.
PROBES_BETWEEN = 7


class ArrayReceive(Receive):
    """A receive into a NumPy array of `_nbytes` bytes; `Inbox.receive_array` makes it, and sets the attributes."""

    _x: ndarray[Any, Any]
    _element: Element
    _nbytes: int

    # One for each message: slots are read and written at once where class defaults are searched for, and an __init__
    # in Python would double what an instance costs.
    __slots__ = (
        "_callbacks", "_channel", "_done", "_element", "_error", "_looked_at", "_nbytes", "_result", "_x",
        "order", "src", "tag",
    )  # fmt: skip
    __init__ = object.__init__

    @property
    def _buffer(self) -> Buffer:  # type: ignore[override]  # made only where the general way needs it
        return as_buffer(self._x, writable=True)

    def __await__(self) -> Generator[Any, None, Message]:
        if not self._done:
            engine = self._channel.engine
            if self._channel.inbox.box.sole is self and engine.credit > 0:
                try:
                    with engine.lock:
                        inbox = self._channel.inbox
                        was_in_hand, inbox.is_in_hand = inbox.is_in_hand, True
                        try:
                            self._meet()
                        finally:
                            inbox.is_in_hand = was_in_hand
                    if engine.finished or self._callbacks is not None:
                        self._announce()
                except BaseException:  # of a signal's handler
                    self._take_back()
                    self._abandon()
                    raise
            if not self._done:
                try:
                    return (yield from super().__await__())
                except BaseException as error:
                    if not isinstance(error, UsageError):  # of a second loop, see Work
                        self._abandon()
                    raise
        self._looked_at = True
        if self._error is not None:
            raise self._seen_error()
        return self._result

    def _forget_memory(self) -> None:
        del self._x

    def _take_back(self) -> None:
        """Nobody has looked at what the latency path has received."""
        if self._looked_at and self._error is None:
            self._looked_at = False
            self._matched()

    def _meet(self) -> None:
        """Wait a while for its message, and receive it: it is done then, looked at, and nobody is called back.

        Under the Engine's lock; the turn has credit.
        """
        channel = self._channel
        engine = channel.engine
        inbox = channel.inbox
        box = inbox.box
        if box.sole is not self:  # another thread may have driven
            return
        src = self.src
        tag = self.tag
        nbytes = self._nbytes
        element = self._element
        want = element.code
        mask = wire.CODE_MASK
        if tag >= 0:
            want |= tag << wire.CODE_BITS
            mask = -1
        memory = [self._x, nbytes, channel.byte]
        words, source_at, tag_at, nbytes_at = inbox.envelope
        # Made while the message is still under way; where it came from may be filled in.
        self._result = message = Message(self._x, src, tag, nbytes // element.itemsize, nbytes, element)
        handle = request = None
        is_met = False
        try:
            left = len(engine.quick_polls)
            between = 0
            if nbytes > BOX_BYTES:
                between = PROBES_BETWEEN
            elif inbox.readers and not engine.active and self._meet_small(inbox):
                return
            for handle in inbox.probed_for:
                if handle is None:
                    left -= 1
                    if left <= 0:
                        break
                    if inbox.readers and not left & between and self._meet_small(inbox):
                        break
                    continue
                inbox.untaken = handle
                wire_tag = words[tag_at]
                source = words[source_at]
                is_mine = wire_tag & mask == want and (source == src or src < 0) and words[nbytes_at] == nbytes
                if is_mine and not (inbox.boxes and inbox.comes_later(source)):
                    is_met = True
                    box.sole = None
                    box.receives = self.order = 0
                    if mask > 0 or src < 0:
                        message.src = source
                        message.tag = wire_tag >> wire.CODE_BITS
                    if nbytes <= EAGER_BYTES:
                        handle.Recv(memory)
                        self._done = self._looked_at = True
                        engine.credit -= USUAL_CREDIT
                    else:
                        for request in map(handle.Irecv, (memory,)):  # a name at once, as for the message
                            self._land(request, source)
                    break
                inbox.arrived(handle)
                left -= 1
                if box.sole is not self or left <= 0:
                    break
        except inbox.failure as error:
            self._broke(error)
        except BaseException:  # of a signal's handler
            if handle is not None and inbox.untaken is handle:
                if is_met:
                    self._go_on(handle, request)
                else:
                    inbox.arrived(handle)
            raise

    def accept_entry(self, reader: FastboxReader) -> bool:
        inbox = self._channel.inbox
        nbytes = self._nbytes
        if inbox.box.sole is not self or nbytes > BOX_BYTES or (self.src != reader.src and self.src >= 0):
            return False  # a signal's handler may have withdrawn it
        number = reader.number
        if reader.words[reader.place[0]] != number:  # it may have received the entry, too
            return False
        message = Message(self._x, self.src, self.tag, nbytes // self._element.itemsize, nbytes, self._element)
        order = -inbox.box.next_order()
        head = self._element.code << SIZE_BITS | nbytes
        if not take(inbox, reader, number, message, head, memory_of_long(message.data, self._element), self, order):
            return False
        # No call between these.
        self._result = message
        self._done = True
        if self._callbacks is not None:
            inbox.engine.finished += (self,)
        return True

    def _meet_small(self, inbox: Inbox) -> bool:
        """Look for a moment into the fastboxes; whether that is the end of its looking, for whatever reason."""
        src = self.src
        if src < 0:
            found = inbox.next_reader()
            if found is None:
                return False
            reader = found
            number = reader.number
            if reader.words[reader.place[0]] != number:  # a signal's handler has received it
                return False
        elif src not in inbox.boxes:
            return False
        else:
            reader = inbox.boxes[src]
            words = reader.words
            at = reader.place[0]
            number = reader.number
            if words[at] != number:
                for _ in inbox.looks:
                    if words[at] == number:
                        break
                else:
                    return False
                reader.looks = inbox.looks_at_once
            else:  # a few more looks had done
                reader.rest -= 1
                if reader.rest <= 0:
                    reader.looks = inbox.looks_at_once
        nbytes = self._nbytes
        head = self._element.code << SIZE_BITS | nbytes
        message = self._result
        if nbytes <= BOX_BYTES and take(
            inbox, reader, number, message, head, memory_of_long(message.data, self._element), self
        ):
            # No call between these.
            self._done = self._looked_at = True
            inbox.engine.credit -= 1 + (nbytes >> CREDIT_BITS)
            return True
        if reader.has_one():
            inbox.read(reader)
        return inbox.box.sole is not self

    def _go_on(self, handle: Any, request: Request | None) -> None:
        """Be as if the general way had met this message, where the latency path was interrupted with it."""
        inbox = self._channel.inbox
        box = inbox.box
        if self._done or self._incoming is not None:
            return
        if request is not None:
            self._wait_for(request)
        elif not handle:  # received
            self._done = self._looked_at = True
        else:
            box.sole, box.receives, self.order = self, 1, 1
            inbox.arrived(handle)

    def _land(self, request: Request, source: int) -> None:
        """Let MPI write a message that may still be with its sender."""
        channel = self._channel
        engine = channel.engine
        engine.credit -= message_credit(self._nbytes)
        test = request.Test
        for _ in engine.quick_polls:
            if test():
                self._done = self._looked_at = True
                channel.ring(source)  # its send is complete now
                return
        self._wait_for(request)

    def _wait_for(self, request: Request) -> None:
        incoming = self._matched()
        incoming.request = request
        self._room = self._buffer
        self._steps = self._program(incoming)
        self._channel.engine.active.append(self)

    def _matched(self) -> Incoming:
        """The message that it has met, as if the mailbox had matched it: it can be given back."""
        self.order = -self._channel.inbox.box.next_order()
        message = self._result
        self._incoming = incoming = Incoming(None, message.src, message.tag, self._element.code, self._nbytes)
        return incoming

    def _give_back(self, message: Message) -> None:
        if self._incoming is None:  # it was an entry
            self._incoming = Incoming(None, message.src, message.tag, self._element.code, self._nbytes)
        super()._give_back(message)

    def _announce(self) -> None:
        engine = self._channel.engine
        self._looked_at = self._done
        if self._done and self._callbacks is not None and self not in engine.finished:
            engine.finished.append(self)
        engine.flush()
