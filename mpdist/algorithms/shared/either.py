"""Either: reductions of two members that reach each other's private memory, by the faster of two ways.

Straight, as in `direct`; or, where both have private memory, through slots, as in
`pair`. Both are one round to the team, so members that call something else are
found alike, and both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from mpdist.algorithms.shared import direct
from mpdist.algorithms.shared.direct import Meeting
from mpdist.algorithms.shared.pair import Pair, reducing
from mpdist.algorithms.shared.reduction import OUT_AT, PACE, X_AT, factors_of, words_of
from mpdist.algorithms.shared.team import CONSUMED, READ, REDUCED, SHOWN, SLOT_BYTES
from mpdist.memory import Folder

if TYPE_CHECKING:
    from mpdist.algorithms.shared.pace import Pace
    from mpdist.algorithms.shared.team import Team
    from mpdist.memory import Buffer, Element, ReduceOp
    from mpdist.memory.elements import Array
    from mpdist.progress.collective import Steps


def all_reduce(team: Team, x: Buffer, out: Buffer, op: ReduceOp, terms: int | None) -> Steps[None]:
    """Reduce x over both members into out of both."""
    if x.element.is_half:  # reducing everything on both takes longer than moving it where it is of 16 bits
        return direct.all_reduce(team, x, out, op, terms)
    own = x.array()
    meeting = Meeting(team, "all_reduce", x.nbytes, x, out)

    def straight(folder: Folder) -> Steps[None]:
        return meeting.reduce_slice(x, out, folder, range(team.size))

    return _reduce(meeting, own, own, own if out is x else out.array(), x.element, op, terms, straight)


def reduce_scatter(
    team: Team, x: Buffer, columns: int, op: ReduceOp, terms: int | None, mine: Sequence[tuple[int, Array]]
) -> Steps[None]:
    """Reduce the two rows of x over both members; each keeps the row of its own number, see `direct`."""
    ((row, out),) = mine
    rows = x.array()[:columns], x.array()[columns:]
    meeting = Meeting(team, "reduce_scatter", x.nbytes, x)

    def straight(folder: Folder) -> Steps[None]:
        return meeting.reduce_rows(x, columns, folder, mine)

    return _reduce(meeting, rows[1 - row], rows[row], out, x.element, op, terms, straight)


def _reduce(
    meeting: Meeting,
    shown: Array,
    own: Array,
    out: Array,
    element: Element,
    op: ReduceOp,
    terms: int | None,
    straight: Callable[[Folder], Steps[None]],
) -> Steps[None]:
    """Reduce what the other shows and this member's own into out.

    Args:
        shown: what the other needs of this member.
        straight: does the same without slots.
    """
    team = meeting.team
    nbytes = shown.size * element.itemsize
    pace: Pace = team.paces[meeting.op]
    pair, seconds = None, 0.0
    if pace.is_through_slots(nbytes):
        if not team.is_free():
            yield team.free()
        pair = Pair(team, shown, element, (SHOWN, READ), team.shown, SLOT_BYTES)
        # The slot of its last round is that of a collective of one round, so that the next need not wait for the end.
        pair.side = (team.rounds + pair.rounds) % 2
        if meeting.is_private:
            seconds = yield from _stage(team, pair)
    yield from meeting.begin(*words_of(op, element), pace.word)
    pace.hear(team.facts(PACE)[0])
    are_private = max(*team.facts(X_AT), *team.facts(OUT_AT)) < 0
    folder = Folder(op, element, terms, factors_of(team, op, element))
    start = perf_counter()
    if pair is not None:
        team.shown += pair.rounds
    if pair is not None and are_private:
        yield from pair.exchange(reducing(team, folder, own, out), meeting.turn)
        yield from _leave(team)
    else:
        team.note(SHOWN, team.shown)  # which may set back what was shown for a collective that nobody went on with
        team.note(READ, team.shown)
        with meeting:
            if shown.size:
                yield from straight(folder)
        yield from meeting.end()
    if team.rank == 0 and are_private and shown.size:
        pace.took(nbytes, pair is not None, seconds + perf_counter() - start - meeting.turn.away)


def _stage(team: Team, pair: Pair) -> Steps[float]:
    """Show the first round before all meet; the team is free. Returns the seconds that it took."""
    ready = team.rounds - pair.rounds % 2
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
