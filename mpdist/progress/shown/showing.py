"""Showing: which members of a communicator take messages straight from each other's devices, and how they find out.

The first large arrays that a member sends go through host memory. Before, it puts down
where its slots are; who receives such a message on a device opens them, looks whether it
finds there what must lie behind them, and writes down beside them what came of it. So
nobody waits for an answer: until it is there, and for ever where it is no, arrays go
through host memory.
"""

from __future__ import annotations

from contextlib import suppress
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from mpdist.errors import DeviceFailed
from mpdist.memory import slots
from mpdist.memory.buffer import address_of
from mpdist.memory.exports import PRIVATE
from mpdist.memory.segments import ENTRIES, Segments
from mpdist.memory.sharing import HANDLE_BYTES
from mpdist.progress import wire
from mpdist.progress.exporting import exports_of
from mpdist.progress.shown import ticket
from mpdist.progress.shown.taking import Shown
from mpdist.progress.shown.ticket import Ticket

if TYPE_CHECKING:
    from mpdist.memory import Buffer, Device
    from mpdist.memory.arena import Block
    from mpdist.memory.slots import Slots
    from mpdist.progress.channel import Channel

# Bytes of an array from which on its receiver takes it itself: 90 us on an H100, of almost any size. Through the
# host 64 KiB take as long, and 240 us where many follow each other (2026-11-22).
SHOWN_FROM = 64 * 1024

_VERDICTS_AT = HANDLE_BYTES // 8


class Verdict(IntEnum):
    """What a member has found out about another one's slots."""

    UNKNOWN = 0
    PROVEN = 1
    REFUSED = 2


def may_show(channel: Channel, nbytes: int) -> bool:
    """Whether a message of this size may go that way; not in debug mode, which looks into all memory."""
    if nbytes < max(SHOWN_FROM, 1) or not channel.engine.has_ipc or channel.size == 1 or channel.check is not None:
        return False
    shared = channel.engine.shared
    return shared is not None and shared.notices is not None


def showing_of(channel: Channel, device: Device) -> Showing:
    """A communicator's; made for the first device with which this member comes."""
    with channel.engine.lock:
        if channel.showing is None:
            channel.showing = Showing(channel, device)
        return channel.showing


class Showing:
    """One communicator's, on this member.

    Attributes:
        channel: the communicator's.
        device: of the arrays that it shows, and with which it takes those of others.
        exports: that device's.
    """

    def __init__(self, channel: Channel, device: Device) -> None:
        assert channel.engine.shared is not None
        self.channel = channel
        self.device = device
        self.exports = exports_of(channel.engine, device)
        self._shared = channel.engine.shared
        self._has_offered = False
        self._block: Block | None = None
        self._line: memoryview | None = None
        self._tickets: list[tuple[Block, Ticket]] = []  # that may be used again
        self._judged: dict[int, bytes] = {}  # the handles of the members' slots

    # ------------------------------------------------------------------ as sender

    def is_taken_by(self, member: int) -> bool:
        """Whether a member has found that it can take what this one shows."""
        if not self._is_neighbour(member):
            return False
        with self.channel.engine.lock:
            if not self._has_offered:
                self._has_offered = True
                self._offer()
        if self._line is None or self._line[_VERDICTS_AT + member] != Verdict.PROVEN:
            return False
        self._order()
        return True

    def place_of(self, x: Buffer, at: int) -> wire.Place:
        """Where the receiver of an array finds it, and its ticket."""
        offset, handle = self.exports.place_of(x)
        if offset != PRIVATE:
            return wire.Place(x.nbytes, at, offset, 0, 0, handle)
        with self.channel.engine.lock:
            segments = self._segments()
            found = None if segments is None else segments.find(x.address, x.nbytes)
        if found is None:
            return wire.Place(x.nbytes, at, PRIVATE, 0, 0, b"")
        segment, word = found
        return wire.Place(x.nbytes, at, x.address - segment.start, segment.number, word, segment.handle)

    def refresh(self, every: float = 0.0) -> None:
        """Let others know which segments are gone, unless that was done less than so many seconds ago.

        Of a device that has failed nobody can tell, and whoever sends, or closes, goes on.
        """
        if self.exports.segments is not None:
            with self.channel.engine.lock, suppress(DeviceFailed):
                self.exports.segments.refresh(every)

    def slots(self) -> Slots:
        """Those that have been offered."""
        return self.exports.slots()

    def new_ticket(self) -> tuple[Block, Ticket] | None:
        """For one message; None where no shared memory is left."""
        try:
            block, known = self._tickets.pop()
        except IndexError:
            allocated = self._shared.arena.allocate(8 * ticket.WORDS)
            if allocated is None:
                return None
            block, known = allocated, self._ticket(self.channel.rank, allocated.offset)
        known.reset()
        return block, known

    def give_back(self, block: Block, ticket: Ticket) -> None:
        """Nobody looks at this ticket any more."""
        self._tickets.append((block, ticket))

    def keep(self, block: Block) -> None:
        """A receiver may look at this ticket for ever."""
        self._shared.kept.append(block)

    def _segments(self) -> Segments | None:
        """Those of the device; None where no shared memory is left to tell of them."""
        exports, shared = self.exports, self._shared
        if exports.segments is None:
            block = shared.arena.allocate(8 * ENTRIES)
            if block is None:
                return None
            block.bytes()[:] = 0
            shared.kept.append(block)
            words = shared.words(self.channel.world_ranks[self.channel.rank], block.offset, ENTRIES)
            exports.segments = Segments(exports.sharing, words, block.offset, shared.fence)
        return exports.segments

    def _offer(self) -> None:
        """Put down where the slots are; some milliseconds, once in a process."""
        channel, notices = self.channel, self._shared.notices
        assert notices is not None
        block = self._shared.allocate(8 * (_VERDICTS_AT + channel.size), f"GPU messages on {channel.where()}")
        if block is None:
            return
        try:
            export = self.slots().block
            proof = slots.proof_of(export.handle)
            self._copy(address_of(proof), export.address + slots.proof_at(), proof.nbytes)
        except DeviceFailed as error:
            self.exports.say(self.device, error)
            return
        block.bytes()[:] = 0
        line = self._shared.words(channel.world_ranks[channel.rank], block.offset, _VERDICTS_AT + channel.size)
        line[:_VERDICTS_AT] = memoryview(export.handle).cast("q")
        if notices.put(self._name, block.offset):
            self._block, self._line = block, line

    # ------------------------------------------------------------------ as receiver

    def judge(self, member: int, device: Device) -> None:
        """An array has come from a member through host memory: find out whether the next may come straight.

        Not when this member is closing the communicator: others may have closed it, and taken their words back.
        """
        if self.channel.is_closed or device != self.device or member in self._judged or not self._is_neighbour(member):
            return
        channel, notices = self.channel, self._shared.notices
        assert notices is not None
        world_rank = channel.world_ranks[member]
        offset = notices.find(world_rank, self._name)
        if offset is None:
            return
        line = self._shared.words(world_rank, offset, _VERDICTS_AT + channel.size)
        self._judged[member] = handle = line[:_VERDICTS_AT].tobytes()
        verdict = Verdict.PROVEN
        try:
            self._check(handle, member)
        except DeviceFailed as error:
            self.exports.say(self.device, error)
            verdict = Verdict.REFUSED
        self._order()
        line[_VERDICTS_AT + channel.rank] = verdict

    def shown(self, member: int, place: wire.Place) -> Shown:
        """What a member shows; it has been told that this one can take it."""
        word = self._shared.words(self.channel.world_ranks[member], place.word, 1)
        return Shown(self, member, place, self._ticket(member, place.ticket), word, self._judged[member])

    def _check(self, handle: bytes, member: int) -> None:
        """Raise DeviceFailed unless this leads to the member's slots."""
        address = self.exports.block(handle) + slots.proof_at()
        found = np.empty(slots.PROOF_BYTES, np.uint8)
        self._copy(address, address_of(found), found.nbytes)
        if not np.array_equal(found, slots.proof_of(handle)):
            raise DeviceFailed(f"the memory of rank {member}, opened here, holds other values than there")

    def _copy(self, source: int, target: int, nbytes: int) -> None:
        """Some bytes, at once: in a stream that waits for no kernel of the program."""
        lane = self.exports.lane
        lane.copy(source, target, nbytes)
        lane.mark().wait()

    # ------------------------------------------------------------------ end

    def close(self, together: bool) -> None:
        """Nobody uses it any more; not together: others may, so what they see stays."""
        self.refresh()
        with self.channel.engine.lock:
            self.exports.openings.sweep()
        if self._block is None:
            return
        assert self._shared.notices is not None
        self._shared.notices.remove(self._name)
        if not together:
            self._shared.kept.append(self._block)
        self._block = self._line = None

    @property
    def _name(self) -> str:
        return f"{self.channel.name} messages"

    def _is_neighbour(self, member: int) -> bool:
        nodes, ranks = self.channel.engine.nodes, self.channel.world_ranks
        return member != self.channel.rank and nodes[ranks[member]] == nodes[ranks[self.channel.rank]]

    def _ticket(self, member: int, offset: int) -> Ticket:
        words = self._shared.words(self.channel.world_ranks[member], offset, ticket.WORDS)
        return Ticket(words, self._shared.fence)

    def _order(self) -> None:
        if self._shared.fence is not None:
            self._shared.fence()
