"""Plan: what a member does in each round of a collective over slots on devices; pure.

A round has up to three parts. What a member *shows* goes into its slot, which it has
twice, for rounds by turns; it *takes* what all have shown; and where it reduces, it
*finishes* by copying what the others have reduced. What a part needs of the others:

    show(n)    all have taken round n - 2: the slot is free again
    take(n)    all have shown round n; so all have finished round n - 2, and what was reduced then may be overwritten
    finish(n)  all have taken round n

A member's own memory is touched by itself only, in the order of parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

from mpdist.algorithms.shared.reduction import cuts

# What a member shows in one round at the most: so much that queueing its copies takes less time than they do, and yet
# several rounds of a large array overlap. On one GPU, whose ranks take turns, larger ones are faster still (64 MiB in
# 0.83 ms instead of 0.92, 1.25 with slots of 16 MiB), but each communicator takes three of them.
SLOT_BYTES = 32 * 1024 * 1024


class Where(Enum):
    """Which memory."""

    X = auto()
    OUT = auto()
    SLOT = auto()
    RESULT = auto()


class At(NamedTuple):
    """A place in a member's memory, in bytes."""

    where: Where
    offset: int
    member: int


class Move(NamedTuple):
    """A copy."""

    source: At
    target: At
    nbytes: int


class Fold(NamedTuple):
    """A reduction of so many elements, in the order of sources."""

    sources: list[At]
    targets: list[At]
    length: int


Piece = Move | Fold


def block_bytes() -> int:
    """Of two slots, and of two places for what a member has reduced: half a slot suffices for two members and more."""
    return 3 * SLOT_BYTES


def place_in_block(where: Where, number: int) -> int:
    """Where the slot, or what is reduced, of a round lies in a member's block."""
    side = number % 2
    return side * SLOT_BYTES if where is Where.SLOT else 2 * SLOT_BYTES + side * (SLOT_BYTES // 2)


class Plan(Protocol):
    """One collective of this member.

    Attributes:
        rounds: as many as it takes.
        has_finish: whether there is anything to finish.
        tells_late: a part is told of when it is over, instead of when it is queued, see Team; nothing is finished then.
    """

    rounds: int
    has_finish: bool
    tells_late: bool

    def show(self, place: int) -> Iterator[Piece]:
        """In a round, counted from 0."""

    def take(self, place: int) -> Iterator[Piece]:
        """In a round."""

    def finish(self, place: int) -> Iterator[Piece]:
        """In a round."""


@dataclass
class Even:
    """Arguments of all collectives.

    Attributes:
        rank, size: of this member, and of the team.
        count: elements of x.
        itemsize: of an element.
    """

    rank: int
    size: int
    count: int
    itemsize: int

    has_finish = False
    tells_late = False

    def __post_init__(self) -> None:
        self.columns = self.count // self.rows
        self.width = max(1, SLOT_BYTES // self.itemsize // self.rows)
        self.rounds = max(1, -(-self.columns // self.width))

    @property
    def rows(self) -> int:
        """Of x; a round has the same columns of each."""
        return 1

    def span(self, place: int) -> tuple[int, int]:
        """First column of a round, and the one after its last."""
        start = place * self.width
        return start, min(start + self.width, self.columns)

    def move(self, source: At, target: At, count: int) -> Iterator[Piece]:
        """A copy of so many elements, unless there are none; offsets are in elements, too."""
        if count:
            unit = self.itemsize
            yield Move(
                source._replace(offset=source.offset * unit), target._replace(offset=target.offset * unit), count * unit
            )

    def fold(self, sources: list[At], targets: list[At], count: int) -> Iterator[Piece]:
        """A reduction likewise."""
        if count:
            unit = self.itemsize
            yield Fold(
                [each._replace(offset=each.offset * unit) for each in sources],
                [each._replace(offset=each.offset * unit) for each in targets],
                count,
            )

    def finish(self, place: int) -> Iterator[Piece]:
        yield from ()

    def others(self) -> Iterator[int]:
        """Beginning with the next: not all read the same one at the same time."""
        for step in range(1, self.size):
            yield (self.rank + step) % self.size


class Whole(Even):
    """All of it in the first round, in which nothing is shown but that an array is ready."""

    has_finish = True
    all_rounds = 1

    def __post_init__(self) -> None:
        self.columns = self.width = self.count // self.rows
        self.rounds = self.all_rounds

    def show(self, place: int) -> Iterator[Piece]:
        yield from ()


class AllReduce(Even):
    """Each member reduces a slice of each round."""

    has_finish = True

    def show(self, place: int) -> Iterator[Piece]:
        start, at = self._cuts(place)
        for low, high in ((0, at[self.rank]), (at[self.rank + 1], at[-1])):
            yield from self.move(At(Where.X, start + low, self.rank), At(Where.SLOT, low, self.rank), high - low)

    def take(self, place: int) -> Iterator[Piece]:
        start, at = self._cuts(place)
        low, high = at[self.rank], at[self.rank + 1]
        sources = [
            At(Where.X, start + low, self.rank) if member == self.rank else At(Where.SLOT, low, member)
            for member in range(self.size)
        ]
        targets = [At(Where.OUT, start + low, self.rank), At(Where.RESULT, 0, self.rank)]
        yield from self.fold(sources, targets, high - low)

    def finish(self, place: int) -> Iterator[Piece]:
        start, at = self._cuts(place)
        for member in self.others():
            low, high = at[member], at[member + 1]
            yield from self.move(At(Where.RESULT, 0, member), At(Where.OUT, start + low, self.rank), high - low)

    def _cuts(self, place: int) -> tuple[int, tuple[int, ...]]:
        start, end = self.span(place)
        return start, cuts(end - start, self.size, self.size)


class ReduceScatter(Even):
    """Each member reduces its row."""

    @property
    def rows(self) -> int:
        return self.size

    def show(self, place: int) -> Iterator[Piece]:
        start, end = self.span(place)
        for row in self.others():
            source, target = row * self.columns + start, row * (end - start)
            yield from self.move(At(Where.X, source, self.rank), At(Where.SLOT, target, self.rank), end - start)

    def take(self, place: int) -> Iterator[Piece]:
        start, end = self.span(place)
        own = At(Where.X, self.rank * self.columns + start, self.rank)
        sources = [
            own if member == self.rank else At(Where.SLOT, self.rank * (end - start), member)
            for member in range(self.size)
        ]
        yield from self.fold(sources, [At(Where.OUT, start, self.rank)], end - start)


class AllGather(Even):
    """Each member copies the x of all."""

    def show(self, place: int) -> Iterator[Piece]:
        start, end = self.span(place)
        yield from self.move(At(Where.X, start, self.rank), At(Where.SLOT, 0, self.rank), end - start)

    def take(self, place: int) -> Iterator[Piece]:
        start, end = self.span(place)
        yield from self.move(
            At(Where.X, start, self.rank), At(Where.OUT, self.rank * self.count + start, self.rank), end - start
        )
        for member in self.others():
            target = At(Where.OUT, member * self.count + start, self.rank)
            yield from self.move(At(Where.SLOT, 0, member), target, end - start)


@dataclass
class Broadcast(Even):
    """All copy what one member, src, shows."""

    src: int

    def show(self, place: int) -> Iterator[Piece]:
        start, end = self.span(place)
        if self.rank == self.src:
            yield from self.move(At(Where.X, start, self.rank), At(Where.SLOT, 0, self.rank), end - start)

    def take(self, place: int) -> Iterator[Piece]:
        start, end = self.span(place)
        if self.rank != self.src:
            yield from self.move(At(Where.SLOT, 0, self.src), At(Where.X, start, self.rank), end - start)
