"""Either: collectives of two members that reach each other's private memory, by the faster of two ways.

Straight, as in `direct`; or, where both have private memory, through slots, as in
`pair`. Both are one round to the team, so members that call something else are
found alike, and both give the same bits.

Through slots each member reduces everything in an all_reduce: as many bytes move
from core to core as with a slice each, in half the steps. 16-bit numbers take
longer to add than to move, so of these each reduces a slice.

Straight the kernel copies from one process to the other, once instead of twice;
for that it looks up each page, of which there are many where memory is not on
huge ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from mpdist.algorithms.shared.calls import all_reduce_of
from mpdist.algorithms.shared.direct import Kept, Meeting
from mpdist.algorithms.shared.pair import Pair, Take, copying, reducing
from mpdist.algorithms.shared.reduction import cuts, folder_of, words_of
from mpdist.algorithms.shared.team import CONSUMED, OUT_AT, PACE, READ, REDUCED, SHOWN, SLOT_BYTES, X_AT
from mpdist.memory import Folder
from mpdist.memory.elements import Array

if TYPE_CHECKING:
    from mpdist.algorithms.shared.team import Team
    from mpdist.memory import Buffer, Element, ReduceOp
    from mpdist.progress.collective import Steps


# What passes through a slot in a round where it is only copied. bench/ways.py.
MOVED_BYTES = SLOT_BYTES // 2

NO_FACTOR = 0, 0


class Passage(NamedTuple):
    """What passes through slots at a time.

    Attributes:
        shown: what the other member takes.
        taken: so many elements the other shows.
    """

    shown: Array
    taken: int


def all_reduce(team: Team, x: Buffer, out: Buffer, op: ReduceOp, terms: int | None) -> Steps[None]:
    """Reduce x over both members into out of both."""
    own = x.array()
    to = own if out is x else out.array()
    meeting = Meeting(team, all_reduce_of(x.element), x, out, reduces=op)

    def folder() -> Folder:
        return folder_of(team, op, x.element, terms)

    def straight() -> Steps[None]:
        return meeting.reduce_slice(x, out, folder(), range(team.size))

    if not x.element.is_half:

        def take_all() -> list[Take]:
            return [reducing(team, folder(), own, to)]

        passage = [Passage(own, x.count)]
        return _either(meeting, x.element, passage, SLOT_BYTES, take_all, straight, words_of(op, x.element))

    at = cuts(x.count, 2, 2)
    slices = slice(at[0], at[1]), slice(at[1], at[2])
    mine, theirs = slices[team.rank], slices[1 - team.rank]
    passages = [Passage(own[theirs], to[mine].size), Passage(to[mine], to[theirs].size)]

    def take_slices() -> list[Take]:
        return [reducing(team, folder(), own[mine], to[mine]), copying(to[theirs])]

    return _either(meeting, x.element, passages, SLOT_BYTES, take_slices, straight, words_of(op, x.element))


def reduce_scatter(
    team: Team, x: Buffer, columns: int, op: ReduceOp, terms: int | None, mine: Sequence[tuple[int, Array]]
) -> Steps[None]:
    """Reduce the two rows of x over both members; each keeps the row of its own number, see `direct`."""
    ((row, out),) = mine
    rows = x.array()[:columns], x.array()[columns:]
    meeting = Meeting(team, "reduce_scatter", x, reduces=op)

    def folder() -> Folder:
        return folder_of(team, op, x.element, terms)

    def takes() -> list[Take]:
        return [reducing(team, folder(), rows[row], out)]

    def straight() -> Steps[None]:
        return meeting.reduce_rows(x, columns, folder(), mine)

    passage = [Passage(rows[1 - row], columns)]
    return _either(meeting, x.element, passage, SLOT_BYTES, takes, straight, words_of(op, x.element))


def broadcast(team: Team, x: Buffer, src: int) -> Steps[None]:
    """Copy x of member src into x of the other."""
    own = x.array()
    is_root = team.rank == src
    meeting = Meeting(team, "broadcast", x, root=src)
    passage = Passage(own, 0) if is_root else Passage(own[:0], x.count)

    def straight() -> Steps[None]:
        return meeting.spread(x, src)

    return _either(meeting, x.element, [passage], MOVED_BYTES, lambda: [copying(own)], straight)


def all_gather(team: Team, x: Buffer, out: Buffer) -> Steps[None]:
    """Copy x of both into out of both, in the order of ranks."""
    own, rows = x.array(), out.array().reshape(2, x.count)
    meeting = Meeting(team, "all_gather", x)
    return _rows(meeting, x, Passage(own, x.count), own, rows, slice(0, x.count))


def all_to_all(team: Team, x: Buffer, out: Buffer) -> Steps[None]:
    """Copy row r of x of each into out of member r."""
    width = x.count // 2
    sent, rows = (buffer.array()[: 2 * width].reshape(2, width) for buffer in (x, out))
    passage = Passage(sent[1 - team.rank], width)
    part = slice(team.rank * width, (team.rank + 1) * width)
    meeting = Meeting(team, "all_to_all", x)
    return _rows(meeting, x, passage, sent[team.rank], rows, part)


def _rows(meeting: Meeting, x: Buffer, passage: Passage, kept: Array, rows: Array, part: slice) -> Steps[None]:
    """What is kept into this member's row, and what passes, a part of the other's x, into the other row."""
    rank = meeting.team.rank

    def straight() -> Steps[None]:
        return meeting.gather_rows(x, rows, part)

    def takes() -> list[Take]:
        return [copying(rows[1 - rank])]

    return _either(meeting, x.element, [passage], MOVED_BYTES, takes, straight, kept=(rows[rank], kept))


def _either(
    meeting: Meeting,
    element: Element,
    passages: Sequence[Passage],
    nbytes: int,
    takes: Callable[[], list[Take]],
    straight: Callable[[], Steps[None]],
    factor: tuple[int, int] = NO_FACTOR,
    kept: Kept | None = None,
) -> Steps[None]:
    """One collective.

    Args:
        nbytes: what passes through slots in a round at the most.
        takes: what to do with each passage; once all have met.
        straight: does the same without slots.
        factor: the words of premul_sum's.
        kept: as of Meeting.begin.
    """
    team = meeting.team
    pace = team.paces[meeting.op]
    pairs: list[Pair] = []
    rounds = 0
    seconds = 0.0
    if not team.is_free():
        yield team.free()  # before that not all have heard the same
    if pace.is_through_slots(meeting.nbytes):
        pairs, rounds = _pairs(team, element, passages, nbytes)
        if meeting.is_private:
            seconds = yield from _stage_first(team, pairs[0], rounds)
    yield from meeting.begin(*factor, pace.word, kept=kept)
    pace.hear(team.fact(0, PACE))
    other = 1 - team.rank
    are_private = meeting.is_private and team.fact(other, X_AT) < 0 and team.fact(other, OUT_AT) < 0
    start, away = perf_counter(), meeting.turn.away
    team.shown += rounds
    if pairs and are_private:
        for pair, take in zip(pairs, takes(), strict=True):
            if pair is not pairs[0]:
                yield from pair.begin()
            yield from pair.exchange(take, meeting.turn)
        yield from _leave(team)
    else:
        # SHOWN may go back: what was shown for a collective that nobody went on with.
        team.note(SHOWN, team.shown)
        team.note(READ, team.shown)
        with meeting:
            if meeting.nbytes:
                yield from straight()
        yield from meeting.end()
    if team.rank == 0 and are_private and meeting.nbytes and not (pairs and team.spread.is_trying):
        seconds += perf_counter() - start - (meeting.turn.away - away)
        pace.took(meeting.nbytes, bool(pairs), seconds)


def _pairs(team: Team, element: Element, passages: Sequence[Passage], nbytes: int) -> tuple[list[Pair], int]:
    """One after the other, with the slots by turns; and how many rounds all of them have."""
    pairs: list[Pair] = []
    shown = team.shown
    for passage in passages:
        pairs.append(Pair(team, *passage, element, (SHOWN, READ), shown, nbytes))
        shown += pairs[-1].rounds
    rounds = shown - team.shown
    # The slot of the last round is that of a collective of one round, so that the next need not wait for the end.
    side = (team.rounds + rounds) % 2
    for pair in pairs:
        pair.side = side
        side = (side + pair.rounds) % 2
    return pairs, rounds


def _stage_first(team: Team, pair: Pair, rounds: int) -> Steps[float]:
    """Show the first round before all meet; the team is free. Returns the seconds that it took."""
    ready = team.rounds - rounds % 2
    if not team.are_at(CONSUMED, ready):
        yield team.all_at(CONSUMED, ready)
    start = perf_counter()
    pair.stage(0)
    team.note(SHOWN, team.shown + 1)
    return perf_counter() - start


def _leave(team: Team) -> Steps[None]:
    """Done when the other has read all rounds but the last, whose slot the next collective does not take at once."""
    if not team.are_at(READ, team.shown - 1):
        yield team.all_at(READ, team.shown - 1)
    team.note(REDUCED, team.rounds)
    team.tell(CONSUMED, team.rounds)
