"""Reduction: all_reduce, reduce and reduce_scatter over shared memory.

Each member reduces its own slice of all inputs, in the order of ranks, so the
result depends neither on timing nor on sizes, and is the same bits everywhere.

    stage    private memory: the others' slices go into this member's slot
    reduce   its own slice of all inputs, into its own output, straight into the outputs that it can reach,
             and into a slot for those that it can't
    consume  private memory: the slices of the others
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from mpdist.algorithms.shared.calls import all_reduce_of, kind_of
from mpdist.algorithms.shared.exchange import Shown
from mpdist.algorithms.shared.members import PRIVATE
from mpdist.algorithms.shared.moving import copy, fold
from mpdist.algorithms.shared.pair import Pair, reducing
from mpdist.algorithms.shared.team import (
    CONSUMED,
    DST,
    FACTOR,
    OUT_AT,
    REDUCED,
    RESULT_BYTES,
    ROUND_BYTES,
    STAGED,
    X_AT,
)
from mpdist.algorithms.shared.turn import Turn
from mpdist.memory import Folder

if TYPE_CHECKING:
    from mpdist.algorithms.shared.moving import Memory
    from mpdist.algorithms.shared.team import Team
    from mpdist.memory import Buffer, Element, ReduceOp
    from mpdist.memory.elements import Array
    from mpdist.memory.ops import Factor
    from mpdist.progress.collective import Steps

# So many sizes and reductions are kept as what was made of them, which takes 1 to 3 us each.
KNOWN_CALLS = 256

# Slices begin at multiples of so many elements: no two members write into one line of a cache.
_STEP = 64


@lru_cache(KNOWN_CALLS)
def cuts(count: int, parts: int, members: int) -> tuple[int, ...]:
    """Where the slices of the first `parts` members begin, and the end; the slices of the others are empty."""
    width = -(-count // parts // _STEP) * _STEP
    return *(min(part * width, count) for part in range(parts)), *[count] * (members + 1 - parts)


class Reducing:
    """One all_reduce or reduce of this member, round by round.

    Attributes:
        receivers: the members that get the result.
        parts: so many members reduce a slice.
        is_all_private: no member has an array that others can reach; known after `look_up`, as is
        folder: what reduces.
    """

    def __init__(
        self,
        team: Team,
        x: Buffer,
        out: Buffer | None,
        op: ReduceOp,
        terms: int | None,
        receivers: Sequence[int],
        parts: int,
    ) -> None:
        self.team = team
        self.x = x.array()
        self.out = None if out is None else out.array()
        self.op = op
        self.terms = terms
        self.element: Element = x.element
        self.receivers = receivers
        self.parts = parts
        self.count = x.count
        self.width = min(team.round_bytes, parts * RESULT_BYTES * team.round_bytes // ROUND_BYTES) // x.element.itemsize
        self.rounds = max(1, -(-x.count // self.width))
        self.x_place = team.place_of(x)
        self.out_place = PRIVATE if out is None else team.place_of(out)
        self.dst = receivers[0] if len(receivers) == 1 else None
        self.name = all_reduce_of(x.element) if self.dst is None else "reduce"
        self.slots = team.slots(x.element)
        self.is_all_private = False
        self._inputs: list[Memory | None] = []
        self._outputs: list[Memory | None] = []

    def limit(self, nbytes: int) -> None:
        """Take so many bytes a round at the most; before the first."""
        self.width = min(self.width, nbytes // self.element.itemsize)
        self.rounds = max(1, -(-self.count // self.width))

    def span(self, place: int) -> tuple[int, int]:
        start = place * self.width
        return start, min(start + self.width, self.count)

    def stage(self, place: int, number: int) -> None:
        """Show the slices of the others."""
        start, end = self.span(place)
        at = cuts(end - start, self.parts, self.team.size)
        spans = (0, at[self.team.rank]), (at[self.team.rank + 1], end - start)
        parts = [(low, self.x[start + low : start + high]) for low, high in spans if high > low]
        self.slots.show(number % 2, (end - start) * self.element.itemsize, *parts)

    def look_up(self) -> None:
        """What the members have told about their arrays."""
        team = self.team
        team.check_fit(range(team.size))
        if self.dst is not None:
            team.check_root("reduce", DST)
        self._inputs = [self._memory(member, place) for member, place in enumerate(team.facts(X_AT))]
        self._outputs = [self._memory(member, place) for member, place in enumerate(team.facts(OUT_AT))]
        self.is_all_private = not any(each is not None for each in [*self._inputs, *self._outputs])
        self._inputs[team.rank] = self.x
        if self.out_place != PRIVATE:
            self._outputs[team.rank] = self.out
        self.folder = folder_of(team, self.op, self.element, self.terms)

    def _memory(self, member: int, place: int) -> Memory | None:
        return self.team.memory(member, place, self.count, self.element)

    def reduce_slice(self, place: int, number: int) -> None:
        """This member's slice of a round, to wherever it is needed."""
        low, high = self._own_slice(place)
        if low < high:
            fold(self.folder, self._sources(place, number, low, high), self._places(place, number, low, high))

    def reduce_part(self, place: int, number: int) -> Array:
        """This member's slice of a round as a new array: a part of something larger, so 16-bit types in float32."""
        low, high = self._own_slice(place)
        part: Array = np.empty(high - low, np.float32 if self.element.is_half else self.element.storage)
        if low < high:
            fold(self.folder, self._sources(place, number, low, high), [part])
        return part

    def put_slice(self, place: int, number: int, result: Array) -> None:
        """The whole of what this member's slice was a part of, to wherever it is needed."""
        for target in self._places(place, number, *self._own_slice(place)):
            copy(target, result)

    def _own_slice(self, place: int) -> tuple[int, int]:
        start, end = self.span(place)
        at = cuts(end - start, self.parts, self.team.size)
        return at[self.team.rank], at[self.team.rank + 1]

    def _sources(self, place: int, number: int, low: int, high: int) -> list[Memory]:
        start = place * self.width
        return [
            self.slots.shown(number % 2, member)[low:high] if whole is None else whole[start + low : start + high]
            for member, whole in enumerate(self._inputs)
        ]

    def _places(self, place: int, number: int, low: int, high: int) -> list[Memory]:
        start = place * self.width
        outs = [self._outputs[member] for member in self.receivers]
        places = [out[start + low : start + high] for out in outs if out is not None]
        if self.out is not None and self.out_place == PRIVATE:
            places.append(self.out[start + low : start + high])
        if self._needs_slot(outs):
            places.append(self.slots.results[number % 2][self.team.rank][: high - low])
        return places

    def _needs_slot(self, outs: list[Memory | None]) -> bool:
        """Whether some other member waits for the slice in this member's slot."""
        if self.out is not None and self.out_place != PRIVATE:
            return False  # it is read there
        mine = 1 if self.out is not None else 0
        return sum(out is None for out in outs) > mine

    def consume(self, place: int, number: int) -> None:
        """The slices of the others, into private memory."""
        assert self.out is not None
        start, end = self.span(place)
        at = cuts(end - start, self.parts, self.team.size)
        results = self.slots.results[number % 2]
        for member in self.team.after_own():
            low, high = at[member], at[member + 1]
            if low == high:
                continue
            whole = self._outputs[member]
            source = results[member][: high - low] if whole is None else whole[start + low : start + high]
            copy(self.out[start + low : start + high], source)

    def facts(self) -> tuple[int, ...]:
        root = () if self.dst is None else (self.dst,)
        if self.op.factor is None and not root:
            return self.x_place, self.out_place
        return self.x_place, self.out_place, *words_of(self.op, self.element), *root


def reduce(
    team: Team,
    x: Buffer,
    out: Buffer | None,
    op: ReduceOp,
    terms: int | None,
    receivers: Sequence[int],
) -> Steps[None]:
    """Reduce x over all members into out of the receivers.

    Args:
        out: as large as x, or x itself; None on members that do not receive.
        terms: how many inputs the result stands for, for avg.
    """
    task = Reducing(team, x, out, op, terms, receivers, team.size)
    turn = Turn(team.channel.engine)
    if not team.is_free():
        yield team.free()
    before = team.begin(task.rounds, task.name, x.nbytes, kind_of(x.element, op), *task.facts())
    last = before + task.rounds
    is_staging = task.x_place == PRIVATE
    is_consuming = out is not None and task.out_place == PRIVATE
    pair = None
    if team.size == 2 and out is not None and len(receivers) == 2:
        pair = Pair(team, task.x, x.count, x.element, (STAGED, CONSUMED), before, ROUND_BYTES)
    if is_staging:
        if not team.are_at(CONSUMED, before - 1):
            yield team.all_at(CONSUMED, before - 1)
        if pair is None:
            task.stage(0, before + 1)
        else:
            pair.stage(0)
    team.tell(STAGED, before + 1 if is_staging else last)
    for place in range(task.rounds):
        number = before + place + 1
        if not team.are_at(STAGED, number):
            yield team.all_at(STAGED, number)
        if place == 0:
            task.look_up()
            if pair is not None and task.is_all_private and task.out is not None:
                team.note(REDUCED, last)
                yield from pair.exchange(reducing(team, task.folder, task.x, task.out), turn)
                return
        if not team.are_at(CONSUMED, number - 2):
            yield team.all_at(CONSUMED, number - 2)
        task.reduce_slice(place, number)
        team.tell(REDUCED, number)
        if turn.is_over:
            yield turn
        if is_staging and number < last:
            if not team.are_at(CONSUMED, number - 1):
                yield team.all_at(CONSUMED, number - 1)
            task.stage(place + 1, number + 1)
            team.tell(STAGED, number + 1)
            if turn.is_over:
                yield turn
        if is_consuming:
            if not team.are_at(REDUCED, number):
                yield team.all_at(REDUCED, number)
            task.consume(place, number)
            if turn.is_over:
                yield turn
        team.tell(CONSUMED, number)
    if (task.x_place != PRIVATE or task.out_place != PRIVATE) and not team.are_at(CONSUMED, last):
        yield team.all_at(CONSUMED, last)


def all_reduce(team: Team, x: Buffer, out: Buffer, op: ReduceOp, terms: int | None) -> Steps[None]:
    """Reduce x over all members into out of all."""
    return reduce(team, x, out, op, terms, range(team.size))


def reduce_scatter(
    team: Team, x: Buffer, columns: int, op: ReduceOp, terms: int | None, mine: Sequence[tuple[int, Array]]
) -> Steps[None]:
    """Reduce x over all members; each keeps some of its rows.

    Args:
        x: rows of `columns` elements.
        terms: as of `reduce`.
        mine: the rows that this member keeps, and where to; no other member keeps them, and each keeps as many.
    """
    shown = Shown(team, x, x.count // columns if columns else team.size, columns, x.element)
    turn = Turn(team.channel.engine)
    if not team.is_free():
        yield team.free()
    kind = kind_of(x.element, op)
    factor = words_of(op, x.element)
    before = team.begin(shown.rounds, "reduce_scatter", x.nbytes, kind, shown.place_of_x, PRIVATE, *factor)
    last = before + shown.rounds
    kept = {row for row, _ in mine}
    read_by_others = [row for row in range(shown.rows) if row not in kept]
    folder: Folder | None = None
    team.tell(REDUCED, last)
    if not shown.is_staged:
        team.tell(STAGED, last)
    for place in range(shown.rounds):
        number = before + place + 1
        yield from shown.stage_ahead(place, before, read_by_others, turn)
        if not team.are_at(STAGED, number):
            yield team.all_at(STAGED, number)
        if folder is None:
            team.check_fit(range(team.size))
            shown.look_up(range(team.size))
            folder = folder_of(team, op, x.element, terms)
        start, end = shown.span(place)
        for row, target in mine:
            fold(folder, [shown.part(member, row, place, number) for member in range(team.size)], [target[start:end]])
            if turn.is_over:
                yield turn
        team.tell(CONSUMED, number)
    if shown.place_of_x != PRIVATE and not team.are_at(CONSUMED, last):
        yield team.all_at(CONSUMED, last)


def words_of(op: ReduceOp, element: Element) -> tuple[int, int]:
    """The factor of premul_sum as it travels: an integer's bits, or those of a real and an imaginary part."""
    if op.factor is None:
        return 0, 0
    if isinstance(op.factor, int) and element.kind in ("int", "uint"):
        return op.factor - 2**64 if op.factor >= 2**63 else op.factor, 0
    factor = complex(op.factor)
    return _bits(factor.real), _bits(factor.imag)


def folder_of(team: Team, op: ReduceOp, element: Element, terms: int | None) -> Folder:
    """What reduces slices of all members; for premul_sum with the factors that they have told."""
    if op.factor is None:
        return _known_folder(op, element, terms)
    return Folder(op, element, terms, factors_in(team.facts(FACTOR), team.facts(FACTOR + 1), op, element))


_known_folder = lru_cache(KNOWN_CALLS)(Folder)


def factors_in(first: Sequence[int], second: Sequence[int], op: ReduceOp, element: Element) -> list[Factor] | None:
    """The factors that travelled as these words; None for other operations."""
    if op.factor is None:
        return None
    if element.kind in ("int", "uint"):
        return [word % 2**64 if element.kind == "uint" else word for word in first]
    pairs = zip(first, second, strict=True)
    values = [complex(_number(real), _number(imaginary)) for real, imaginary in pairs]
    return list(values) if element.kind == "complex" else [value.real for value in values]


def _bits(number: float) -> int:
    """A float as the 64-bit word that travels."""
    (word,) = struct.unpack("q", struct.pack("d", number))
    return int(word)


def _number(word: int) -> float:
    (number,) = struct.unpack("d", struct.pack("q", word))
    return float(number)
