"""Small: an all_reduce that every member does as a whole, in one step.

Each shows all of its array in its slot and reduces the slots of all, in the order
of ranks. That is more work than a slice each, and one wait instead of two. It is
a request, not a program: nothing but the copy and the flag happens when posting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import numpy as np

from mpdist.algorithms.shared.calls import call_word
from mpdist.algorithms.shared.team import CONSUMED, REDUCED, SMALL_AT, STAGED, Team
from mpdist.errors import MpdistError

if TYPE_CHECKING:
    from mpdist.algorithms.reduction import Reduction
    from mpdist.memory import Buffer, Folder

# Up to this size of an array times the number of members: measured with bench/collectives.py, 2 ranks.
SMALL_BYTES = 512 * 1024

# Less than this begins where its slot does.
SPREAD_BYTES = 16 * 1024


class SmallAllReduce:
    """One such all_reduce; complete when `Test` has seen all slots and reduced them."""

    __slots__ = ("_call", "_call_at", "_folder", "_number", "_out", "_slots", "_team", "_why", "_x")

    def __init__(self, team: Team, x: Buffer, out: Buffer, folder: Folder) -> None:
        self._team: Team | None = team
        self._why: MpdistError | None = None
        self._folder = folder
        self._x = x.array()
        self._out = self._x if out is x else out.array()
        team.rounds = self._number = number = team.rounds + 1
        self._slots = team.slots(x.element)
        self._call = call_word("all_reduce", x.nbytes, number)
        self._call_at = SMALL_AT + (number & 1)
        team.small.append(self)
        if len(team.small) == 1 and team.are_at(CONSUMED, number - 2):
            self._stage(team)

    @staticmethod
    def fits(team: object, x: Buffer, how: Reduction) -> bool:
        """Whether an all_reduce of the members of a team is done this way."""
        return isinstance(team, Team) and x.nbytes * team.size <= SMALL_BYTES and how.op.factor is None

    def _stage(self, team: Team) -> None:
        side, x = self._number & 1, self._x
        if x.nbytes < SPREAD_BYTES:
            np.copyto(self._slots.inputs[side][team.rank][: x.size], x)
        else:
            self._slots.show(side, x.nbytes, (0, x))
        team.note(self._call_at, self._call)
        team.tell(STAGED, self._number)

    def Test(self) -> bool:
        team = self._team
        if team is None:
            if self._why is not None:
                raise self._why
            return True
        number = self._number
        while (first := team.small[0]) is not self:  # whose rounds come before this one
            if not first.is_over():
                return False
        if team.staged < number:
            if not team.have_come(CONSUMED, number - 2):
                return False
            self._stage(team)
        if not team.have_come(STAGED, number):
            return False
        if not team.agree(self._call_at, self._call):
            self._fail(team)
        # Its own slot, too, not x, which `out` may be: a signal handler that raises in here has it done again.
        side, count = number & 1, self._x.size
        if self._x.nbytes < SPREAD_BYTES:
            sources = [slot[:count] for slot in self._slots.inputs[side]]
        else:
            sources = [self._slots.shown(side, member)[:count] for member in range(team.size)]
        self._folder.fold(sources, (self._out,))
        self._end(team)
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
        team.note(REDUCED, self._number)
        team.tell(CONSUMED, self._number)

    def _fail(self, team: Team) -> NoReturn:
        """Raise on all members alike; out of step it stays the first of those under way, which then all fail so."""
        self._why = why = team.misfit(range(team.size), self._call_at)
        assert why is not None
        if team.are_in_step(self._call_at):
            self._end(team)
        else:
            team.give_up()
        raise why
