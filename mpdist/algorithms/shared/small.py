"""Small: an all_reduce that every member does as a whole, in one step.

Each shows all of its array in its slot and reduces the slots of all, in the order
of ranks. That is more work than a slice each, and one wait instead of two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpdist.algorithms.shared.one_round import AllReducePlan, OneRound
from mpdist.algorithms.shared.team import CALL_AT, GIVEN_UP, STAGED, Team

if TYPE_CHECKING:
    from mpdist.algorithms.reduction import Reduction
    from mpdist.memory.elements import Array

# Less than this begins where its slot does.
SPREAD_BYTES = 16 * 1024


class SmallPlan(AllReducePlan):
    """Of those of one op, element type and size.

    Attributes:
        is_spread: whether rounds may begin elsewhere than their slots.
        sources: [round % 2][member], the arrays in their slots; own: this member's.
    """

    __slots__ = ("is_spread", "own", "sources")

    def __init__(self, team: Team, how: Reduction, nbytes: int) -> None:
        super().__init__(team, how, nbytes)
        self.is_spread = nbytes >= SPREAD_BYTES
        self.sources = [[slot[: self.count] for slot in side] for side in self.slots.inputs]
        self.own = [side[team.rank] for side in self.sources]

    def fold(self, side: int, out: Array) -> None:
        """Reduce what all have shown in an even or an odd round."""
        sources = self.sources[side]
        if self.is_spread:
            sources = [self.view(member, start) for member, start in enumerate(self.slots.starts(side))]
        self.folder.fold_apart(sources, out)


class SmallAllReduce(OneRound):
    """One such all_reduce."""

    _plan: SmallPlan

    def _show(self, team: Team) -> None:
        plan, side = self._plan, self._side
        self._make_arrays()
        if plan.is_spread:
            plan.fill(team, side, self._x)
        else:
            plan.own[side][...] = self._x

    def Test(self) -> bool:
        team = self._team
        if team is None:
            return self._is_told()
        if self._is_done:
            return self._end(team)
        number, call, call_at = self._number, self._call, CALL_AT + self._side
        if (team.under_way[0] is not self or team.mine[STAGED] < number) and not self._has_begun(team):
            return False
        for line in team.others:  # as `have_come`, without its call
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
        self._is_done = True
        return self._end(team)


SmallPlan.request = SmallAllReduce
