"""Pair: two members show each other private memory through slots, and take what the other shows.

In an all_reduce each shows all and reduces everything: as many bytes move from core
to core as with a slice each, in half the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from mpdist.memory.elements import Array

if TYPE_CHECKING:
    from mpdist.algorithms.shared.team import Team
    from mpdist.algorithms.shared.turn import Turn
    from mpdist.memory import Element, Folder
    from mpdist.progress.collective import Steps

Take: TypeAlias = Callable[[int, int, Array], None]
"""Do with the other's elements, from the first number to before the second, what is to be done; valid in the call."""


class Pair:
    """This member's part of one such collective, round by round.

    Attributes:
        rounds: as many as it takes.
        side: the slot of the first.
    """

    def __init__(
        self, team: Team, shown: Array, element: Element, words: tuple[int, int], before: int, nbytes: int
    ) -> None:
        """Make nothing known yet.

        Args:
            shown: as much as the other shows.
            words: in which a member tells up to which round it has shown its part, and read the other's.
            before: the round in these words before the first.
            nbytes: what is shown in a round; it fits into a slot.
        """
        self._team = team
        self._parts = shown
        self._slots = team.slots(element)[0]
        self._shown, self._read = words
        self._before = before
        self.side = (before + 1) % 2
        self._width = nbytes // element.itemsize
        self.rounds = max(1, -(-shown.size // self._width))

    def stage(self, place: int) -> None:
        """Show a round's part; its slot is free."""
        start, end = self._span(place)
        np.copyto(self._slot(place, self._team.rank)[: end - start], self._parts[start:end])

    def exchange(self, take: Take, turn: Turn) -> Steps[None]:
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
            start, end = self._span(place)
            take(start, end, self._slot(place, 1 - team.rank)[: end - start])
            team.tell(self._read, number)
            if turn.is_over:
                yield turn

    def _slot(self, place: int, member: int) -> Array:
        return self._slots[(self.side + place) % 2][member]

    def _span(self, place: int) -> tuple[int, int]:
        start = place * self._width
        return start, min(start + self._width, self._parts.size)


def reducing(team: Team, folder: Folder, own: Array, out: Array) -> Take:
    """Reduce what the other shows together with this member's own, in the order of ranks."""
    rank = team.rank

    def take(start: int, end: int, theirs: Array) -> None:
        mine = own[start:end]
        folder.fold((theirs, mine) if rank else (mine, theirs), (out[start:end],))

    return take
