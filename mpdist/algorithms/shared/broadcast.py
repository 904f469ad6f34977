"""Broadcast of what fits into a slot, as a single request.

Where members reach each other's memory, the root writes one part in `size` of each
other's array, who takes the rest; so no member is idle while another copies. Else
the root shows all in its slot, or where it lies if the others map it.

The same in a program of several steps takes longer for what Python does than
moving 1 MiB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpdist.algorithms.shared.calls import other_roots
from mpdist.algorithms.shared.moving import copy
from mpdist.algorithms.shared.one_round import RoundPlan, TwoWays
from mpdist.algorithms.shared.reduction import cuts
from mpdist.algorithms.shared.team import FACTS, FACTS_AT, ROOT, X_AT

if TYPE_CHECKING:
    from mpdist.algorithms.shared.moving import Memory
    from mpdist.algorithms.shared.team import Team
    from mpdist.memory import Buffer, Element


class BroadcastPlan(RoundPlan):
    """Of those from one root, of one element type and size.

    Attributes:
        root: the member.
        cut: where what the root writes begins; None: it shows all instead.
    """

    __slots__ = ("cut", "root")

    def __init__(self, team: Team, element: Element, nbytes: int, root: int) -> None:
        super().__init__(team, "broadcast", element, nbytes)
        self.root = root
        self.cut: int | None = None
        if team.shared.reach is not None and nbytes:
            *_, self.cut, _ = cuts(self.count, team.size, team.size)


class Broadcast(TwoWays):
    """One such broadcast; x and out are the same array."""

    _plan: BroadcastPlan
    _held: tuple[Buffer, Buffer]
    _is_through = True

    def _show(self, team: Team) -> None:
        plan, side, x = self._plan, self._side, self._held[0]
        at = FACTS_AT + side * FACTS
        self._make_arrays()
        team.mine[at + ROOT] = plan.root
        if plan.cut is not None:
            self._is_through = False
            team.mine[at + X_AT] = team.place_of(x)
        elif plan.root == team.rank:
            offset = team.shared.offset_of(x)
            if offset is not None and offset % plan.element.itemsize == 0:
                self._is_through = False
                plan.slots.show_mapped(side, offset)
            else:
                plan.slots.show(side, plan.nbytes, (0, self._x))

    def _do_share(self, team: Team) -> None:
        plan, x = self._plan, self._x
        root, cut = plan.root, plan.cut
        if not team.have_same(ROOT):
            self._why = other_roots("broadcast", team.channel.where())
        elif cut is None:
            if root != team.rank:
                np.copyto(x, plan.slots.shown(self._side, root)[: plan.count])
        elif root != team.rank:
            copy(x[:cut], self._array_of(team, root)[:cut])
        else:
            for member in team.after_own():
                copy(self._array_of(team, member)[cut:], x[cut:])

    def _array_of(self, team: Team, member: int) -> Memory:
        """Another member's, which this one reaches."""
        memory = team.memory(member, team.fact(member, X_AT), self._plan.count, self._plan.element)
        assert memory is not None
        return memory


BroadcastPlan.request = Broadcast
