"""Team: the members of a communicator whose devices reach each other's memory.

Each member has exported a block with slots, and events of two kinds: that it has
shown a round, and that it has taken one. An event is waited for only when its owner
has told that it was recorded; the host looks at what is told, and no work on a device
ever waits for a host. See order.py for what is told when.

On one GPU work that waits for another process's costs turns of 140 us (H100). So what one
member does for all there is told of when it is over, and no device waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpdist.algorithms.devices.order import Told
from mpdist.algorithms.devices.plan import Where, block_bytes, place_in_block
from mpdist.algorithms.devices.words import GIVEN_UP, GPU, ROUNDS_AT, Calls, handle_of, pack_handle, words_needed
from mpdist.algorithms.shared.calls import call_word, misfit
from mpdist.errors import CommRevoked, MpdistError

if TYPE_CHECKING:
    from mpdist.memory.arena import Block
    from mpdist.memory.exports import Exports, Offer
    from mpdist.memory.sharing import Lane
    from mpdist.progress.channel import Channel
    from mpdist.transport.neighbours import Neighbours

# Events of a kind: as many as slots, for a member shows a round only when all have taken the last but one.
RING = 2
SIGNALS = len(Told) * RING
WORDS = words_needed(1 + SIGNALS)


class Team:
    """Members that have each other's blocks and events open.

    Attributes:
        channel: the communicator's.
        rank, size: of this process, and of the communicator.
        rounds: of all collectives so far; the same on all members when the next starts.
        lane: this member's work.
        calls: as what the members come to collectives.
        is_on_one_gpu: all members use the same one.
    """

    def __init__(
        self, channel: Channel, exports: Exports, offer: Offer, lines: Sequence[memoryview], lane: Lane
    ) -> None:
        """Open what the other members have put down.

        Raises:
            DeviceFailed: it cannot be opened.
        """
        shared = channel.engine.shared
        assert shared is not None
        self.channel = channel
        self.rank, self.size = channel.rank, channel.size
        self.rounds = 0
        self._recorded = 0
        self.lane = lane
        self._exports = exports
        self.calls = Calls(lines, channel.rank, shared.fence)
        self.is_on_one_gpu = len({line[GPU] for line in lines}) == 1
        self._fence = shared.fence
        self._lines = lines
        self._mine = lines[channel.rank]
        self._others = [line for line in lines if line is not self._mine]
        self._own_signals = [signal.event for signal in offer.signals]
        self._blocks = [0] * channel.size
        self._signals: list[list[int]] = []
        for member, line in enumerate(lines):
            if member == channel.rank:
                self._blocks[member] = offer.block.address
                continue
            self._blocks[member] = exports.block(handle_of(line, 0))
            self._signals.append([exports.signal(handle_of(line, 1 + index)) for index in range(SIGNALS)])

    # ------------------------------------------------------------------ keeping step

    def tell_host(self, number: int) -> None:
        """This member comes to a collective with host memory."""
        self.calls.tell_host(number)
        self.ring()

    def tell_device(self, number: int, op: str, nbytes: int, kind: int, *facts: int) -> None:
        """It comes with memory of its device; what is told first must be the same on all, see `misfit`."""
        self.calls.tell_device(number, [call_word(op, nbytes, kind, number, is_one_round=True), *facts])
        self.ring()

    def misfit(self, told: Sequence[Sequence[int]]) -> MpdistError | None:
        """Why the members' calls do not go together; None if they do."""
        calls = {rank: facts[0] for rank, facts in enumerate(told)}
        return misfit(self.channel.where(), calls, calls[self.rank])

    def tell(self, told: Told, rounds: int, is_over: bool) -> None:
        """What is queued belongs to so many rounds; others wait for it, on their devices unless it is over."""
        if not is_over:
            self.lane.record(self._own_signals[_index(told, rounds)])
            self._recorded = max(self._recorded, rounds)
        if self._fence is not None:
            self._fence()
        self._mine[ROUNDS_AT + told] = rounds
        self.ring()

    def have_told(self, told: Told, rounds: int) -> bool:
        """Whether all others have queued so many rounds.

        Raises:
            CommRevoked: one never will.
        """
        for rank, line in enumerate(self._lines):
            if line[ROUNDS_AT + told] < rounds and line is not self._mine:
                if line[GIVEN_UP] and line[ROUNDS_AT + told] < rounds:
                    raise self._deserted(rank)
                return False
        if self._fence is not None:
            self._fence()
        return True

    def follow(self, told: Told, rounds: int) -> None:
        """Later work waits for so many rounds of all others, which have told of them.

        All tell of a round alike: what was told when it was over, and all before that, needs no waiting for.
        """
        if 0 < rounds <= self._recorded:
            for signals in self._signals:
                self.lane.wait(signals[_index(told, rounds)])

    def have_come(self, number: int) -> bool:
        """Whether all have come to a collective.

        Raises:
            CommRevoked: one never will.
        """
        given_up = [rank for rank, line in enumerate(self._lines) if line[GIVEN_UP]]
        if self.calls.have_come(number):
            return True
        if given_up:
            raise self._deserted(given_up[0])
        return False

    def give_up(self) -> None:
        """Others are not to wait for this member, which refuses further use."""
        if not self.channel.broken:
            self.channel.give_up("a collective between devices was ended before its time, so its ranks are out of step")
        self._mine[GIVEN_UP] = 1
        self.ring()

    def keep(self, *arrays: object) -> None:
        """Another member may write into these of this one's for as long as it likes."""
        self._exports.kept.extend(arrays)

    def _deserted(self, rank: int) -> CommRevoked:
        why = f"rank {rank} gave it up, where a collective between devices had failed"
        self.channel.give_up(why)
        self.give_up()
        return CommRevoked(f"a collective on {self.channel.where()} waits in vain: {why}; its own error says more")

    def ring(self) -> None:
        """Wake the members that sleep."""
        self.channel.ring_all()

    # ------------------------------------------------------------------ memory

    def address(self, where: Where, member: int, number: int) -> int:
        """Of a member's slot in a round, or of what it has reduced there."""
        return self._blocks[member] + place_in_block(where, number)

    def block(self, member: int) -> int:
        """Address of a member's."""
        return self._blocks[member]

    def opened(self, handle: bytes) -> int:
        """Address of another block of a member.

        Raises:
            DeviceFailed: it cannot be opened.
        """
        return self._exports.block(handle)

    def wait_for_all_events(self) -> None:
        """Until all events of the others have happened, which are recorded."""
        for signals in self._signals:
            for event in signals:
                self.lane.wait(event)
        self.lane.mark().wait()


class HaveTold:
    """All others have told so many rounds; as a request."""

    __slots__ = ("_rounds", "_team", "_told")

    def __init__(self, team: Team, told: Told, rounds: int) -> None:
        self._team = team
        self._told = told
        self._rounds = rounds

    def Test(self) -> bool:
        return self._team.have_told(self._told, self._rounds)


class HaveCome:
    """All have come to a collective; as a request."""

    __slots__ = ("_number", "_team")

    def __init__(self, team: Team, number: int) -> None:
        self._team = team
        self._number = number

    def Test(self) -> bool:
        return self._team.have_come(self._number)


def new_line(shared: Neighbours, block: Block, world_rank: int) -> memoryview:
    """This member's words."""
    block.bytes()[:] = 0
    return shared.words(world_rank, block.offset, WORDS)


def take_offer(exports: Exports, line: memoryview) -> Offer:
    """What this member exports; put down in its words.

    Raises:
        DeviceFailed: nothing can be exported.
    """
    offer = exports.take(block_bytes(), SIGNALS)
    for index, handle in enumerate(offer.handles):
        pack_handle(line, index, handle)
    return offer


def _index(told: Told, rounds: int) -> int:
    return told * RING + rounds % RING
