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
        inputs: [round % 2][member], where small rounds begin.
        results: for what has been reduced, likewise.
    """

    __slots__ = ("_arenas", "_itemsize", "_lines", "_mine", "_own", "_spread", "_start_at", "inputs", "results")

    def __init__(
        self,
        arenas: list[Array],
        inputs: list[list[Array]],
        results: list[list[Array]],
        lines: Sequence[memoryview],
        start_at: int,
        rank: int,
        spread: Spread,
    ) -> None:
        """Take all memory of the members, their words, and which of these say in which byte a member's rounds begin."""
        self._arenas = arenas
        self._own = arenas[rank]
        self._itemsize = self._own.itemsize
        self.inputs = inputs
        self.results = results
        self._lines = lines
        self._mine = lines[rank]
        self._start_at = start_at
        self._spread = spread

    def show(self, side: int, nbytes: int, *parts: tuple[int, Array]) -> None:
        """Copy parts of a round of `nbytes`, each from an element of the round on; the next `tell` makes it known."""
        start = self._spread.begin(side, nbytes)
        first = start // self._itemsize
        for at, part in parts:
            np.copyto(self._own[first + at : first + at + part.size], part)
        self._spread.end(nbytes)
        self._mine[self._start_at + side] = start

    def array(self, member: int, start: int, count: int) -> Array:
        """Elements of a member's arena, from a byte of it on."""
        first = start // self._itemsize
        return self._arenas[member][first : first + count]

    def shown(self, side: int, member: int) -> Array:
        """What a member shows, from the first element of its round on; it has told of it."""
        start = self._lines[member][self._start_at + side]
        return self._arenas[member][(start if start >= 0 else ~start) // self._itemsize :]

    def starts(self, side: int) -> list[int]:
        """What each member tells of where its round begins."""
        at = self._start_at + side
        return [line[at] for line in self._lines]

    def part(self, side: int, member: int, at: int, mapped_at: int, count: int) -> Array:
        """Elements of what a member shows, from `at` on; where that is a mapped array, from `mapped_at` on."""
        start = self._lines[member][self._start_at + side]
        first = start // self._itemsize + at if start >= 0 else ~start // self._itemsize + mapped_at
        return self._arenas[member][first : first + count]

    def show_mapped(self, side: int, offset: int) -> None:
        """A round is an array that begins with this byte of this member's arena, and is not copied."""
        self._mine[self._start_at + side] = ~offset

    def mark(self, side: int, is_mapped: bool) -> None:
        """Say, besides where a round begins, whether the array that was shown is mapped by the others."""
        at = self._start_at + side
        start = self._mine[at]
        if (start < 0) is not is_mapped:
            self._mine[at] = ~start

    def are_marked(self, side: int) -> bool:
        """Whether all arrays are mapped."""
        for line in self._lines:  # noqa: SIM110  # all() of a generator takes four times as long
            if line[self._start_at + side] >= 0:
                return False
        return True
