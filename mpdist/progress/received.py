"""Received: a receive of a small array that has met its message when it was posted, see `fastbox`.

To wait for a message otherwise takes some microseconds more, so that two ranks which answer
each other would both pay for it, each in its turn. So where the last one came while
somebody waited, the next receive looks for a moment before it is posted.
"""

from __future__ import annotations

from collections.abc import Generator
from struct import Struct
from typing import TYPE_CHECKING, Any

from mpdist.progress import wire
from mpdist.progress.fastbox import BOX_BYTES, READ_AT, SIZE_BITS, SLOTS
from mpdist.progress.fastbox_reader import ONCE, FastboxReader, incoming_of
from mpdist.progress.interruption import is_interruption
from mpdist.progress.message import Message
from mpdist.progress.work import Work

if TYPE_CHECKING:
    from numpy import ndarray

    from mpdist.memory import Element
    from mpdist.progress.inbox import Inbox

# What puts so many bytes into an array: less than half of the time of a view of it.
_WRITE = [Struct(f"{nbytes}s").pack_into for nbytes in range(BOX_BYTES + 1)]
_TAG_SHIFT = SIZE_BITS + wire.CODE_BITS
# Of the head of an entry, what a receive of any tag compares.
_ANY_TAG = ~(wire.MAX_TAG << _TAG_SHIFT)


class Received(Work[Message]):
    """One that was done when it was posted; who makes it sets the attributes."""

    __slots__ = ("_channel", "_result")

    op = "recv"
    _done = _looked_at = True

    def __await__(self) -> Generator[Any, None, Message]:
        return self._result
        yield


def receive_at_once(
    inbox: Inbox, x: ndarray[Any, Any], element: Element, nbytes: int, src: int, tag: int
) -> Received | None:
    """Receive a small array from a member with a fastbox, if nothing else waits and it comes while this looks."""
    reader = inbox.boxes[src]
    words = reader.words
    at = reader.place[0]
    number = reader.number
    for _ in reader.looks:
        if words[at] == number:
            break
    else:
        reader.looks = ONCE
        return None
    box = inbox.box
    engine = inbox.engine
    if box.messages or box.receives or engine.credit <= 0 or reader.fence is not None:
        return None
    work = Received()
    work._channel = inbox.channel
    work._result = message = Message(x, src, tag, nbytes // element.itemsize, nbytes, element)
    if not take(inbox, reader, number, message, element.code << SIZE_BITS | nbytes):
        return None
    engine.credit -= 1  # no call from here on
    return work


def take(inbox: Inbox, reader: FastboxReader, number: int, message: Message, head: int) -> bool:
    """Let the entry of this number be the message, whose array gets it; False if it is not what is wanted.

    Args:
        message: what is wanted; in the place of any source and any tag come those of the entry.
        head: of what is wanted, without its tag.
    """
    words = reader.words
    number_at, head_at, start = reader.place
    found = words[head_at]
    tag = message.tag
    is_wanted = found == head | tag << _TAG_SHIFT if tag >= 0 else not (found ^ head) & _ANY_TAG
    if not is_wanted or words[number_at] != number or reader.number != number:
        return False
    nbytes = message.nbytes
    data = reader.memory[start : start + nbytes]
    # No call since it was looked at, nor in these: no other thread has read it, and it is read as a whole.
    words[READ_AT] = number
    reader.number = number = number + 1
    reader.place = reader.places[number & SLOTS - 1]
    if tag < 0:
        message.tag = found >> _TAG_SHIFT
    message.src = reader.src
    try:
        _WRITE[nbytes](message.data, 0, data)
    except BaseException as error:  # of a signal's handler, or the array takes nothing: the next receive gets it
        incoming = incoming_of(reader.src, found, data)
        assert incoming is not None
        with inbox.engine.lock:
            inbox.deliver(incoming)
        if is_interruption(error):
            raise
        return False
    return True
