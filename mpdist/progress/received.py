"""Received: a receive of a small array that has met its message when it was posted, see `fastbox`.

To wait for a message otherwise takes some microseconds more, so that two ranks which answer
each other would both pay for it, each in its turn. So where the last one came while
somebody waited, the next receive looks for a moment before it is posted.
"""

from __future__ import annotations

from collections.abc import Generator
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.memory import BY_DTYPE
from mpdist.progress.fastbox import BOX_BYTES, CREDIT_BITS, READ_AT, SIZE_BITS, SLOT_DATA_BYTES, SLOTS
from mpdist.progress.fastbox_reader import NO_READER, FastboxReader, incoming_of
from mpdist.progress.interruption import is_interruption
from mpdist.progress.message import Incoming, Message
from mpdist.progress.transfer import kept
from mpdist.progress.unbegun import Wrapped
from mpdist.progress.wire import CODE_BITS

if TYPE_CHECKING:
    from numpy import ndarray

    from mpdist.memory import Element
    from mpdist.progress.inbox import Inbox
    from mpdist.progress.receive import Receive

# What puts so many bytes into an array: less than half of the time of a view of it.
_WRITE = [Struct(f"{nbytes}s").pack_into for nbytes in range(SLOT_DATA_BYTES + 1)]
_TAG_SHIFT = SIZE_BITS + CODE_BITS
# A slice of its own could start the collection of garbage, and so whatever its finalizers call.
_ALL = slice(None)
# Of the head of an entry, what a receive of any tag compares.
_ANY_TAG = (1 << _TAG_SHIFT) - 1


class Received(Wrapped[Message]):
    """One that was done when it was posted; who makes it sets the attributes.

    Attributes:
        order: the place of its message in the mailbox, should nobody come for it.
    """

    __slots__ = ("_channel", "_error", "_looked_at", "_result", "order")

    order: int
    op = "recv"
    _done = True

    def __await__(self) -> Generator[Any, None, Message]:
        self._looked_at = True
        if self._error is not None:
            raise self._seen_error()
        return self._result
        yield

    def _abandon(self) -> None:
        """The task that was to await it was cancelled before: the next receive gets the message."""
        with self._channel.engine.lock:
            if not (self._looked_at or self._cancelled):
                give_back(self._channel.inbox, self._result, self.order)
                self._withdraw()
        self._channel.hand_out()

    def details(self) -> str:
        return f"from {self._result.src}, tag {self._result.tag}"


def receive_at_once(inbox: Inbox, x: ndarray[Any, Any], src: int, tag: int) -> Received | None:
    """Receive a small array from a member with a fastbox, if nothing else waits and it comes while this looks.

    Args:
        x: where it cannot be received into, it is not.
        tag: mailbox.ANY for any.
    """
    element = BY_DTYPE.get(x.dtype)
    nbytes = x.nbytes
    engine = inbox.engine
    # What is pending goes on only where MPI is called, as waiting for a message does.
    if element is None or nbytes > BOX_BYTES or not x.flags.carray or engine.active or engine.credit <= 0:
        return None
    reader = inbox.boxes.get(src, NO_READER)  # another thread may have found that it was closed
    # Of one entry: with no call between them. Where a signal's handler or another thread receives it, `take` finds out.
    words = reader.words
    at = reader.place[0]
    number = reader.number
    # Made while the message is still under way.
    work = Received()
    work._channel = inbox.channel
    work._looked_at = False
    work._error = None
    work._result = message = Message(x, src, tag, nbytes // element.itemsize, nbytes, element)
    work.order = inbox.box.next_order()
    into = memory_of_long(x, element)
    head = element.code << SIZE_BITS | nbytes
    if into is not None and words[at] != number:
        box = inbox.channel.opened.get(src)
        if box is not None:
            box.make_ready(words, at, number)
    for _ in reader.looks:
        if words[at] == number:
            break
    else:
        reader.look_less()
        return None
    if not take(inbox, reader, number, message, head, into):
        return None
    engine.credit -= 1 + (nbytes >> CREDIT_BITS)
    return work


def memory_of_long(x: ndarray[Any, Any], element: Element) -> memoryview | None:
    """The memory of a contiguous array whose data do not lie in a slot; None for others."""
    if x.nbytes <= SLOT_DATA_BYTES:
        return None
    if element.kind == "complex":  # of which Python knows no format
        x = x.reshape(-1).view(np.uint8)
    return memoryview(x).cast("B")  # type: ignore[arg-type]  # NumPy's stub


def give_back(inbox: Inbox, message: Message, order: int) -> None:
    """Nobody has got it: the next receive does, in the old order."""
    assert message.element is not None
    incoming = Incoming(None, message.src, message.tag, message.element.code, message.nbytes)
    incoming.result = kept(message)
    incoming.order = -order
    with inbox.engine.lock:
        inbox.give_back(incoming)


def take(
    inbox: Inbox,
    reader: FastboxReader,
    number: int,
    message: Message,
    head: int,
    into: memoryview | None,
    sole: Receive | None = None,
    order: int = 0,
) -> bool:
    """Let an entry be the message, whose array gets it; False if it is not what is wanted, or no more the next one.

    Under the Engine's lock where a receive waits. Where none does, the lock is not taken, which costs a tenth of the
    way there and back: whether somebody else has got it, waits, or has a message in hand is seen, with no call in
    between, before it is taken.

    Args:
        number: of the entry, which is there.
        message: what is wanted; in the place of any source and any tag come those of the entry.
        head: of what is wanted, without its tag.
        into: the memory of its array, where the data do not lie in the slot, see `memory_of_long`.
        sole: the receive that wants it, which waits alone, and no more when it is met; None: none waits.
        order: what that gets for its place.
    """
    if reader.fence is not None:
        reader.fence()
    words = reader.words
    _, head_at, start = reader.place
    found = words[head_at]
    tag = message.tag
    if (found != head | tag << _TAG_SHIFT) if tag >= 0 else (found ^ head) & _ANY_TAG:
        return False
    nbytes = message.nbytes
    data: bytes | memoryview
    if into is None:
        data = reader.memory[start : start + nbytes]
    elif into.readonly:  # by now; the general way says so
        return False
    else:
        data = reader.long_data(words[head_at + 1], nbytes)
    if reader.fence is not None:
        data = bytes(data)
        reader.fence()
    box = inbox.box
    if reader.number != number or box.sole is not sole:  # a signal's handler has received it, posted or withdrawn one
        return False
    if sole is None and (box.receives or box.messages or inbox.is_in_hand or inbox.unread is not None):
        return False  # likewise, or another thread has
    # No call in these: it is read as a whole, whatever handler comes.
    if into is not None:
        into[_ALL] = data
    words[READ_AT] = number
    reader.number = number = number + 1
    reader.place = reader.places[number & SLOTS - 1]
    if tag < 0:
        message.tag = found >> _TAG_SHIFT
    message.src = reader.src
    if sole is not None:
        box.sole = None
        box.receives = 0
        sole.order = order
    if into is not None:
        return True
    try:
        _WRITE[nbytes](message.data, 0, data)
    except BaseException as error:  # of a signal's handler, or the array takes nothing: the next receive gets it
        incoming = incoming_of(reader.src, found, data)
        assert incoming is not None
        with inbox.engine.lock:
            if sole is None or not sole.accept(incoming):
                inbox.deliver(incoming)
        if is_interruption(error):
            raise
        return False
    return True
