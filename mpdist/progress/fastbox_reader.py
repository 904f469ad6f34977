"""FastboxReader: the receiver's side of a fastbox, see `fastbox`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpdist.memory import BY_CODE
from mpdist.memory.elements import Array
from mpdist.progress import wire
from mpdist.progress.fastbox import (
    BLOCK_BYTES,
    BOX_BYTES,
    READ_AT,
    SIZE_BITS,
    SLOT_DATA_BYTES,
    SLOTS,
    places,
    stretches,
)
from mpdist.progress.message import Incoming, Message

if TYPE_CHECKING:
    from collections.abc import Callable
    from mmap import mmap

    from mpdist.progress.inbox import Inbox
    from mpdist.transport.neighbours import Neighbours

ONCE = range(1)

_SIZE_MASK = (1 << SIZE_BITS) - 1


class FastboxReader:
    """What its receiver knows of one. What is there is read under the Engine's lock.

    Attributes:
        src: whose it is.
        number: of the next entry; one of a later epoch has another.
        place: of its slot.
        looks: as often is looked for the next one by who asks for it, before its receive is posted.
        stretches: where the data of each slot lie that are too long for it.
    """

    __slots__ = ("fence", "looks", "memory", "number", "place", "places", "src", "stretches", "words")

    memory: mmap
    stretches: list[Array]
    fence: Callable[[], object] | None

    def __init__(self, src: int, words: memoryview[int], offset: int) -> None:
        self.src = src
        self.words = words
        self.places = places(offset)
        self.number = 1
        self.place = self.places[1]
        self.looks = ONCE

    def has_one(self) -> bool:
        """Whether there is an entry that may be read."""
        return self.words[self.place[0]] == self.number

    def long_data(self, nbytes: int) -> Array:
        """Those of the entry that is there, where they do not lie in its slot."""
        return self.stretches[self.number & SLOTS - 1][:nbytes]

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
        data = self.long_data(nbytes).tobytes() if is_long else self.memory[start : start + nbytes]
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


def incoming_of(src: int, head: int, data: bytes) -> Incoming | None:
    """The message of an entry, with data of its own; None for one that its sender could not fill."""
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
    reader = FastboxReader(src, shared.words(world_rank, offset, BLOCK_BYTES // 8), offset)
    reader.memory = shared.memory(world_rank)
    reader.stretches = [shared.array(world_rank, start, BOX_BYTES, np.uint8) for start in stretches(offset)]
    reader.fence = shared.fence
    return reader


NO_READER = FastboxReader(-1, memoryview(bytes(BLOCK_BYTES)).cast("q"), 0)
"""Of a box in which never is anything."""
