"""Short: an all_reduce of a pair that has two ways, see `either`, of what fits into a slot, as a single request.

The same in a program of several steps takes three times as long for what Python
does, and longer than moving 1 MiB. Besides, members whose arrays are mapped copy
nothing into slots here, unlike in `small`.
"""

from __future__ import annotations

from itertools import starmap
from operator import length_hint, setitem
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpdist.algorithms.shared.moving import SCRATCH
from mpdist.algorithms.shared.one_round import AllReducePlan, TwoWays
from mpdist.algorithms.shared.reduction import cuts
from mpdist.algorithms.shared.team import FACTS, FACTS_AT, KNOWN_SHARES, OUT_AT, PACE, X_AT, Team
from mpdist.memory.quiet import QUIET, Call
from mpdist.transport.reach import Remote

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpdist.algorithms.reduction import Reduction
    from mpdist.memory import Buffer
    from mpdist.memory.elements import Array

# Up to so much private memory goes through slots in any case; straight takes as long at best.
SLOTS_BYTES = 64 * 1024


Places: TypeAlias = tuple[int, int, int, int]
"""Where this member's x and out are, and the other's, see Team.place_of."""


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

    def reducing(self, mine: Array, theirs: Array, out: Array) -> list[Call]:
        """In the order of ranks."""
        first, second = (mine, theirs) if self.is_first else (theirs, mine)
        return self.folder.calls_for_pair(first, second, out)

    def between_mapped(self, team: Team, places: Places) -> list[Call] | None:
        """This member's whole share, to be made once, where all arrays of both are mapped; None where one is not."""
        key = self.call, *places
        known = team.shares.get(key)
        if known is None and min(places) >= 0:
            own, peer = team.rank, 1 - team.rank
            members = own, own, peer, peer
            arrays: list[Any] = [team.memory(*at, self.count, self.element) for at in zip(members, places, strict=True)]
            x, out, theirs, target = (array[self.mine] for array in arrays)
            if len(team.shares) == KNOWN_SHARES:
                team.shares.clear()
            known = team.shares[key] = [*self.reducing(x, theirs, out), (setitem, target, ..., out)]
        return known


class ShortAllReduce(TwoWays):
    """One such all_reduce."""

    _plan: ShortPlan
    _held: tuple[Buffer, Buffer]
    _is_private = False
    _calls: Iterator[Call] | None = None
    """Over those of NumPy that are not to be made twice; it has left what is to be made."""
    _number_of_calls = 0
    _start = _shown = 0.0

    def _show(self, team: Team) -> None:
        plan, side, mine, pace = self._plan, self._side, team.mine, self._plan.pace
        x, out = self._held
        at = FACTS_AT + side * FACTS
        if pace is None:
            self._is_through = not team.were_mapped
            if self._is_through:
                plan.slots.show(side, plan.nbytes, (0, self._x))
                is_mapped = team.shared.offset_of(x) is not None
            else:
                mine[at + X_AT] = place = team.place_of(x)
                mine[at + OUT_AT] = place if out is x else team.place_of(out)
                is_mapped = place >= 0
            plan.slots.mark(side, is_mapped)
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
            self._make(plan.reducing(self._x, plan.slots.shown(side, 1 - team.rank)[: plan.count], self._out))
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
        plan, part, at = self._plan, self._plan.mine, FACTS_AT + self._side * FACTS
        mine, other = team.mine, team.others[0]
        x_at, out_at = other[at + X_AT], other[at + OUT_AT]
        known = plan.between_mapped(team, (mine[at + X_AT], mine[at + OUT_AT], x_at, out_at))
        if known is not None:
            if not self._goes_on():
                self._make(known)
            return
        peer, out = 1 - team.rank, self._out[part]
        theirs: Any = team.memory(peer, x_at, plan.count, plan.element)
        if not self._goes_on():
            if type(theirs) is Remote:
                (room,) = SCRATCH.rows(1, out.size, out.dtype)
                theirs.read_into(room, part.start)
            else:
                room = theirs[part]
            self._make(plan.reducing(self._x[part], room, out))
        target: Any = theirs if out_at == x_at else team.memory(peer, out_at, plan.count, plan.element)
        if type(target) is Remote:
            target.write(out, part.start)
        else:
            np.copyto(target[part], out)

    def _make(self, calls: Sequence[Call]) -> None:
        self._number_of_calls = len(calls)
        self._calls = iter(calls)
        for _ in starmap(QUIET.call, self._calls):
            pass

    def _goes_on(self) -> bool:
        """Whether it was interrupted after the first call; then those that are left are made now."""
        calls = self._calls
        if calls is None or length_hint(calls) == self._number_of_calls:
            return False
        for _ in starmap(QUIET.call, calls):
            pass
        return True


ShortPlan.request = ShortAllReduce
