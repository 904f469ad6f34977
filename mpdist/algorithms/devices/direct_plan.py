"""Direct plan: collectives of members that have each other's arrays open, so that nothing goes through slots; pure.

There is one round, in which nothing is shown but that an array is ready, and a second
one without work: all have taken it when they are done with the others' arrays, which
may change after that.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpdist.algorithms.devices import plan
from mpdist.algorithms.devices.plan import At, Piece, Where
from mpdist.algorithms.shared.reduction import cuts


class _Direct(plan.Whole):
    all_rounds = 2

    def take(self, place: int) -> Iterator[Piece]:
        if place == 0:
            yield from self.all_taken()

    def finish(self, place: int) -> Iterator[Piece]:
        if place == 0:
            yield from self.all_finished()

    def all_taken(self) -> Iterator[Piece]:
        """What is read of the others' x."""
        raise NotImplementedError

    def all_finished(self) -> Iterator[Piece]:
        """What is read of their out."""
        yield from ()


class AllReduce(_Direct):
    """Each member reduces a slice, in its own memory, and copies those of the others."""

    def all_taken(self) -> Iterator[Piece]:
        low, high = self._cuts[self.rank], self._cuts[self.rank + 1]
        sources = [At(Where.X, low, member) for member in range(self.size)]
        yield from self.fold(sources, [At(Where.OUT, low, self.rank)], high - low)

    def all_finished(self) -> Iterator[Piece]:
        for member in self.others():
            low, high = self._cuts[member], self._cuts[member + 1]
            yield from self.move(At(Where.OUT, low, member), At(Where.OUT, low, self.rank), high - low)

    @property
    def _cuts(self) -> tuple[int, ...]:
        return cuts(self.count, self.size, self.size)


class ReduceScatter(_Direct):
    """Each member reduces its row."""

    @property
    def rows(self) -> int:
        return self.size

    def all_taken(self) -> Iterator[Piece]:
        at = self.rank * self.columns
        sources = [At(Where.X, at, member) for member in range(self.size)]
        yield from self.fold(sources, [At(Where.OUT, 0, self.rank)], self.columns)


class AllGather(_Direct):
    """Each member copies the x of all."""

    def all_taken(self) -> Iterator[Piece]:
        for member in (self.rank, *self.others()):
            yield from self.move(At(Where.X, 0, member), At(Where.OUT, member * self.count, self.rank), self.count)


class Broadcast(_Direct, plan.Broadcast):
    """All copy the x of src."""

    def all_taken(self) -> Iterator[Piece]:
        if self.rank != self.src:
            yield from self.move(At(Where.X, 0, self.src), At(Where.X, 0, self.rank), self.count)
