"""Short: an all_reduce of a pair that has two ways, see `either`, of what fits into a slot, as a single request.

The same in a program of several steps takes three times as long for what Python
does, and longer than moving 1 MiB. Besides, members whose arrays are mapped copy
nothing into slots here, unlike in `small`.
"""

from __future__ import annotations

from itertools import starmap
from operator import length_hint, setitem
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.algorithms.shared.moving import SCRATCH
from mpdist.algorithms.shared.one_round import AllReducePlan, TwoWays
from mpdist.algorithms.shared.reduction import cuts
from mpdist.algorithms.shared.team import (
    CALL_AT,
    FACTS,
    FACTS_AT,
    GIVEN_UP,
    KNOWN_SHARES,
    OUT_AT,
    PACE,
    STAGED,
    START_AT,
    X_AT,
    Team,
)
from mpdist.memory.quiet import QUIET, Call
from mpdist.transport.reach import Remote

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpdist.algorithms.reduction import Reduction
    from mpdist.algorithms.shared.pace import Pace
    from mpdist.memory import Buffer
    from mpdist.memory.elements import Array

# Up to so much private memory goes through slots in any case; straight takes as long at best.
SLOTS_BYTES = 64 * 1024


class ShortPlan(AllReducePlan):
    """Of those of one op, element type and size.

    Attributes:
        pace: by which way private memory goes; None: through slots, and so does mapped memory but where the last one
            of both was mapped.
        is_first: whether this is the first member.
        peer: the other one.
        mine: the slice that this member reduces where nothing goes through slots.
    """

    __slots__ = ("is_first", "mine", "pace", "peer")

    def __init__(self, team: Team, how: Reduction, nbytes: int) -> None:
        super().__init__(team, how, nbytes)
        self.pace = team.paces["all_reduce"] if nbytes > SLOTS_BYTES else None
        self.is_first = team.rank == 0
        self.peer = 1 - team.rank
        at = cuts(self.count, 2, 2)
        self.mine = slice(at[team.rank], at[team.rank + 1])

    def reducing(self, mine: Array, theirs: Array, out: Array) -> list[Call]:
        """In the order of ranks."""
        first, second = (mine, theirs) if self.is_first else (theirs, mine)
        return self.folder.calls_for_pair(first, second, out)

    def between_mapped(self, team: Team, mine: memoryview, other: memoryview, at: int) -> list[Call] | None:
        """This member's whole share, to be made once, where all arrays of both are mapped; None where one is not."""
        key = self.call, mine[at + X_AT], mine[at + OUT_AT], other[at + X_AT], other[at + OUT_AT]
        known = team.shares.get(key)
        return self._between_mapped(team, key) if known is None else known

    def _between_mapped(self, team: Team, key: tuple[int, ...]) -> list[Call] | None:
        _, *places = key
        if min(places) < 0:
            return None
        own, peer = team.rank, self.peer
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
        pace, mine, start_at = self._plan.pace, team.mine, START_AT + self._side
        if pace is not None:
            self._show_by_pace(team, pace)
        elif team.were_mapped:
            self._is_through = False
            place = self._tell_places(team)
            mine[start_at] = ~place if place >= 0 else 0
        else:
            self._is_through = True
            self._make_arrays()
            self._plan.fill(team, self._side, self._x)
            if team.shared.offset_of(self._held[0]) is not None:
                mine[start_at] = ~mine[start_at]

    def _show_by_pace(self, team: Team, pace: Pace) -> None:
        plan, at = self._plan, FACTS_AT + self._side * FACTS
        place = self._tell_places(team)
        team.mine[at + PACE] = pace.word
        is_through = pace.is_through_slots(plan.nbytes)
        start = perf_counter()
        if place < 0 and team.mine[at + OUT_AT] < 0:
            self._is_private = True
            if is_through:
                self._is_through = True
                self._make_arrays()
                plan.fill(team, self._side, self._x)
        self._shown = perf_counter() - start

    def _tell_places(self, team: Team) -> int:
        """Put down where this member's arrays are; gives x's."""
        x, out = self._held
        at = FACTS_AT + self._side * FACTS
        team.mine[at + X_AT] = place = team.place_of(x)
        team.mine[at + OUT_AT] = place if out is x else team.place_of(out)
        return place

    def Test(self) -> bool:
        # Written out, where others take four calls: 0.35 us.
        team = self._team
        if team is None:
            return self._is_told()
        if self._is_done:
            return self._end(team) if self._is_through else self._has_gone_straight(team)
        number, side, plan = self._number, self._side, self._plan
        mine, other = team.mine, team.others[0]
        if (team.under_way[0] is not self or mine[STAGED] < number) and not self._has_begun(team):
            return False
        if other[STAGED] < number:
            if other[GIVEN_UP]:
                team.check_there(other, STAGED, number)
            return False
        if team.fence is not None:
            team.fence()
        if other[CALL_AT + side] != self._call:
            self._fail(team)
        start = other[START_AT + side]
        if plan.pace is None:
            team.were_mapped = start < 0 and mine[START_AT + side] < 0
        else:
            self._follow(team, plan.pace)
        if not self._is_through:
            known = plan.between_mapped(team, mine, other, FACTS_AT + side * FACTS)
            if known is None:
                return self._go_straight(team)
            if self._calls is None:
                self._calls = iter(known)
            for _ in starmap(QUIET.call, self._calls):
                pass
            self._is_done = True
            return self._has_gone_straight(team)
        if self._calls is None:
            self._calls = iter(plan.reducing(self._x, plan.view(plan.peer, start), self._out))
        for _ in starmap(QUIET.call, self._calls):
            pass
        if plan.pace is not None and plan.is_first and not team.spread.is_trying:
            plan.pace.took(plan.nbytes, True, self._shown + perf_counter() - self._start)
        team.channel.engine.credit -= plan.credit
        self._is_done = True
        return self._end(team)

    def _follow(self, team: Team, pace: Pace) -> None:
        """Go by the way that both know of now, and hear which is to be the next one's."""
        mine, other, at = team.mine, team.others[0], FACTS_AT + self._side * FACTS
        pace.hear((mine if self._plan.is_first else other)[at + PACE])
        if other[at + X_AT] >= 0 or other[at + OUT_AT] >= 0:
            self._is_private = self._is_through = False
        self._start = self._start or perf_counter()

    def _has_gone_straight(self, team: Team) -> bool:
        if not super()._has_gone_straight(team):
            return False
        plan = self._plan
        if plan.pace is not None and plan.is_first and self._is_private:
            plan.pace.took(plan.nbytes, False, self._shown + perf_counter() - self._start)
        return True

    def _do_share(self, team: Team) -> None:
        self._make_arrays()
        plan, part, at = self._plan, self._plan.mine, FACTS_AT + self._side * FACTS
        other = team.others[0]
        x_at, out_at = other[at + X_AT], other[at + OUT_AT]
        peer, out = plan.peer, self._out[part]
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
