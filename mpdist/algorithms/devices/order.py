"""Order: the parts of a collective's rounds, and what each waits for; pure.

A member shows the next round before it takes the present one, so that others seldom
wait for it. Rounds are counted from the team's first to its last; a member tells how
many it has shown and how many it has taken, both when the work is queued and its
event recorded: the work itself may come later, see Team.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from mpdist.algorithms.devices.plan import Piece, Plan


class Told(IntEnum):
    """What a member tells the number of rounds of."""

    SHOWN = 0
    TAKEN = 1


class Wait(NamedTuple):
    """Until all others have told so many rounds; none for 0 and less."""

    told: Told
    rounds: int


class Do(NamedTuple):
    """Queue these pieces, which belong to a round."""

    pieces: Iterator[Piece]
    number: int


class Tell(NamedTuple):
    """Record the event, and tell so many rounds."""

    told: Told
    rounds: int


def order(plan: Plan, first: int) -> Iterator[Wait | Do | Tell]:
    """What a member does one after the other; `first` is the number of the plan's first round."""
    for place in range(plan.rounds + 1):
        number = first + place
        if place < plan.rounds:
            yield Wait(Told.TAKEN, number - 1)
            yield Do(plan.show(place), number)
            yield Tell(Told.SHOWN, number + 1)
        if place:
            yield Wait(Told.SHOWN, number)
            yield Do(plan.take(place - 1), number - 1)
            yield Tell(Told.TAKEN, number)
            if plan.has_finish:
                yield Wait(Told.TAKEN, number)
                yield Do(plan.finish(place - 1), number - 1)
