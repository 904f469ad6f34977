"""Exchange: what members show, others copy: broadcast, gather, scatter, all_gather, all_to_all.

A member's input is rows of equal length; a row may be for everybody or for one
member. Each reader copies rows to their places. Where there is a root, all come
together before anything is read: it must be the same one for all. Private rows pass through slots
in rounds of some columns; memory that the others map is read where it is, and
then the member must wait until all have read it.

    broadcast   the root shows 1 row, the others copy it
    all_gather  each shows 1 row, each copies all
    gather      each shows 1 row, the root copies all
    scatter     the root shows a row for each, each copies its own
    all_to_all  each shows a row for each, each copies its own from all
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpdist.algorithms.shared.calls import kind_of
from mpdist.algorithms.shared.members import PRIVATE
from mpdist.algorithms.shared.moving import copy
from mpdist.algorithms.shared.team import CONSUMED, REDUCED, ROOT, STAGED
from mpdist.algorithms.shared.turn import Turn

if TYPE_CHECKING:
    from mpdist.algorithms.shared.moving import Memory
    from mpdist.algorithms.shared.team import Team
    from mpdist.memory import Buffer, Element
    from mpdist.memory.elements import Array
    from mpdist.progress.collective import Steps

Pull = tuple[int, int, "Array"]
"""A member, its row, and where this member copies the row to."""


class Shown:
    """One collective's input of this member, and how the others come by it.

    Attributes:
        rows: of each member that shows.
        columns: elements of a row.
        width: columns in a round.
        rounds: as many as it takes.
    """

    def __init__(self, team: Team, x: Buffer | None, rows: int, columns: int, element: Element) -> None:
        self._team = team
        self.rows = rows
        self.columns = columns
        self.element = element
        self.width = max(1, team.round_bytes // element.itemsize // rows)
        self.rounds = max(1, -(-columns // self.width))
        self.place_of_x = PRIVATE if x is None else team.place_of(x)
        self._own = None if x is None else x.array()
        self._slots = team.slots(element)
        self._whole: dict[int, Memory] = {}
        self._staged = 0
        self.is_staged = x is not None and self.place_of_x == PRIVATE

    def span(self, place: int) -> tuple[int, int]:
        """First column of a round of this collective, counted from 0, and the one after its last."""
        start = place * self.width
        return start, min(start + self.width, self.columns)

    def stage(self, place: int, number: int, rows: Sequence[int]) -> None:
        """Copy these rows of a round into the slot."""
        assert self._own is not None
        start, end = self.span(place)
        width = end - start
        parts = [(row * width, self._own[row * self.columns + start : row * self.columns + end]) for row in rows]
        self._slots.show(number % 2, self.rows * width * self.element.itemsize, *parts)

    def stage_ahead(self, place: int, before: int, rows: Sequence[int], turn: Turn) -> Steps[None]:
        """Show these rows of a round, and of the next, so that readers seldom wait; nothing where memory is reached.

        Args:
            before: the team's round before this collective's first.
        """
        team = self._team
        while self.is_staged and self._staged < min(place + 2, self.rounds):
            number = before + self._staged + 1
            if not team.are_at(CONSUMED, number - 2):
                yield team.all_at(CONSUMED, number - 2)
            self.stage(self._staged, number, rows)
            self._staged += 1
            team.tell(STAGED, number)
            if turn.is_over:
                yield turn

    def part(self, member: int, row: int, place: int, number: int) -> Memory:
        """A member's row in a round, wherever it can be read."""
        start, end = self.span(place)
        if member == self._team.rank:
            assert self._own is not None
            return self._own[row * self.columns + start : row * self.columns + end]
        whole = self._whole.get(member)
        if whole is not None:
            return whole[row * self.columns + start : row * self.columns + end]
        at = row * (end - start)
        return self._slots.shown(number % 2, member)[at : at + end - start]

    def look_up(self, members: Sequence[int], fact: int = 0) -> None:
        """Find out which of these members, that have told a round, show memory that can be read where it is."""
        count = self.rows * self.columns
        for member, place in enumerate(self._team.facts(fact)):
            if member in members and member != self._team.rank:
                memory = self._team.memory(member, place, count, self.element)
                if memory is not None:
                    self._whole[member] = memory


def exchange(
    team: Team,
    op: str,
    x: Buffer | None,
    rows: int,
    columns: int,
    element: Element,
    showing: Sequence[int],
    pulls: Sequence[Pull],
    kept: Sequence[int] = (),
    root: int | None = None,
) -> Steps[None]:
    """Show x, and copy what this member pulls.

    Args:
        op: the operation.
        x: rows * columns elements; None on members that do not show.
        showing: the members that do.
        kept: rows of this member that no other pulls.
        root: of what has one.
    """
    shown = Shown(team, x, rows, columns, element)
    turn = Turn(team.channel.engine)
    if not team.is_free():
        yield team.free()
    nbytes = rows * columns * element.itemsize
    facts = () if root is None else (PRIVATE, root)
    before = team.begin(shown.rounds, op, nbytes, kind_of(element), shown.place_of_x, *facts)
    last = before + shown.rounds
    read_by_others = [row for row in range(rows) if row not in kept]
    sources = [member for member in showing if member != team.rank] if pulls else []
    team.tell(REDUCED, last)
    if not shown.is_staged:
        team.tell(STAGED, last)
    for place in range(shown.rounds):
        number = before + place + 1
        yield from shown.stage_ahead(place, before, read_by_others, turn)
        if root is not None and place == 0:
            yield team.all_at(STAGED, number)
            team.check_fit(range(team.size))
            team.check_root(op, ROOT)
            if not pulls:
                team.tell(CONSUMED, last)  # not before, for then others may tell of their next call
        if not pulls:
            continue
        for member in sources:
            yield team.one_at(member, STAGED, number)
        if place == 0:
            team.check_fit([*sources, team.rank])
            shown.look_up(sources)
        start, end = shown.span(place)
        for member, row, target in pulls:
            copy(target[start:end], shown.part(member, row, place, number))
            if turn.is_over:
                yield turn
        team.tell(CONSUMED, number)
    if shown.place_of_x != PRIVATE and not team.are_at(CONSUMED, last):
        yield team.all_at(CONSUMED, last)


def broadcast(team: Team, x: Buffer, src: int) -> Steps[None]:
    """Copy x of member src into x of all others."""
    is_root = team.rank == src
    pulls = [] if is_root else [(src, 0, x.array())]
    return exchange(team, "broadcast", x if is_root else None, 1, x.count, x.element, [src], pulls, root=src)


def all_gather(team: Team, x: Buffer, out: Buffer) -> Steps[None]:
    """Copy x of all into out of all, in the order of ranks."""
    rows = out.array().reshape(team.size, x.count)
    pulls = [(member, 0, rows[member]) for member in _from_own(team)]
    return exchange(team, "all_gather", x, 1, x.count, x.element, range(team.size), pulls)


def gather(team: Team, x: Buffer, out: Buffer | None, dst: int) -> Steps[None]:
    """Copy x of all into out of member dst."""
    pulls: list[Pull] = []
    if out is not None:
        rows = out.array().reshape(team.size, x.count)
        pulls = [(member, 0, rows[member]) for member in _from_own(team)]
    return exchange(team, "gather", x, 1, x.count, x.element, range(team.size), pulls, root=dst)


def scatter(team: Team, x: Buffer | None, out: Buffer, src: int) -> Steps[None]:
    """Copy row r of x of member src into out of member r."""
    pulls = [(src, team.rank, out.array())]
    return exchange(team, "scatter", x, team.size, out.count, out.element, [src], pulls, [team.rank], src)


def all_to_all(team: Team, x: Buffer, out: Buffer) -> Steps[None]:
    """Copy row r of x of each into out of member r."""
    columns = x.count // team.size
    rows = out.array().reshape(team.size, columns)
    pulls = [(member, team.rank, rows[member]) for member in _from_own(team)]
    return exchange(team, "all_to_all", x, team.size, columns, x.element, range(team.size), pulls, [team.rank])


def _from_own(team: Team) -> list[int]:
    """All members, beginning with this one: not all read the same one at the same time."""
    return [(team.rank + step) % team.size for step in range(team.size)]
