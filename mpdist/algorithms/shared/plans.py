"""Plans: which collectives of a team are a single request, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from mpdist.algorithms.shared.broadcast import BroadcastPlan
from mpdist.algorithms.shared.one_round import Plan
from mpdist.algorithms.shared.reduce_scatter import ReduceScatterPlan
from mpdist.algorithms.shared.short import ShortPlan
from mpdist.algorithms.shared.sliced import SlicedPlan
from mpdist.algorithms.shared.small import SmallPlan
from mpdist.algorithms.shared.team import RESULT_BYTES, SLOT_BYTES, Team
from mpdist.memory.quiet import IS_ONE_CALL

if TYPE_CHECKING:
    from mpdist.algorithms.reduction import Reduction
    from mpdist.memory import Element

# Small up to this size of an array times the number of members: measured with bench/collectives.py, 2 ranks.
SMALL_BYTES = 512 * 1024
# The same of an array of a pair that has two ways, of which the other may be twice as fast for larger ones.
SMALL_OF_PAIR_BYTES = 32 * 1024

# So many plans a team keeps, and so many of `known`; their views hold no memory of their own.
KNOWN_PLANS = 256

V = TypeVar("V")


def all_reduce(team: Team, how: Reduction, nbytes: int) -> Plan | None:
    """That of the team; None where an all_reduce of its members is done in another way."""
    plan = team.plans.get((how, nbytes))
    if plan is not None or how.op.factor is not None:
        return plan
    kind: type[SmallPlan | ShortPlan | SlicedPlan]
    if nbytes <= (SMALL_OF_PAIR_BYTES if team.has_two_ways else SMALL_BYTES // team.size):
        kind = SmallPlan
    elif team.has_two_ways and nbytes <= SLOT_BYTES and how.folder.pair_steps and IS_ONE_CALL:
        kind = ShortPlan
    elif team.size > 2 and nbytes <= min(SLOT_BYTES, team.size * RESULT_BYTES):
        kind = SlicedPlan
    else:
        return None
    return kept(team.plans, (how, nbytes), kind(team, how, nbytes))


def reduce_scatter(team: Team, how: Reduction, nbytes: int) -> Plan | None:
    """As of all_reduce; nbytes: of x."""
    key = ReduceScatterPlan, how, nbytes
    plan = team.plans.get(key)
    if plan is not None or how.op.factor is not None or nbytes > SLOT_BYTES:
        return plan
    return kept(team.plans, key, ReduceScatterPlan(team, how, nbytes))


def broadcast(team: Team, element: Element, nbytes: int, src: int) -> Plan | None:
    """As of all_reduce."""
    key = element, nbytes, src
    plan = team.plans.get(key)
    if plan is not None or nbytes > SLOT_BYTES:
        return plan
    return kept(team.plans, key, BroadcastPlan(team, element, nbytes, src))


def kept(known: dict[Any, V], key: tuple[Any, ...], value: V) -> V:
    """Put it down for the next one, after all others have been forgotten where they are too many."""
    if len(known) >= KNOWN_PLANS:
        known.clear()
    known[key] = value
    return value
