"""Either: an all_reduce of two members that reach each other's private memory, by the faster of two ways.

Straight, a slice each, as in `direct`; or, where both have private memory, all of
it through slots, as in `pair`. Both are one round to the team, so members that
call something else are found alike, and both give the same bits.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from mpdist.algorithms.shared.direct import Meeting
from mpdist.algorithms.shared.pair import Pair
from mpdist.algorithms.shared.reduction import OUT_AT, PACE, X_AT, factors_of, words_of
from mpdist.algorithms.shared.team import CONSUMED, READ, REDUCED, SHOWN, SLOT_BYTES
from mpdist.memory import Folder

if TYPE_CHECKING:
    from mpdist.algorithms.shared.team import Team
    from mpdist.memory import Buffer, ReduceOp
    from mpdist.progress.collective import Steps


def all_reduce(team: Team, x: Buffer, out: Buffer, op: ReduceOp, terms: int | None) -> Steps[None]:
    """Reduce x over both members into out of both."""
    meeting = Meeting(team, "all_reduce", x.nbytes, x, out)
    pair, seconds = None, 0.0
    if team.pace.is_through_slots(x.nbytes):
        if not team.is_free():
            yield team.free()
        pair = Pair(team, x, out, (SHOWN, READ), team.shown, SLOT_BYTES)
        # The slot of its last round is that of a collective of one round, so that the next need not wait for the end.
        pair.side = (team.rounds + pair.rounds) % 2
        if meeting.is_private:
            seconds = yield from _stage(team, pair)
    yield from meeting.begin(*words_of(op, x.element), team.pace.word)
    team.pace.hear(team.facts(PACE)[0])
    are_private = max(*team.facts(X_AT), *team.facts(OUT_AT)) < 0
    folder = Folder(op, x.element, terms, factors_of(team, op, x.element))
    start = perf_counter()
    if pair is not None:
        team.shown += pair.rounds
    if pair is not None and are_private:
        yield from pair.reduce(folder, meeting.turn)
        yield from _leave(team)
    else:
        team.note(SHOWN, team.shown)  # which may set back what was shown for a collective that nobody went on with
        team.note(READ, team.shown)
        with meeting.share():
            if x.count:
                yield from meeting.reduce_slice(x, out, folder, range(team.size))
        yield from meeting.end()
    if team.rank == 0 and are_private and x.count:
        team.pace.took(x.nbytes, pair is not None, seconds + perf_counter() - start - meeting.turn.away)


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
