"""Sliced: an all_reduce of three members and more, of what fits into their slots, as a single request.

Each shows its array in its slot, or where it lies if the others map it, reduces a
slice of all into a slot for results, and takes the slices of all from there. Where
the last arrays were mapped by all, it writes its slice straight to all instead.

Larger arrays take a program of several rounds, see `reduction`, or go from process
to process, see `direct`; either has as much to do in Python as moving 1 MiB takes.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from mpdist.algorithms.shared.moving import copy, fold
from mpdist.algorithms.shared.one_round import AllReducePlan, TwoWays
from mpdist.algorithms.shared.reduction import cuts
from mpdist.algorithms.shared.team import FACTS, FACTS_AT, OUT_AT, REDUCED, X_AT, Team
from mpdist.transport.reach import Remote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpdist.algorithms.reduction import Reduction
    from mpdist.algorithms.shared.moving import Memory
    from mpdist.memory import Buffer
    from mpdist.memory.elements import Array


class SlicedPlan(AllReducePlan):
    """Of those of one op, element type and size.

    Attributes:
        slices: of each member; mine: of this one.
        results: [round % 2][member], the arrays in which they are shown.
    """

    __slots__ = ("mine", "results", "slices")

    def __init__(self, team: Team, how: Reduction, nbytes: int) -> None:
        super().__init__(team, how, nbytes)
        at = cuts(self.count, team.size, team.size)
        self.slices = [slice(start, end) for start, end in itertools.pairwise(at)]
        self.mine = self.slices[team.rank]
        self.results = [
            [room[: part.stop - part.start] for room, part in zip(side, self.slices, strict=True)]
            for side in self.slots.results
        ]

    def show(self, side: int, x: Array, offset: int | None) -> None:
        """What the others need of x, which lies at this byte of this member's arena; None: it is private."""
        if offset is not None and offset % x.itemsize == 0:
            self.slots.show_mapped(side, offset)
            return
        parts = (0, x[: self.mine.start]), (self.mine.stop, x[self.mine.stop :])
        self.slots.show(side, self.nbytes, *[part for part in parts if part[1].size])

    def fold(self, side: int, x: Array) -> None:
        """This member's slice of what all have shown in an even or an odd round, and of its own x."""
        self.fold_all(side, x, [self.view(member, start) for member, start in enumerate(self.slots.starts(side))])

    def fold_all(self, side: int, x: Array, inputs: Sequence[Memory]) -> None:
        """This member's slice of the inputs, and of its own x, into its slot for results."""
        part = self.mine
        if part.start == part.stop:
            return
        sources: list[Any] = [whole[part] for whole in inputs]
        sources[self.rank] = x[part]
        result = self.results[side][self.rank]
        if Remote in map(type, sources):
            fold(self.folder, sources, [result])
        else:
            self.folder.fold_apart(sources, result)

    def take(self, side: int, out: Array) -> None:
        """The slices of all."""
        for part, result in zip(self.slices, self.results[side], strict=True):
            out[part] = result


class SlicedAllReduce(TwoWays):
    """One such all_reduce."""

    _plan: SlicedPlan
    _is_folded = False
    _held: tuple[Buffer, Buffer]

    def _show(self, team: Team) -> None:
        plan, side, mine = self._plan, self._side, team.mine
        x, out = self._held
        offset = team.shared.offset_of(x)
        self._make_arrays()
        self._is_through = not team.were_mapped
        if self._is_through:
            plan.show(side, self._x, offset)
        else:
            plan.slots.mark(side, offset is not None)
            at = FACTS_AT + side * FACTS
            mine[at + X_AT] = place = team.place_of(x)
            mine[at + OUT_AT] = place if out is x else team.place_of(out)

    def _go_on(self, team: Team) -> bool:
        number, side, plan = self._number, self._side, self._plan
        if team.mine[REDUCED] < number:
            if not self._have_come(team):
                return False
            team.were_mapped = team.shared.reach is not None and plan.slots.are_marked(side)
            if not self._is_through:
                return self._go_straight(team)
            plan.fold(side, self._x)
            team.tell(REDUCED, number)  # from now on it is not done again, for others may write to what they have shown
        if not team.have_come(REDUCED, number):
            return False
        plan.take(side, self._out)
        team.channel.engine.credit -= plan.credit
        self._is_done = True
        return self._end(team)

    def _do_share(self, team: Team) -> None:
        plan, side = self._plan, self._side
        if not self._is_folded:
            plan.fold_all(side, self._x, self._memory(team, X_AT))
            self._is_folded = True  # from now on the inputs may be overwritten
        result = plan.results[side][plan.rank]
        for member, whole in enumerate(self._memory(team, OUT_AT)):
            copy(self._out[plan.mine] if member == plan.rank else whole[plan.mine], result)

    def _memory(self, team: Team, fact: int) -> list[Any]:
        """The arrays of all members."""
        plan = self._plan
        places = enumerate(team.facts(fact))
        return [team.memory(member, place, plan.count, plan.element) for member, place in places]


SlicedPlan.request = SlicedAllReduce
