"""Pair: an all_reduce of two members' private memory through slots, in which each reduces everything.

That moves as many bytes from core to core as a slice each, in half the steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpdist.algorithms.shared.team import Team
    from mpdist.algorithms.shared.turn import Turn
    from mpdist.memory import Buffer, Folder
    from mpdist.progress.collective import Steps


class Pair:
    """This member's part of one such all_reduce, round by round.

    Attributes:
        rounds: as many as it takes.
        side: the slot of the first.
    """

    def __init__(self, team: Team, x: Buffer, out: Buffer, words: tuple[int, int], before: int, nbytes: int) -> None:
        """Make nothing known yet.

        Args:
            words: in which a member tells up to which round it has shown its input, and read the other's.
            before: the round in these words before the first.
            nbytes: what is shown in a round; it fits into a slot.
        """
        self._team = team
        self._x = x.array()
        self._out = self._x if out is x else out.array()
        self._slots = team.slots(x.element)[0]
        self._shown, self._read = words
        self._before = before
        self.side = (before + 1) % 2
        self._width = nbytes // x.element.itemsize
        self.rounds = max(1, -(-x.count // self._width))

    def stage(self, place: int) -> None:
        """Show a round's input; its slot is free."""
        start, end = self._span(place)
        np.copyto(self._slot(place, self._team.rank)[: end - start], self._x[start:end])

    def reduce(self, folder: Folder, turn: Turn) -> Steps[None]:
        """All rounds; the first is staged and told, and the slot of the second is free."""
        team = self._team
        for place in range(self.rounds):
            number = self._before + place + 1
            if place + 1 < self.rounds:
                if not team.are_at(self._read, number - 1):
                    yield team.all_at(self._read, number - 1)
                self.stage(place + 1)
                team.tell(self._shown, number + 1)
                if turn.is_over:
                    yield turn
            if not team.are_at(self._shown, number):
                yield team.all_at(self._shown, number)
            self._fold(place, folder)
            team.tell(self._read, number)
            if turn.is_over:
                yield turn

    def _fold(self, place: int, folder: Folder) -> None:
        start, end = self._span(place)
        sources = [self._slot(place, member)[: end - start] for member in range(self._team.size)]
        sources[self._team.rank] = self._x[start:end]
        folder.fold(sources, (self._out[start:end],))

    def _slot(self, place: int, member: int) -> np.ndarray:
        return self._slots[(self.side + place) % 2][member]

    def _span(self, place: int) -> tuple[int, int]:
        start = place * self._width
        return start, min(start + self._width, self._x.size)
