"""Pair: two members show each other private memory through slots, and take what the other shows."""

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
    """One such passage of this member, round by round.

    Attributes:
        rounds: as many as it takes.
        side: the slot of the first.
    """

    def __init__(
        self, team: Team, shown: Array, taken: int, element: Element, words: tuple[int, int], before: int, nbytes: int
    ) -> None:
        """Make nothing known yet.

        Args:
            shown: what the other takes.
            taken: so many elements the other shows.
            words: in which a member tells up to which round it has shown its part, and read the other's.
            before: the round in these words before the first.
            nbytes: what is shown in a round at the most; it fits into a slot.
        """
        self._team = team
        self._all = shown
        self._taken = taken
        self._slots = team.slots(element)
        self._shown, self._read = words
        self._before = before
        self.side = (before + 1) % 2
        self._width = nbytes // element.itemsize
        self.rounds = max(1, -(-max(shown.size, taken) // self._width))

    def stage(self, place: int) -> None:
        """Show a round's part; its slot is free."""
        start = place * self._width
        part = self._all[start : start + self._width]
        if part.size:
            self._slots.show((self.side + place) % 2, part.nbytes, (0, part))

    def begin(self) -> Steps[None]:
        """Show the first round, after another passage."""
        if not self._team.are_at(self._read, self._before - 1):
            yield self._team.all_at(self._read, self._before - 1)
        self.stage(0)
        self._team.tell(self._shown, self._before + 1)

    def exchange(self, take: Take, turn: Turn) -> Steps[None]:
        """All rounds; the first is staged and told."""
        team, width = self._team, self._width
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
            start = place * width
            end = min(start + width, self._taken)
            if end > start:
                take(start, end, self._slots.shown((self.side + place) % 2, 1 - team.rank)[: end - start])
            team.tell(self._read, number)
            if turn.is_over:
                yield turn


def reducing(team: Team, folder: Folder, own: Array, out: Array) -> Take:
    """Reduce what the other shows together with this member's own, in the order of ranks."""
    rank = team.rank

    def take(start: int, end: int, theirs: Array) -> None:
        mine = own[start:end]
        folder.fold((theirs, mine) if rank else (mine, theirs), (out[start:end],))

    return take


def copying(target: Array) -> Take:
    """Copy what the other shows."""

    def take(start: int, end: int, theirs: Array) -> None:
        np.copyto(target[start:end], theirs)

    return take
