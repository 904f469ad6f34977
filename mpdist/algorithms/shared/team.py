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
consumed round r - 2; how a round that itself has several keeps to that: `either`.
A member that is ahead by a round disturbs nobody. Where its round begins, in the
slot or in a larger one in its place, each member tells: `spread`.

Members that call something else than the others are found by what each tells of
its call. Where rounds still match all fail together and go on; where they don't,
a member gives up, and whoever waits for it hears of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.algorithms.shared.calls import OPERATIONS, are_in_step, begin_alike, call_word, misfit, other_roots
from mpdist.algorithms.shared.members import PRIVATE, TEAM, Members, Place, gather
from mpdist.algorithms.shared.pace import Pace
from mpdist.algorithms.shared.slots import Slots
from mpdist.algorithms.shared.spread import Spread
from mpdist.errors import CommunicationError, MpdistError
from mpdist.memory.arena import Arena, Block
from mpdist.transport.reach import Remote

if TYPE_CHECKING:
    from mpdist.algorithms.shared.moving import Memory
    from mpdist.algorithms.shared.one_round import OneRound, Plan
    from mpdist.memory import Buffer, Element
    from mpdist.memory.elements import Array
    from mpdist.memory.quiet import Call
    from mpdist.progress.channel import Channel
    from mpdist.progress.collective import Steps, Words
    from mpdist.transport.requests import Request

STAGED, REDUCED, CONSUMED, GIVEN_UP = range(4)
# The call, what must be the same on all: of collectives that begin with an even and with an odd round, for the next may
# begin before all have read it.
CALL_AT = 4
# In which byte of a member's arena an even and an odd round begin; all above are in one line of the cache.
START_AT = 6
# Facts about its arrays, likewise.
FACTS_AT = 8
FACTS = 5
X_AT, OUT_AT, FACTOR = 0, 1, 2  # a factor is two words
PACE = FACTOR + 2
ROOT, DST = FACTOR, PACE  # the root of what has no factor, and of a reduce, which has no pace
# The last collective in which a member could not do its share.
FAILED = FACTS_AT + 2 * FACTS
# Rounds within a collective of a pair: up to which one a member has shown its input, and read the other's.
SHOWN, READ = FAILED + 1, FAILED + 2
TAKEN, BARRIER = READ + 1, READ + 2
_WORDS = BARRIER + 1
# The words, in lines of the cache of their own.
HEAD_BYTES = 256

# What a member shows of private memory in one round: two of them, and two halves for what it has reduced, stay in a
# core's cache (1 to 2 MiB) together with what is read. bench/collectives.py.
ROUND_BYTES = 512 * 1024
RESULT_BYTES = ROUND_BYTES // 2
# A slot, and what a pair that has two ways shows in a round: with 512 KiB 1 and 2 MiB took a fifth longer, with
# 256 KiB two thirds. bench/ways.py.
SLOT_BYTES = 2 * ROUND_BYTES
BLOCK_BYTES = HEAD_BYTES + 2 * SLOT_BYTES + 2 * RESULT_BYTES
# A slot whose places the others have lost before they come round again.
LARGE_SLOT_BYTES = 4 * 1024 * 1024

# What a member has in one round where nothing goes through slots.
DIRECT_BYTES = 2 * 1024 * 1024

# So many arrays of others are kept as what they were looked up as, which takes 3 us; it holds nobody's memory.
KNOWN_PLACES = 256
# So many shares of all sizes, each of which takes 3 KiB.
KNOWN_SHARES = 1024


class Reached:
    """All these members have told a round in a word; as a request."""

    __slots__ = ("_fence", "_lines", "_round", "_team", "_word")

    def __init__(self, team: Team, lines: list[memoryview], word: int, to_round: int) -> None:
        self._team = team
        self._lines = lines
        self._word = word
        self._round = to_round
        self._fence = team.shared.fence

    def Test(self) -> bool:
        word, to_round = self._word, self._round
        for line in self._lines:
            if line[word] < to_round:
                if line[GIVEN_UP]:
                    self._team.check_there(line, word, to_round)
                return False
        if self._fence is not None:
            self._fence()
        return True


class _Free:
    """A team's next collective may begin; as a request.

    Requests of one round leave `last_but_one` alone: where one is over, all have begun it, and so are done with those
    before it.
    """

    __slots__ = ("_team",)

    def __init__(self, team: Team) -> None:
        self._team = team

    def Test(self) -> bool:
        team = self._team
        under_way = team.under_way
        if under_way:
            last = under_way[-1]
            if not last.is_over():
                return False
            if under_way:  # interrupted before it went
                under_way.pop()
        return team.have_come(CONSUMED, team.last_but_one)


class Team(Members):
    """Members of a communicator that share memory, and pass arrays through it.

    Attributes:
        has_two_ways: it is a pair that reaches each other's private memory, see `either`.
        rounds: of all collectives so far; the same on all members when the next starts.
        round_bytes: what a member shows in one round at the most.
        first: the round with which the collective under way began.
        last_but_one: the last round that all must have consumed before the next collective begins.
        under_way: requests of one round, in their order.
        plans: of them, by what they do and on how many bytes.
        known: words and plan of all_reduces that are such requests, by op, type and bytes; empty: they are not.
        shares: this member's, of short all_reduces between mapped arrays, by the call and where all arrays are.
        were_mapped: whether the arrays of the last sliced all_reduce, or short one without a pace, were mapped by all.
        paces: of each operation, by which way a pair's private memory goes.
        spread: where this member's rounds begin.
        shown: rounds that its members have shown within collectives so far.
    """

    def __init__(self, channel: Channel, block: Block, members: Sequence[Place]) -> None:
        super().__init__(channel, block, members, _WORDS, GIVEN_UP)
        shared = self.shared
        slots = block.offset + HEAD_BYTES, block.offset + HEAD_BYTES + SLOT_BYTES
        more = partial(_large_slots, shared.arena, self._blocks)
        self.spread = Spread(slots, more, LARGE_SLOT_BYTES, shared.arena.map_now)
        self.has_two_ways = self.size == 2 and shared.reach is not None
        self.rounds = 0
        self._barriers = 0
        self.first = 0
        self.last_but_one = 0
        self._memories: dict[tuple[int, int, int, int], Memory] = {}
        self._slots: dict[int, Slots] = {}
        self.round_bytes = ROUND_BYTES if shared.reach is None else DIRECT_BYTES
        self.under_way: deque[OneRound] = deque()
        self.plans: dict[tuple[Any, ...], Plan] = {}
        self.known: dict[tuple[str, Element, int], tuple[Words, Plan] | tuple[()]] = {}
        self.shares: dict[tuple[int, ...], list[Call]] = {}
        self.paces = {op: Pace() for op in OPERATIONS}
        self.shown = 0
        self.were_mapped = False

    # ------------------------------------------------------------------ keeping step

    def note(self, word: int, to_round: int) -> None:
        """Say so, where the next `tell` wakes whoever waits."""
        self.mine[word] = to_round

    def are_at(self, word: int, to_round: int) -> bool:
        """Whether all others are so far."""
        for line in self.others:
            if line[word] < to_round:
                return False
        if self.fence is not None:
            self.fence()
        return True

    def have_come(self, word: int, to_round: int) -> bool:
        """As `are_at`, for who waits: raises where a member has given up instead."""
        for line in self.others:
            if line[word] < to_round:
                if line[GIVEN_UP]:
                    self.check_there(line, word, to_round)
                return False
        if self.fence is not None:
            self.fence()
        return True

    def all_at(self, word: int, to_round: int) -> Reached:
        """All others are so far."""
        return Reached(self, self.others, word, to_round)

    def one_at(self, member: int, word: int, to_round: int) -> Reached:
        """One member is so far."""
        return Reached(self, [self._lines[member]], word, to_round)

    def is_free(self) -> bool:
        """Whether the next collective may begin; as a request it is `free`."""
        return not self.under_way and self.are_at(CONSUMED, self.last_but_one)

    def free(self) -> Request:
        """The next collective may begin."""
        return _Free(self)

    def begin(self, rounds: int, op: str, nbytes: int, kind: int, *facts: int, is_one_round: bool = False) -> int:
        """Reserve rounds for a collective, and put down where this member's arrays are; the next `tell` makes it known.

        The team is free. At the end every word of this member must be at the collective's last round.

        Args:
            op: the operation; with `nbytes` and `kind`, see `kind_of`, what must be the same on all members, see
                `misfit`.
            is_one_round: members whose calls do not go together all end it, and go on.

        Returns:
            The number before its first round.
        """
        before = self.rounds
        self.rounds += rounds
        self.first = first = before + 1
        # The words of the call and the facts are those of the last collective that began with as odd or even a round.
        self.last_but_one = before if rounds % 2 else first
        self.mine[CALL_AT + first % 2] = call_word(op, nbytes, kind, first, is_one_round)
        at = FACTS_AT + first % 2 * FACTS
        for fact in facts:
            self.mine[at] = fact
            at += 1
        return before

    def enter_barrier(self) -> Reached:
        """Tell that this member has come; the request is complete when all have. Whoever posts it wakes the others."""
        if self.fence is not None:
            self.fence()
        number = self._barriers + 1
        request = self.all_at(BARRIER, number)
        self._barriers = self.mine[BARRIER] = number  # from here on no signal's handler runs
        return request

    def meet(self) -> Steps[None]:
        """A barrier within a program."""
        request = self.enter_barrier()
        self.ring()
        yield request

    # ------------------------------------------------------------------ facts about a collective's arrays

    def facts(self, number: int) -> list[int]:
        """What each member has put down as fact `number`; valid of those that have told a round of this collective."""
        at = FACTS_AT + self.first % 2 * FACTS + number
        return [line[at] for line in self._lines]

    def fact(self, member: int, number: int) -> int:
        """What one member has put down, as of `facts`."""
        return self._lines[member][FACTS_AT + self.first % 2 * FACTS + number]

    def have_same(self, number: int) -> bool:
        """Whether all have put down the same as fact `number`."""
        return len(set(self.facts(number))) == 1

    def misfit(self, members: Sequence[int]) -> MpdistError | None:
        """Why the calls of these members, who have told a round, do not go together; None if they do.

        Others may write into an array as far as their own reaches, so this comes before.
        """
        at = self._call_at()
        mine = self.mine[at]
        for line in self.others:
            if line[at] != mine:
                break
        else:
            return None
        return misfit(self.channel.where(), {self.rank_of(each): self._lines[each][at] for each in members}, mine)

    def are_in_step(self) -> bool:
        """Whether all members are in the same single round; then they can fail together and go on."""
        at = self._call_at()
        return are_in_step([line[at] for line in self._lines])

    def check_fit(self, members: Sequence[int]) -> None:
        """Raise if the members' calls do not go together; then they are out of step."""
        why = self.misfit(members)
        if why is not None:
            self.give_up()
            raise why

    def check_root(self, op: str, number: int) -> None:
        """As check_fit, whether all have put down the same root as fact `number`."""
        if not self.have_same(number):
            self.give_up()
            raise other_roots(op, self.channel.where())

    def undone(self, op: str, number: int) -> CommunicationError | None:
        """Why a collective that began with this round has no result; all have ended it. None: it has one."""
        failed = sorted(self.rank_of(member) for member, line in enumerate(self._lines) if line[FAILED] == number)
        if not failed:
            return None
        listed = ", ".join(map(str, failed))
        return CommunicationError(
            f"{op} on {self.channel.where()}: rank {listed} could not do its share, so the result is undefined; "
            "its own error says why"
        )

    def check_there(self, line: memoryview, word: int, to_round: int) -> None:
        """Raise if a member that has given up is not so far, and so never will be."""
        if self.fence is not None:
            self.fence()
        if line[word] < to_round:  # still: it may have come since it was looked at, and given up after that
            raise self.deserted()

    def deserted(self) -> MpdistError:
        """As of all members; where their calls do not go together, so it says."""
        why = super().deserted()
        at = self._call_at()
        come = [member for member, line in enumerate(self._lines) if begin_alike([line[at], self.mine[at]])]
        return self.misfit(come) or why

    def _call_at(self) -> int:
        return CALL_AT + self.first % 2

    def place_of(self, buffer: Buffer) -> int:
        """Where the others find it: an offset of this member's arena, an address below PRIVATE, or PRIVATE."""
        offset = self.shared.offset_of(buffer)
        if offset is not None:
            return offset
        return PRIVATE if self.shared.reach is None or not buffer.nbytes else PRIVATE - buffer.address

    # ------------------------------------------------------------------ memory

    def memory(self, member: int, place: int, count: int, element: Element) -> Memory | None:
        """A member's memory at a place; None for PRIVATE."""
        if place == PRIVATE:
            return None
        key = member, place, count, element.code
        known = self._memories.get(key)
        if known is None:
            if len(self._memories) == KNOWN_PLACES:
                self._memories.clear()
            known = self._memories[key] = self._memory(member, place, count, element.storage)
        return known

    def _memory(self, member: int, place: int, count: int, dtype: np.dtype[np.generic]) -> Memory:
        world_rank = self.members[member].world_rank
        if place >= 0:
            return self.shared.array(world_rank, place, count, dtype)
        assert self.shared.reach is not None
        return Remote(self.shared.reach, world_rank, PRIVATE - place, count, dtype)

    def slots(self, element: Element) -> Slots:
        """Where private memory is shown, as arrays of this type."""
        known = self._slots.get(element.code)
        if known is None:
            dtype = element.storage
            count = self.shared.arena.nbytes // dtype.itemsize
            arenas = [self.shared.array(member.world_rank, 0, count, dtype) for member in self.members]
            inputs = [self._views(HEAD_BYTES + side * SLOT_BYTES, SLOT_BYTES, dtype) for side in range(2)]
            after = HEAD_BYTES + 2 * SLOT_BYTES
            results = [self._views(after + side * RESULT_BYTES, RESULT_BYTES, dtype) for side in range(2)]
            known = Slots(arenas, inputs, results, self._lines, START_AT, self.rank, self.spread)
            self._slots[element.code] = known
        return known

    def _views(self, start: int, nbytes: int, dtype: np.dtype[np.generic]) -> list[Array]:
        count = nbytes // dtype.itemsize
        return [self.shared.array(member.world_rank, member.offset + start, count, dtype) for member in self.members]

    def after_own(self) -> Iterator[int]:
        """The other members, beginning with the next: not all read the same one at the same time."""
        for step in range(1, self.size):
            yield (self.rank + step) % self.size


def _large_slots(arena: Arena, blocks: list[Block]) -> tuple[int, int] | None:
    """Where large slots are, of memory that is added to the blocks; None where none is left."""
    block = arena.allocate(2 * LARGE_SLOT_BYTES)
    if block is None:
        return None
    blocks.append(block)
    return block.offset, block.offset + LARGE_SLOT_BYTES


def assemble(channel: Channel, ranks: Sequence[int]) -> Steps[Team | None]:
    """The team of these ranks of the communicator, which all are on this node; collective over the communicator.

    Returns:
        None, on all ranks of the communicator, if one of them has no memory left for its slots.
    """
    gathered = yield from gather(channel, ranks, BLOCK_BYTES, HEAD_BYTES, TEAM)
    return None if gathered is None else Team(channel, *gathered)
