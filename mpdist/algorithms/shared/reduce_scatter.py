"""Reduce_scatter of what fits into a slot, as a single request: each shows the others' rows, and reduces its own.

Rows are shown in slots, or where they lie if the others map them. The result is
apart from x, so what a signal's handler interrupts is done again.

The same in a program of several steps takes longer for what Python does than
moving 1 MiB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpdist.algorithms.shared.one_round import RoundPlan, TwoWays
from mpdist.algorithms.shared.small import SPREAD_BYTES

if TYPE_CHECKING:
    from mpdist.algorithms.reduction import Reduction
    from mpdist.algorithms.shared.team import Team
    from mpdist.memory import Buffer
    from mpdist.memory.elements import Array


class ReduceScatterPlan(RoundPlan):
    """Of those of one op, element type and size.

    Attributes:
        folder: what reduces.
        rank: of this member; mine: its row of an array.
        is_spread: rounds may begin elsewhere than their slots, and mapped arrays are not copied.
    """

    __slots__ = ("_at", "_own", "_parts", "_shown_bytes", "_theirs", "folder", "is_spread", "mine", "rank")

    def __init__(self, team: Team, how: Reduction, nbytes: int) -> None:
        super().__init__(team, "reduce_scatter", how.element, nbytes, how.op)
        self.folder = how.folder
        self.rank = rank = team.rank
        columns = self.count // team.size
        self.mine = slice(rank * columns, (rank + 1) * columns)
        parts = (0, slice(0, self.mine.start)), (self.mine.start, slice(self.mine.stop, self.count))
        self._parts = [(at, part) for at, part in parts if part.stop > part.start]
        self._shown_bytes = (self.count - columns) * how.element.itemsize
        self.is_spread = self._shown_bytes >= SPREAD_BYTES
        # Where each shows this member's row: among all but its own.
        self._at = [(rank - (rank > member)) * columns for member in range(team.size)]
        inputs = self.slots.inputs
        self._own = [[side[rank][at : at + part.stop - part.start] for at, part in self._parts] for side in inputs]
        self._theirs = [[slot[at : at + columns] for slot, at in zip(side, self._at, strict=True)] for side in inputs]

    def show(self, side: int, x: Array) -> None:
        """Copy the rows of the others."""
        if self.is_spread:
            self.slots.show(side, self._shown_bytes, *[(at, x[part]) for at, part in self._parts])
            return
        for room, (_, part) in zip(self._own[side], self._parts, strict=True):
            room[...] = x[part]

    def fold(self, side: int, x: Array, out: Array) -> None:
        """Reduce this member's rows of what all have shown in an even or an odd round, and of its own x."""
        rows = self._theirs[side]
        if self.is_spread:
            start, count = self.mine.start, out.size
            rows = [self.slots.part(side, member, at, start, count) for member, at in enumerate(self._at)]
        sources = [*rows]
        sources[self.rank] = x[self.mine]
        self.folder.fold_apart(sources, out)


class ReduceScatter(TwoWays):
    """One such reduce_scatter."""

    _plan: ReduceScatterPlan
    _held: tuple[Buffer, Buffer]
    _is_through = True

    def _show(self, team: Team) -> None:
        plan = self._plan
        self._make_arrays()
        offset = team.shared.offset_of(self._held[0]) if plan.is_spread else None
        if offset is not None and offset % plan.element.itemsize == 0:
            self._is_through = False
            plan.slots.show_mapped(self._side, offset)
        else:
            plan.show(self._side, self._x)

    def _do_share(self, team: Team) -> None:
        if self._out.size:
            self._plan.fold(self._side, self._x, self._out)


ReduceScatterPlan.request = ReduceScatter
