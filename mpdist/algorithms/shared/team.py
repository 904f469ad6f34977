"""Team: the members of a communicator on this node, their slots, and the words by which they keep step.

Each member has a line of 64-bit words that it alone writes and the others read,
and slots through which it shows private memory. A collective passes data in
*rounds*, counted from the team's first to its last; a member tells in its words
up to which round it has

    STAGED      shown its input: in its slot, or in memory that the others read directly
    REDUCED     shown what it has reduced
    CONSUMED    read all that it needs of the others
    TAKEN       the same of what they have reduced, where that comes much later than their inputs

A slot is used every second round, so it may be written in round r when all have
consumed round r - 2. Words only grow, so nothing is ever set back, and a member
that is ahead by a round disturbs nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpdist.algorithms.meeting import meet
from mpdist.errors import SizeMismatch
from mpdist.memory.arena import Block
from mpdist.transport.reach import Remote

if TYPE_CHECKING:
    from mpdist.algorithms.shared.moving import Memory
    from mpdist.memory import Buffer, Element
    from mpdist.memory.elements import Array
    from mpdist.progress.channel import Channel
    from mpdist.progress.collective import Steps
    from mpdist.transport.mpi import Request
    from mpdist.transport.neighbours import Neighbours

STAGED, REDUCED, CONSUMED, TAKEN, BARRIER = range(5)
# Facts about a collective's arrays, told anew for each: two sets, for the next may begin before all have read them.
_FACTS = 5
# The last is what must be the same on all: a size, and the round, for who takes another algorithm tells nothing.
_NBYTES = 4
_ROUND_BITS = 16
_ROUND_MASK = (1 << _ROUND_BITS) - 1
_FACTS_AT = 5
_WORDS = _FACTS_AT + 2 * _FACTS
HEAD_BYTES = 128

# A slot: what a member shows of private memory in one round. Two of them, and two halves for what it has reduced, stay
# in a core's cache (1 to 2 MiB) together with what is read. bench/collectives.py.
SLOT_BYTES = 512 * 1024
RESULT_BYTES = SLOT_BYTES // 2
BLOCK_BYTES = HEAD_BYTES + 2 * SLOT_BYTES + 2 * RESULT_BYTES

# What a member has in one round where nothing goes through slots.
DIRECT_BYTES = 2 * 1024 * 1024

PRIVATE = -1
"""In place of an offset: memory that the others cannot reach."""


class Place(NamedTuple):
    """A member's slots: at an offset of its arena."""

    world_rank: int
    offset: int


class Reached:
    """All these members have told a round in a word; as a request."""

    __slots__ = ("_fence", "_lines", "_round", "_word")

    def __init__(self, lines: list[memoryview], word: int, to_round: int, fence: object) -> None:
        self._lines = lines
        self._word = word
        self._round = to_round
        self._fence = fence

    def Test(self) -> bool:
        word, to_round = self._word, self._round
        for line in self._lines:
            if line[word] < to_round:
                return False
        if self._fence is not None:
            self._fence()  # type: ignore[operator]  # a function
        return True


class _Free:
    """A team's next collective may begin; as a request."""

    __slots__ = ("_team",)

    def __init__(self, team: Team) -> None:
        self._team = team

    def Test(self) -> bool:
        team = self._team
        if team.small and not team.small[-1].Test():
            return False
        return team.is_free()


class Team:
    """Members of a communicator that share memory.

    Attributes:
        rank: of this process among them.
        size: number of members.
        rounds: of all collectives so far; the same on all members when the next starts.
        channel: the communicator's.
        round_bytes: what a member shows in one round at the most.
        small: collectives of a single step that are under way, in their order.
    """

    def __init__(self, channel: Channel, block: Block, members: Sequence[Place]) -> None:
        shared = channel.engine.shared
        assert shared is not None
        self.channel = channel
        self.shared: Neighbours = shared
        self.members = members
        self.rank = [member.world_rank for member in members].index(channel.world_ranks[channel.rank])
        self.size = len(members)
        self.rounds = 0
        self._barriers = 0
        self._collectives = 0
        self._last_but_one = 0
        self._block = block
        self._lines = [shared.words(*member, _WORDS) for member in members]
        self._mine = self._lines[self.rank]
        self._others = [line for line in self._lines if line is not self._mine]
        self._peers = [member.world_rank for member in members if member is not members[self.rank]]
        self._slots: dict[int, tuple[list[list[Array]], list[list[Array]]]] = {}
        self._fence = shared.fence
        self.round_bytes = SLOT_BYTES if shared.reach is None else DIRECT_BYTES
        self._bell = channel.engine.doorbell
        self._sleeping = channel.engine.doorbell.flags
        self.small: deque[Request] = deque()

    def close(self, together: bool) -> None:
        """Give the slots back; not together: others may still read them, so they stay as long as this process."""
        if not together:
            self.shared.kept.append(self._block)

    # ------------------------------------------------------------------ keeping step

    def tell(self, word: int, to_round: int) -> None:
        """Say how far this member is, and wake those that sleep until then."""
        if self._fence is not None:
            self._fence()
        self._mine[word] = to_round
        flags = self._sleeping
        for peer in self._peers:
            if flags[peer]:
                self._bell.ring(peer)
        if self._bell.has_rung:
            self._bell.give_way()

    def note(self, word: int, to_round: int) -> None:
        """Say so, where the next `tell` wakes whoever waits."""
        self._mine[word] = to_round

    def are_at(self, word: int, to_round: int) -> bool:
        """Whether all others are so far."""
        for line in self._others:
            if line[word] < to_round:
                return False
        if self._fence is not None:
            self._fence()
        return True

    @property
    def staged(self) -> int:
        """The last round that this member has shown."""
        return self._mine[STAGED]

    def all_at(self, word: int, to_round: int) -> Reached:
        """All others are so far."""
        return Reached(self._others, word, to_round, self._fence)

    def one_at(self, member: int, word: int, to_round: int) -> Reached:
        """One member is so far."""
        return Reached([self._lines[member]], word, to_round, self._fence)

    def is_free(self) -> bool:
        """Whether the next collective may begin; as a request it is `free`."""
        return not self.small and self.are_at(CONSUMED, self._last_but_one)

    def free(self) -> Request:
        """The next collective may begin."""
        return _Free(self)

    def begin(self, rounds: int, nbytes: int, *facts: int) -> int:
        """Reserve rounds for a collective, and put down where this member's arrays are; the next `tell` makes it known.

        The team is free. At the end every word of this member must be at the collective's last round.

        Args:
            nbytes: what must be the same on all members, see `misfit`.

        Returns:
            The number before its first round.
        """
        before = self.rounds
        self.rounds += rounds
        # These facts take the place of those of the collective before the last, which all are done with.
        self._last_but_one = before
        self._collectives += 1
        at = self._facts_at()
        self._mine[at + _NBYTES] = nbytes << _ROUND_BITS | (before + 1) & _ROUND_MASK
        for fact in facts:
            self._mine[at] = fact
            at += 1
        return before

    def enter_barrier(self) -> Reached:
        """Tell that this member has come; the request is complete when all have."""
        self._barriers += 1
        self.tell(BARRIER, self._barriers)
        return self.all_at(BARRIER, self._barriers)

    # ------------------------------------------------------------------ facts about a collective's arrays

    def facts(self, number: int) -> list[int]:
        """What each member has put down as fact `number`; valid of those that have told a round of this collective."""
        at = self._facts_at() + number
        return [line[at] for line in self._lines]

    def misfit(self, members: Sequence[int]) -> SizeMismatch | None:
        """Why the arrays of these members, who have told a round, do not go together; None if they do.

        Others may write into an array as far as their own reaches, so this comes before.
        """
        at = self._facts_at() + _NBYTES
        told = [self._lines[member][at] for member in members]
        if min(told) == max(told):
            return None
        mine = self._mine[at] & _ROUND_MASK
        sizes = [
            str(word >> _ROUND_BITS) if word & _ROUND_MASK == mine else "another operation, or fewer" for word in told
        ]
        ranks = [self.channel.world_ranks.index(self.members[member].world_rank) for member in members]
        listed = ", ".join(f"rank {rank}: {size}" for rank, size in sorted(zip(ranks, sizes, strict=True)))
        return SizeMismatch(f"the ranks' arrays differ in bytes ({listed}); give all the same number of elements")

    def check_fit(self, members: Sequence[int]) -> None:
        """Raise SizeMismatch if the members' arrays do not go together; then they are out of step."""
        misfit = self.misfit(members)
        if misfit is not None:
            self.channel.give_up("its ranks gave arrays of different sizes, and are out of step")
            raise misfit

    def _facts_at(self) -> int:
        return _FACTS_AT + self._collectives % 2 * _FACTS

    def place_of(self, buffer: Buffer) -> int:
        """Where the others find it: an offset of this member's arena, an address below PRIVATE, or PRIVATE."""
        offset = self.shared.offset_of(buffer)
        if offset is not None:
            return offset
        return PRIVATE if self.shared.reach is None or not buffer.nbytes else PRIVATE - buffer.address

    # ------------------------------------------------------------------ memory

    def memory(self, member: int, place: int, count: int, element: Element) -> Memory | None:
        """A member's memory at a place; None for PRIVATE."""
        world_rank = self.members[member].world_rank
        if place >= 0:
            return self.shared.array(world_rank, place, count, element.storage)
        if place == PRIVATE:
            return None
        assert self.shared.reach is not None
        return Remote(self.shared.reach, world_rank, PRIVATE - place, count, element.storage)

    def slots(self, element: Element) -> tuple[list[list[Array]], list[list[Array]]]:
        """Slots for inputs and for reduced parts, as arrays: [round % 2][member]."""
        known = self._slots.get(element.code)
        if known is None:
            dtype = element.storage
            known = self._slots[element.code] = (
                [self._views(HEAD_BYTES + side * SLOT_BYTES, SLOT_BYTES, dtype) for side in range(2)],
                [
                    self._views(HEAD_BYTES + 2 * SLOT_BYTES + side * RESULT_BYTES, RESULT_BYTES, dtype)
                    for side in range(2)
                ],
            )
        return known

    def _views(self, start: int, nbytes: int, dtype: np.dtype[np.generic]) -> list[Array]:
        count = nbytes // dtype.itemsize
        return [self.shared.array(member.world_rank, member.offset + start, count, dtype) for member in self.members]

    def after_own(self) -> Iterator[int]:
        """The other members, beginning with the next: not all read the same one at the same time."""
        for step in range(1, self.size):
            yield (self.rank + step) % self.size


def assemble(channel: Channel, ranks: Sequence[int]) -> Steps[Team | None]:
    """The team of these ranks of the communicator, which all are on this node; collective over the communicator.

    Returns:
        None, on all ranks of the communicator, if one of them has no memory left for its slots.
    """
    engine = channel.engine
    shared = engine.shared
    block = None if shared is None else shared.allocate(BLOCK_BYTES, f"collectives on {channel.where()}")
    if block is not None:
        block.bytes()[:HEAD_BYTES] = 0
    mine = PRIVATE if block is None else block.offset
    offsets = yield from meet(engine.meeting, channel.world_ranks, f"the team of {channel.name}", mine)
    if block is None or min(offsets) == PRIVATE:
        return None
    return Team(channel, block, [Place(channel.world_ranks[rank], offsets[rank]) for rank in ranks])
