"""FastboxReader: the receiver's side of a fastbox, see `fastbox`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpdist.memory import BY_CODE
from mpdist.progress import wire
from mpdist.progress.fastbox import (
    BOX_BYTES,
    PAGE_BYTES,
    READ_AT,
    SIZE_BITS,
    SLOT_DATA_BYTES,
    SLOTS,
    places,
)
from mpdist.progress.message import Incoming, Message

if TYPE_CHECKING:
    from collections.abc import Callable
    from mmap import mmap

    from mpdist.progress.inbox import Inbox
    from mpdist.transport.neighbours import Neighbours

ONCE = range(1)

# Looking on is worth its time where more than so many come for each that does not come in time.
WORTH = 4
PAUSE_AT_MOST = 64

_SIZE_MASK = (1 << SIZE_BITS) - 1


class FastboxReader:
    """What its receiver knows of one. Under the Engine's lock, but for `received.take`.

    Attributes:
        src: whose it is.
        number: of the next entry; one of a later epoch has another.
        place: of its slot.
        looks: as often is looked for the next one by who asks for it, before its receive is posted.
        rest: so many must have come between a receive's posting and its await before more looks are tried again.
        stretches: where data lay that are too long for a slot, by their offsets.
    """

    __slots__ = (
        "_missed", "_pause", "fence", "looks", "memory", "number", "place", "places", "rest", "src", "stretches",
        "words",
    )  # fmt: skip

    memory: mmap
    stretches: dict[int, memoryview]
    fence: Callable[[], object] | None

    def __init__(self, src: int, words: memoryview[int], offset: int) -> None:
        self.src = src
        self.words = words
        self.places = places(offset)
        self.number = 1
        self.place = self.places[1]
        self.looks = ONCE
        self.rest = self._pause = 1
        self._missed = 0

    def look_less(self) -> None:
        """Who asked for the next one has looked in vain; where little came since the last time, rest twice as long."""
        if self.looks is not ONCE:
            self._pause = 1 if self.number - self._missed > WORTH else min(2 * self._pause, PAUSE_AT_MOST)
            self._missed = self.number
            self.rest = self._pause
            self.looks = ONCE

    def has_one(self) -> bool:
        """Whether there is an entry that may be read."""
        return self.words[self.place[0]] == self.number

    def long_data(self, offset: int, nbytes: int) -> memoryview:
        """Those that do not lie in a slot."""
        stretch = self.stretches.get(offset)
        if stretch is None:
            self.stretches[offset] = stretch = memoryview(self.memory)[offset : offset + BOX_BYTES]
        return stretch[:nbytes]

    def pass_on(self, inbox: Inbox) -> Incoming | None:
        """Read the entry that is there; None if its sender could not fill it, or a signal's handler has received it.

        From here on its message is in the inbox's hands, whatever handler comes.
        """
        number = self.number
        if self.fence is not None:
            self.fence()
        _, head_at, start = self.place
        head = self.words[head_at]
        nbytes = head & _SIZE_MASK
        is_long = nbytes > SLOT_DATA_BYTES
        data = self.long_data(self.words[head_at + 1], nbytes) if is_long else self.memory[start : start + nbytes]
        incoming = incoming_of(self.src, head, data)
        if self.fence is not None:
            self.fence()
        if self.number != number:
            return None
        # No call from here on.
        self.words[READ_AT] = number
        self.number = number = number + 1
        self.place = self.places[number & SLOTS - 1]
        inbox.unread = incoming
        return incoming


def incoming_of(src: int, head: int, data: bytes | memoryview) -> Incoming | None:
    """The message of an entry, with a copy of these data, all of its own; None for one that could not be filled."""
    wire_tag = head >> SIZE_BITS
    code = wire_tag & wire.CODE_MASK
    if code == wire.NOTHING:
        return None
    nbytes = len(data)
    element = BY_CODE[code]
    array = np.empty(nbytes // element.itemsize, element.storage)
    array.view(np.uint8)[:] = np.frombuffer(data, np.uint8)
    incoming = Incoming(None, src, wire_tag >> wire.CODE_BITS, code, nbytes)
    incoming.result = Message(array, src, incoming.tag, len(array), nbytes, element)
    return incoming


def reader_of(shared: Neighbours, src: int, world_rank: int, offset: int) -> FastboxReader:
    """Of the box that lies there in the arena of that rank of the world, which is `src` in the communicator."""
    reader = FastboxReader(src, shared.words(world_rank, offset, PAGE_BYTES // 8), offset)
    reader.memory = shared.memory(world_rank)
    reader.stretches = {}
    reader.fence = shared.fence
    return reader


NO_READER = FastboxReader(-1, memoryview(bytes(PAGE_BYTES)).cast("q"), 0)
"""Of a box in which never is anything."""
