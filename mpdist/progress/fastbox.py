"""Fastbox: small arrays to a rank of the same node go through shared memory.

A call of MPI takes longer than Python to copy a few bytes. When some small arrays have gone
to a member by MPI, their sender takes a page of its arena for those that follow, and tells
the member where. An entry is the data, a head that says what they are, and last its number.
Data too long for that lie in one of a few stretches elsewhere, which take turns; then the entry
says where. They are taken when the first such array comes. A sender that looks for a long answer
takes the lines of the next stretch out of its receiver's cache meanwhile.

Nothing overtakes. A box is open or shut; whoever sends to the member by MPI, because the array
is large or the box full, shuts it, and all goes by MPI. It opens again when small arrays
follow each other and all entries have been read: a message by MPI says so, and with
each a new epoch begins, which the numbers of entries name. So

    what was sent by MPI before an entry has come when its epoch begins: who receives waits for that;
    what was put before a message by MPI is there when that comes: who receives reads it first.

Python changes threads, and calls the handlers of signals, only at calls and where loops jump
back: lines without them are done as a whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.progress import wire
from mpdist.progress.send import Sent, SentAndTurn, pending

if TYPE_CHECKING:
    from mmap import mmap

    from numpy.typing import NDArray

    from mpdist.memory.arena import Block
    from mpdist.progress.channel import Channel
    from mpdist.transport.neighbours import Neighbours
    from mpdist.transport.requests import Request

# A page in all, of one direction between two members.
SLOTS = 16
SLOT_BYTES = 256
HEAD_BYTES = 16
PAGE_BYTES = SLOTS * SLOT_BYTES
LINE_BYTES = 64
SLOT_DATA_BYTES = SLOT_BYTES - HEAD_BYTES - LINE_BYTES
"""The largest array that lies in its slot."""

# What is longer still MPI had better copy once, from one process to the other.
BOX_BYTES = 64 * 1024
"""The largest array that goes this way."""
STRETCHES = 4
LAST_SLOTS = SLOTS - STRETCHES
"""An entry may use its stretch when the one so many before it as there are stretches has been read, long or not."""
# So much of a stretch is made ready at a time: so few lines that NumPy lets no other thread run meanwhile.
READY_BYTES = 16 * 1024
# Of all boxes of a rank to which it sends so: memory of 8 MiB.
BOXES_WITH_STRETCHES = 32

# The first word of an entry is its number: epoch << 32 | how many there are with it, in all epochs.
EPOCH = 1 << 32
# The second is its head: wire tag << SIZE_BITS | bytes
SIZE_BITS = 17
NOTHING = wire.NOTHING << SIZE_BITS

# The number of the last entry that has been read, or GONE when none will be any more. In a line with nothing else.
READ_AT = (PAGE_BYTES - LINE_BYTES) // 8
GONE = -1

# Each so many bytes, as a power of 2, cost one credit more.
CREDIT_BITS = 14

# So many small arrays go by MPI before a box opens; each time that it is shut twice as many, up to the last.
OPENS_AFTER = 3
OPENS_AFTER_AT_MOST = 64
_NEVER = 1 << 62

# Of a box whose memory was given back: full for ever.
_GONE_WORDS = memoryview((GONE).to_bytes(8, "little", signed=True) * (PAGE_BYTES // 8)).cast("q")


def places(offset: int) -> list[tuple[int, int, int]]:
    """Of each slot: where it has its words, the number and the head, and where its data lie behind this offset."""
    words = SLOT_BYTES // 8
    return [(slot * words, slot * words + 1, offset + slot * SLOT_BYTES + HEAD_BYTES) for slot in range(SLOTS)]


class Fastbox:
    """What its sender knows of one.

    Attributes:
        number: of the last entry.
        limit: up to this number they may be put, as far as it has looked; long ones LAST_SLOTS less.
        began: what the number was when the epoch began.
        peer: the member's rank in the world.
        words, memory: the page as words; the arena's memory.
        places, stretches: of each slot, see `places`; where its data lie that are too long for it, if anywhere.
        lines: of each stretch, in pieces, a word of each line.
        last_long, length: the last entry in a stretch, or -1 once that of the next was made ready, and its bytes.
        tag, dtype, wire_tag: of the last array whose tag and type were looked at, and how these are told.
        small, after: small arrays that have gone by MPI since it was shut, and as many may before it opens.
    """

    __slots__ = (
        "after", "began", "block", "dtype", "fence", "last_long", "length", "limit", "lines", "long_block", "memory",
        "number", "peer", "places", "small", "stretches", "tag", "wire_tag", "words",
    )  # fmt: skip

    peer: int
    words: memoryview[int]
    memory: mmap
    places: list[tuple[int, int, int]]
    stretches: list[int]
    fence: Any

    def __init__(self) -> None:
        self.block: Block | None = None
        self.long_block: Block | None = None
        self.stretches: list[int] = []
        self.lines: list[NDArray[np.uint64]] = []
        self.number = self.limit = self.began = self.small = self.length = 0
        self.last_long = -1
        self.after = OPENS_AFTER
        self.tag = -1
        self.dtype: Any = None
        self.wire_tag = 0

    def look(self) -> None:
        """See how far its receiver has read; in a new epoch it says so only when it has read something."""
        limit = self.words[READ_AT] + SLOTS
        if limit > self.limit:
            self.limit = limit
        if self.fence is not None:
            self.fence()

    def make_ready(self, words: memoryview[int], at: int, answer: int) -> None:
        """Take the next stretch out of its receiver's cache, which is half of what a copy there takes.

        While an answer is looked for, and where the last entry was a long one, as the next may be. Once for each; not
        where the entry that was in the stretch has not been read.

        Args:
            words, at, answer: this number shows there that the answer has come.
        """
        if self.last_long != self.number:
            return
        self.last_long = -1
        following = self.number + 1
        if following > self.limit - LAST_SLOTS:
            self.look()
        lines = self.lines[following % STRETCHES]
        for piece in range(-(-self.length // READY_BYTES)):
            if words[at] == answer:
                return
            # No call between these: nobody has put the entry, nor does anybody need what lies in its stretch.
            if self.number < following <= self.limit - LAST_SLOTS:
                lines[piece] = 0

    def is_read(self) -> bool:
        """Whether all entries have been read."""
        return self.number == self.began or self.words[READ_AT] == self.number


def put(channel: Channel, box: Fastbox, x: Any, nbytes: int, wire_tag: int, is_long: bool = False) -> Sent | None:
    """Send a small array, whatever gives it as C-contiguous bytes; None where there is no place for it.

    Args:
        is_long: it does not lie in a slot.

    Raises:
        ValueError, BufferError, TypeError: it does not give them; nothing is sent.
    """
    engine = channel.engine
    is_rung = channel.flags[box.peer]
    if is_rung:  # waking takes much longer than putting it there
        engine.doorbell.ring(box.peer)
    if is_long and not (box.stretches or channel.fastboxes.take_stretches(box)):
        return None
    number = box.number
    if number >= (box.limit - LAST_SLOTS if is_long else box.limit):
        box.look()
        number = box.number
        if number >= (box.limit - LAST_SLOTS if is_long else box.limit):
            return None
    # The slot is this entry's. No call since it was looked at; nor is there one until the data are there.
    box.number = number = number + 1
    number_at, head_at, start = box.places[number & SLOTS - 1]
    words = box.words
    is_there = False
    try:
        words[head_at] = wire_tag << SIZE_BITS | nbytes
        if is_long:
            words[head_at + 1] = start = box.stretches[number & SLOTS - 1]
            box.last_long, box.length = number, nbytes
        box.memory[start : start + nbytes] = x
        is_there = True
        if box.fence is not None:
            box.fence()
    finally:
        if not is_there:
            words[head_at] = NOTHING
            if box.fence is not None:
                box.fence()
        words[number_at] = number
    if channel.flags[box.peer]:  # it may have fallen asleep meanwhile
        engine.doorbell.ring(box.peer)
        is_rung = True
    if is_rung:
        engine.doorbell.give_way()
    engine.credit -= 1 + (nbytes >> CREDIT_BITS)
    sent = Sent() if engine.credit > 0 else SentAndTurn()
    sent._channel = channel
    return sent


class Fastboxes:
    """Those of a channel, to any member. Which are open says the channel, see `Channel.opened`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._boxes: dict[int, Fastbox] = {}
        self._told: list[Request] = []  # that a box opens, until somebody owns the request
        self._is_ended = False

    def opens(self, dst: int) -> bool:
        """A small array is about to go by MPI: whether the box to this member has been opened for it instead."""
        if self._is_ended:
            return False
        box = self._boxes.get(dst) or self._boxes.setdefault(dst, Fastbox())
        box.small += 1
        return box.small > box.after and self._open(dst, box)

    def _open(self, dst: int, box: Fastbox) -> bool:
        channel = self._channel
        with channel.engine.lock:
            # In debug mode another one posts what it sends.
            if dst in channel.opened or channel.isend is not channel.transport.isend:
                return False
            if box.block is None and not self._make(dst, box):
                box.after = _NEVER
                return False
            box.small = 0
            assert box.block is not None
            number = box.number
            if not box.is_read():
                return False
            head = wire.pack_size(box.block.offset)
            telling = map(channel.isend, ([head, len(head), channel.byte],), (dst,), (wire.FASTBOX,))
            # No call between these, after which a handler could raise; another thread may go on while MPI is called. It
            # finds the box open and full, posts by MPI, and shuts it.
            if self._is_ended or box.number != number:
                return False
            box.number = box.began = box.limit = box.number + EPOCH
            channel.opened[dst] = box
            try:
                self._told += telling
            except BaseException:  # MPI's own
                box.number = box.began = box.limit = box.number - EPOCH
                self.shut(dst)
                raise
            box.limit = box.number + SLOTS
            self._hand_over(dst, head)
        channel.ring(dst)
        return True

    def _hand_over(self, dst: int, head: bytes) -> None:
        """Let the Engine look at what MPI has not sent yet."""
        while self._told:
            if not self._told[-1].Test():
                pending(self._channel, self._told[-1], dst, 0, head)._abandon()
            self._told.pop()

    def _make(self, dst: int, box: Fastbox) -> bool:
        channel, shared = self._channel, self._channel.engine.shared
        if shared is None or not shared.has(channel.world_ranks[dst]):
            return False
        block = shared.arena.allocate(PAGE_BYTES)
        if block is None:
            return False
        block.bytes()[:] = 0
        own = channel.world_ranks[channel.rank]
        box.peer = channel.world_ranks[dst]
        box.words = shared.words(own, block.offset, PAGE_BYTES // 8)
        box.memory = shared.memory(own)
        box.places = places(block.offset)
        box.fence = shared.fence
        box.block = block
        return True

    def take_stretches(self, box: Fastbox) -> bool:
        """Take memory for long data; False where there is none for them: then they go by MPI."""
        shared = self._channel.engine.shared
        assert shared is not None
        with self._channel.engine.lock:
            if not box.stretches and box.long_block is None and shared.boxes_with_stretches < BOXES_WITH_STRETCHES:
                block = shared.arena.allocate(STRETCHES * BOX_BYTES)
                if block is not None:
                    lines = _lines(shared, self._channel, block.offset)
                    stretches = [block.offset + slot % STRETCHES * BOX_BYTES for slot in range(SLOTS)]
                    # No call between these.
                    shared.boxes_with_stretches += 1
                    box.long_block, box.lines, box.stretches = block, lines, stretches
        return bool(box.stretches)

    def shut(self, dst: int) -> None:
        """A message has gone by MPI to this member, whose box was open; it may be called again."""
        box = self._channel.opened.pop(dst, None)
        if box is not None:
            box.after = min(2 * box.after, OPENS_AFTER_AT_MOST)

    def end(self) -> None:
        """All goes by MPI from now on."""
        self._is_ended = True
        self._channel.opened.clear()

    def are_left(self) -> bool:
        """Whether their receivers will not look at them any more."""
        return all(box.words[READ_AT] == GONE for box in self._known())

    def _known(self) -> list[Fastbox]:
        """Those of which their receivers know."""
        return [box for box in list(self._boxes.values()) if box.began]

    def close(self) -> None:
        """Give their memory back, or leave it to those who may still look."""
        self.end()
        shared = self._channel.engine.shared
        for box in self._known():
            if shared is not None:
                self._keep(box, shared)
            # No call between these: another thread may be about to put something there, and finds it full.
            box.limit = 0
            box.words = _GONE_WORDS
        self._boxes.clear()

    def _keep(self, box: Fastbox, shared: Neighbours) -> None:
        """Leave what its receiver may look at to it: the page, and the data of entries that it has not read."""
        shared.boxes_with_stretches -= bool(box.stretches)
        if box.words[READ_AT] == GONE:
            return
        blocks = [box.block] if box.is_read() else [box.block, box.long_block]
        shared.kept += [block for block in blocks if block is not None]


def _lines(shared: Neighbours, channel: Channel, offset: int) -> list[NDArray[np.uint64]]:
    """A word of each line of the stretches that lie there."""
    own = channel.world_ranks[channel.rank]
    words = shared.array(own, offset, STRETCHES * BOX_BYTES // 8, np.uint64)
    return list(words[:: LINE_BYTES // 8].reshape(STRETCHES, -1, READY_BYTES // LINE_BYTES))
