"""One GPU: plans for members that all use the same one, on which their kernels take turns; pure.

A GPU works for one process at a time, and to let another one work takes it 140 us (H100). So
what counts is how often members take turns, not how many bytes they move. Where one
of them reaches all arrays, it does the work of all. Over slots each member reduces all of the
array for itself, instead of a part for all: more bytes, and one turn less.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpdist.algorithms.devices import plan
from mpdist.algorithms.devices.plan import At, Piece, Where

LEADER = 0


class _Led(plan.Whole):
    """In one round: all show nothing but that their arrays are ready, and LEADER takes, and gives, for all.

    Nobody is done before all have taken: then the arrays belong to their members again.
    """

    tells_late = True

    def take(self, place: int) -> Iterator[Piece]:
        if self.rank == LEADER:
            yield from self.all_work()

    def all_work(self) -> Iterator[Piece]:
        """What brings all members their results."""
        raise NotImplementedError

    def folded(self, start: int, targets: list[At], count: int) -> Iterator[Piece]:
        """The reduction of so many elements of all x, from `start` on."""
        yield from self.fold([At(Where.X, start, member) for member in range(self.size)], targets, count)


class AllReduce(_Led):
    """Each result goes to all."""

    def all_work(self) -> Iterator[Piece]:
        yield from self.folded(0, [At(Where.OUT, 0, member) for member in range(self.size)], self.count)


class ReduceScatter(_Led):
    """Each row goes to its member."""

    @property
    def rows(self) -> int:
        return self.size

    def all_work(self) -> Iterator[Piece]:
        for member in range(self.size):
            yield from self.folded(member * self.columns, [At(Where.OUT, 0, member)], self.columns)


class AllGather(_Led):
    """Each x goes to all."""

    def all_work(self) -> Iterator[Piece]:
        for target in range(self.size):
            for source in range(self.size):
                at = At(Where.OUT, source * self.count, target)
                yield from self.move(At(Where.X, 0, source), at, self.count)


class Broadcast(_Led, plan.Broadcast):
    """The x of src goes to all others."""

    def all_work(self) -> Iterator[Piece]:
        for member in range(self.size):
            if member != self.src:
                yield from self.move(At(Where.X, 0, self.src), At(Where.X, 0, member), self.count)


class AllReduceOverSlots(plan.Even):
    """Each member shows all it has, and reduces all that all have shown."""

    def show(self, place: int) -> Iterator[Piece]:
        start, end = self.span(place)
        yield from self.move(At(Where.X, start, self.rank), At(Where.SLOT, 0, self.rank), end - start)

    def take(self, place: int) -> Iterator[Piece]:
        start, end = self.span(place)
        sources = [At(Where.SLOT, 0, member) for member in range(self.size)]
        yield from self.fold(sources, [At(Where.OUT, start, self.rank)], end - start)
