"""Slots: the memory through which members of a team show each other private memory, as arrays of one element type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpdist.algorithms.shared.spread import Spread
    from mpdist.memory.elements import Array


class Slots:
    """Those of all members.

    Attributes:
        inputs: [round % 2][member].
        results: for what has been reduced, likewise.
    """

    __slots__ = ("_lines", "_mine", "_rank", "_spread", "_start_at", "inputs", "results")

    def __init__(
        self,
        inputs: list[list[Array]],
        results: list[list[Array]],
        lines: Sequence[memoryview],
        start_at: int,
        rank: int,
        spread: Spread,
    ) -> None:
        """Take the members' words, and which of them say where in its slots a member's rounds begin."""
        self.inputs = inputs
        self.results = results
        self._lines = lines
        self._mine = lines[rank]
        self._start_at = start_at
        self._rank = rank
        self._spread = spread

    def show(self, side: int, nbytes: int, *parts: tuple[int, Array]) -> None:
        """Copy parts of a round of `nbytes`, each from an element of the round on; the next `tell` makes it known."""
        slot = self.inputs[side][self._rank]
        start = self._spread.begin(side, nbytes)
        first = start // slot.itemsize
        for at, part in parts:
            np.copyto(slot[first + at : first + at + part.size], part)
        self._spread.end(nbytes)
        self._mine[self._start_at + side] = start

    def shown(self, side: int, member: int) -> Array:
        """What a member shows, from the first element of its round on; it has told of it."""
        slot = self.inputs[side][member]
        return slot[self._lines[member][self._start_at + side] // slot.itemsize :]
