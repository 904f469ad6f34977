"""Small: an all_reduce that every member does as a whole, in one step.

Each shows all of its array in its slot and reduces the slots of all, in the order
of ranks. That is more work than a slice each, and one wait instead of two. It is
a request, not a program: nothing but the copy and the flag happens when posting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from mpdist.algorithms.shared.calls import ROUND_MASK, call_word
from mpdist.algorithms.shared.team import CONSUMED, GIVEN_UP, REDUCED, SMALL_AT, STAGED, Team
from mpdist.errors import MpdistError
from mpdist.memory.quiet import QUIET

if TYPE_CHECKING:
    from mpdist.algorithms.reduction import Reduction
    from mpdist.memory import Buffer
    from mpdist.memory.elements import Array

# Up to this size of an array times the number of members: measured with bench/collectives.py, 2 ranks.
SMALL_BYTES = 512 * 1024
# Up to this size of an array of a pair that has two ways, of which the other may be twice as fast for larger ones:
# where cores share no cache 256 KiB take 150 us in one step and 75 straight; where they do, 47, and 50 in two steps.
SMALL_OF_PAIR_BYTES = 128 * 1024

# Less than this begins where its slot does.
SPREAD_BYTES = 16 * 1024

# So many plans a team keeps, whose views hold no memory of their own.
KNOWN_PLANS = 256


class SmallPlan:
    """What all small all_reduces of one op, element type and size have in common on a team; made for the first.

    Attributes:
        call: its word, but for the number of the round.
        is_spread: whether rounds may begin elsewhere than their slots.
        sources: [round % 2][member], the arrays in their slots; own: this member's.
    """

    __slots__ = ("_folder", "_pair", "call", "is_spread", "own", "slots", "sources")

    def __init__(self, team: Team, how: Reduction, nbytes: int) -> None:
        self._folder = how.folder
        self._pair = how.folder.pair if team.size == 2 else None
        self.call = call_word("all_reduce", nbytes, 0)
        self.is_spread = nbytes >= SPREAD_BYTES
        self.slots = team.slots(how.element)
        count = nbytes // how.element.itemsize
        self.sources = [[slot[:count] for slot in side] for side in self.slots.inputs]
        self.own = [side[team.rank] for side in self.sources]

    @classmethod
    def of(cls, team: Team, how: Reduction, nbytes: int) -> SmallPlan | None:
        """That of the team; None where an all_reduce of its members is done in another way."""
        plan = team.plans.get((how, nbytes))
        if plan is not None or how.op.factor is not None:
            return plan
        if nbytes <= (SMALL_OF_PAIR_BYTES if team.has_two_ways else SMALL_BYTES // team.size):
            if len(team.plans) == KNOWN_PLANS:
                team.plans.clear()
            team.plans[how, nbytes] = plan = cls(team, how, nbytes)
        return plan

    def fold(self, side: int, out: Array) -> None:
        """Reduce what all have shown in an even or an odd round."""
        sources = self.sources[side]
        if self.is_spread:
            sources = [self.slots.shown(side, member)[: out.size] for member in range(len(sources))]
        if self._pair is not None:
            QUIET.call(self._pair, sources[0], sources[1], out=out)
        else:
            self._folder.fold(sources, (out,))


class SmallAllReduce:
    """One such all_reduce; complete when `Test` has seen all slots and reduced them.

    Whoever posts it wakes the other members.
    """

    _why: MpdistError | None = None

    def __init__(self, team: Team, plan: SmallPlan, x: Buffer, out: Buffer) -> None:
        self._plan = plan
        self._held = x, out
        self._x = array = x.bare_array()
        self._out = array if out is x else out.bare_array()
        self._team: Team | None = team
        team.rounds = self._number = number = team.rounds + 1
        self._side = number & 1
        self._call = plan.call | number & ROUND_MASK
        small = team.small
        small.append(self)
        if len(small) == 1:
            for line in team.others:
                if line[CONSUMED] < number - 2:
                    return
            if team.fence is not None:
                team.fence()
            self._stage(team)

    def _stage(self, team: Team) -> None:
        plan, side, mine = self._plan, self._side, team.mine
        if plan.is_spread:
            plan.slots.show(side, self._x.nbytes, (0, self._x))
        else:
            plan.own[side][...] = self._x
        mine[SMALL_AT + side] = self._call
        if team.fence is not None:
            team.fence()
        mine[STAGED] = self._number

    def Test(self) -> bool:
        team = self._team
        if team is None:
            if self._why is not None:
                raise self._why
            return True
        number, call, call_at = self._number, self._call, SMALL_AT + self._side
        if (team.small[0] is not self or team.mine[STAGED] < number) and not self._has_begun(team):
            return False
        for line in team.others:  # as `have_come` and `agree`, without their calls
            if line[STAGED] < number:
                if line[GIVEN_UP]:
                    team.check_there(line, STAGED, number)
                return False
        if team.fence is not None:
            team.fence()
        for line in team.others:
            if line[call_at] != call:
                self._fail(team)
        # Its own slot, too, not x, which `out` may be: a signal handler that raises in here has it done again.
        self._plan.fold(self._side, self._out)
        self._end(team)
        return True

    def _has_begun(self, team: Team) -> bool:
        """Whether those whose rounds come before this one are over, and it has shown its own."""
        while (first := team.small[0]) is not self:
            if not first.is_over():
                return False
        if team.mine[STAGED] < self._number:
            if not team.have_come(CONSUMED, self._number - 2):
                return False
            self._stage(team)
            team.ring()
        return True

    def is_over(self) -> bool:
        """As `Test`, for those that come after it: where all stay in step, its error is its own."""
        try:
            return self.Test()
        except MpdistError:
            if self._team is None:
                return True
            raise

    def _end(self, team: Team) -> None:
        team.small.popleft()
        self._team = None
        mine = team.mine
        if team.fence is not None:
            team.fence()
        mine[REDUCED] = mine[CONSUMED] = self._number
        team.ring()

    def _fail(self, team: Team) -> NoReturn:
        """Raise on all members alike; out of step it stays the first of those under way, which then all fail so."""
        call_at = SMALL_AT + self._side
        self._why = why = team.misfit(range(team.size), call_at)
        assert why is not None
        if team.are_in_step(call_at):
            self._end(team)
        else:
            team.give_up()
        raise why
