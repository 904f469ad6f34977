"""Short: an all_reduce of a pair that has two ways, see `either`, of what fits into a slot, as a single request.

The same in a program of several steps takes three times as long for what Python
does, and longer than moving 1 MiB. Besides, members whose arrays are mapped copy
nothing into slots here, unlike in `small`.
"""

from __future__ import annotations

from operator import call, length_hint
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.algorithms.shared.moving import SCRATCH
from mpdist.algorithms.shared.one_round import AllReducePlan, TwoWays
from mpdist.algorithms.shared.reduction import OUT_AT, PACE, X_AT, cuts
from mpdist.algorithms.shared.team import FACTS, FACTS_AT, Team
from mpdist.transport.reach import Remote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpdist.algorithms.reduction import Reduction
    from mpdist.memory import Buffer
    from mpdist.memory.elements import Array

# Up to so much private memory goes through slots in any case; straight takes as long at best.
SLOTS_BYTES = 64 * 1024


class ShortPlan(AllReducePlan):
    """Of those of one op, element type and size.

    Attributes:
        pace: by which way private memory goes; None: through slots, and so does mapped memory but where the last one
            of both was mapped.
        mine: the slice that this member reduces where nothing goes through slots.
        is_first: whether this is the first member.
    """

    __slots__ = ("is_first", "mine", "pace")

    def __init__(self, team: Team, how: Reduction, nbytes: int) -> None:
        super().__init__(team, how, nbytes)
        self.pace = team.paces["all_reduce"] if nbytes > SLOTS_BYTES else None
        self.is_first = team.rank == 0
        at = cuts(self.count, 2, 2)
        self.mine = slice(at[team.rank], at[team.rank + 1])


class ShortAllReduce(TwoWays):
    """One such all_reduce."""

    _plan: ShortPlan
    _held: tuple[Buffer, Buffer]
    _is_private = False
    _calls: Iterator[Callable[[], object]] | None = None
    """An iterator over the calls of NumPy that are not to be made twice, which has left what is to be made."""
    _start = 0.0

    def _show(self, team: Team) -> None:
        plan, side, mine, pace = self._plan, self._side, team.mine, self._plan.pace
        x, out = self._held
        at = FACTS_AT + side * FACTS
        if pace is None:
            self._is_through = not team.were_mapped
            if self._is_through:
                plan.slots.show(side, plan.nbytes, (0, self._x))
            else:
                mine[at + X_AT] = place = team.place_of(x)
                mine[at + OUT_AT] = place if out is x else team.place_of(out)
            plan.slots.mark(side, team.shared.offset_of(x) is not None)
        else:
            mine[at + X_AT] = place = team.place_of(x)
            mine[at + OUT_AT] = out_place = place if out is x else team.place_of(out)
            mine[at + PACE] = pace.word
            is_through = pace.is_through_slots(plan.nbytes)
            start = perf_counter()
            if place < 0 and out_place < 0:
                self._is_private = True
                if is_through:
                    self._is_through = True
                    plan.slots.show(side, plan.nbytes, (0, self._x))
            self._shown = perf_counter() - start

    def _go_on(self, team: Team) -> bool:
        if not self._have_come(team):
            return False
        plan, side, other = self._plan, self._side, team.others[0]
        at, pace = FACTS_AT + side * FACTS, plan.pace
        if pace is None:
            team.were_mapped = plan.slots.are_marked(side)
        else:
            pace.hear((team.mine if plan.is_first else other)[at + PACE])
            if other[at + X_AT] >= 0 or other[at + OUT_AT] >= 0:
                self._is_private = self._is_through = False
            self._start = self._start or perf_counter()
        if not self._is_through:
            return self._go_straight(team)
        if not self._goes_on():
            self._reduce(self._x, plan.slots.shown(side, 1 - team.rank)[: plan.count], self._out)
        if pace is not None and plan.is_first and not team.spread.is_trying:
            pace.took(plan.nbytes, True, self._shown + perf_counter() - self._start)
        team.channel.engine.credit -= plan.credit
        self._is_done = True
        return self._end(team)

    def _has_gone_straight(self, team: Team) -> bool:
        if not super()._has_gone_straight(team):
            return False
        plan = self._plan
        if plan.pace is not None and plan.is_first and self._is_private:
            plan.pace.took(plan.nbytes, False, self._shown + perf_counter() - self._start)
        return True

    def _do_share(self, team: Team) -> None:
        plan, peer, part = self._plan, 1 - team.rank, self._plan.mine
        x_at, out_at = team.fact(peer, X_AT), team.fact(peer, OUT_AT)
        out = self._out[part]
        theirs: Any = team.memory(peer, x_at, plan.count, plan.element)
        if not self._goes_on():
            if type(theirs) is Remote:
                (room,) = SCRATCH.rows(1, out.size, out.dtype)
                theirs.read_into(room, part.start)
            else:
                room = theirs[part]
            self._reduce(self._x[part], room, out)
        target: Any = theirs if out_at == x_at else team.memory(peer, out_at, plan.count, plan.element)
        if type(target) is Remote:
            target.write(out, part.start)
        else:
            np.copyto(target[part], out)

    def _goes_on(self) -> bool:
        """Whether it was interrupted after the first call; then those that are left are made now."""
        calls = self._calls
        if calls is None or length_hint(calls) == self._plan.folder.pair_steps:
            return False
        for _ in map(call, calls):
            pass
        return True

    def _reduce(self, mine: Array, theirs: Array, out: Array) -> None:
        plan = self._plan
        first, second = (mine, theirs) if plan.is_first else (theirs, mine)
        self._calls = iter(plan.folder.calls_for_pair(first, second, out))
        for _ in map(call, self._calls):
            pass


ShortPlan.request = ShortAllReduce
