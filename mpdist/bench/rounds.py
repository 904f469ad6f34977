"""Rounds: contenders take turns, round by round; results are checked before and after.

The machine may be shared, and its cores far apart for whole runs: only times of
the same rounds are compared. A round of a contender is as many repetitions as
make it long enough for the clock; its time is that of the slowest rank, divided
by the repetitions. Up to ten before them, a tenth of them at most, are not timed:
then the caches are the contender's own. What is decided is decided from times of
the slowest rank, which all ranks know.

Some calls of some MPIs take seconds. They are measured too, with fewer warm-ups
and fewer rounds, for nothing so slow needs more to be seen.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from mpdist.bench.contenders import Bound
from mpdist.bench.operations import Array, given
from mpdist.errors import MpdistError

T = TypeVar("T")

# MPICH takes its shared-memory path after 5 collectives on a communicator; caches and page tables are warm sooner.
WARM_UPS = 10
ROUND_SECONDS = 0.002
MAX_REPETITIONS = 5000
MIN_ROUNDS, MAX_ROUNDS = 7, 101
# How often a round is tried to find out how many repetitions make it long enough; the fastest counts.
ESTIMATES = 5
# After so many seconds of warming one contender up, or of rounds, what has been done is enough ...
WARM_UP_SECONDS, ROUNDS_SECONDS = 0.3, 4.0
# ... but so many rounds there are.
FEWEST_ROUNDS = 3
# One poisoned element would be enough; NaN spreads through every operation that touches it.
POISON = np.nan


class WrongResult(MpdistError):
    """A contender has computed something else than it should have."""


class Agreement(Protocol):
    """What the ranks need to measure together, apart from what is measured."""

    def fence(self) -> None: ...

    def of_all(self, item: T) -> list[T]: ...

    def slowest(self, seconds: list[float]) -> list[float]: ...


@dataclass(frozen=True)
class Plan:
    """How often each contender repeats in a round, and how many rounds there are."""

    repetitions: Mapping[str, int]
    rounds: int


def plan(seconds_each: Mapping[str, float], seconds: float) -> Plan:
    """Rounds that are long enough for the clock, and as many as fit into `seconds`.

    Args:
        seconds_each: time of one repetition of each contender.
    """
    repetitions = {
        name: min(max(math.ceil(ROUND_SECONDS / max(each, 1e-9)), 1), MAX_REPETITIONS)
        for name, each in seconds_each.items()
    }
    one_round = sum(seconds_each[name] * count for name, count in repetitions.items())
    return Plan(repetitions, max(int(min(seconds / one_round, MAX_ROUNDS)), MIN_ROUNDS))


async def measure(
    bounds: Mapping[str, Bound], agreement: Agreement, seconds: float
) -> tuple[Plan, dict[str, list[float]]]:
    """Warm all contenders up, then let them alternate; seconds per repetition, round by round."""
    each = {name: await _warm_up(bound, agreement) for name, bound in bounds.items()}
    for _ in range(ESTIMATES):
        chosen = plan(each, seconds)
        for name, bound in bounds.items():
            count = chosen.repetitions[name]
            if count > 1:  # in a row they take less time than single ones
                each[name] = min(each[name], await _of_slowest(bound, agreement, count) / count)
    chosen = plan(each, seconds)
    times = await _rounds(bounds, agreement, chosen, max(seconds, ROUNDS_SECONDS))
    return chosen, {name: agreement.slowest(kept) for name, kept in times.items()}


async def _warm_up(bound: Bound, agreement: Agreement) -> float:
    """Repeat until it is warm, or has been going on for long; the usual seconds of one repetition."""
    kept: list[float] = []
    while len(kept) < WARM_UPS and sum(kept) < WARM_UP_SECONDS:
        kept.append(await _of_slowest(bound, agreement, 1))
    return statistics.median(kept)


async def _rounds(
    bounds: Mapping[str, Bound], agreement: Agreement, chosen: Plan, longest: float
) -> dict[str, list[float]]:
    """This rank's seconds per repetition; no further rounds after `longest` seconds."""
    times: dict[str, list[float]] = {name: [] for name in bounds}
    start = time.perf_counter()
    for number in range(chosen.rounds):
        if number >= FEWEST_ROUNDS and agreement.slowest([time.perf_counter() - start])[0] > longest:
            break
        for name in turns(bounds, number):
            count = chosen.repetitions[name]
            times[name].append(await _timed(bounds[name], agreement, count) / count)
    return times


def turns(names: Iterable[str], number: int) -> list[str]:
    """Their order in the round of this number, the same on all ranks; nobody always runs after the same one."""
    known = list(names)
    return random.Random(number).sample(known, len(known))


async def _timed(bound: Bound, agreement: Agreement, count: int) -> float:
    warm_ups = min(WARM_UPS, count // 10)
    if warm_ups:
        await bound.run(warm_ups)
    agreement.fence()
    start = time.perf_counter()
    await bound.run(count)
    return time.perf_counter() - start


async def _of_slowest(bound: Bound, agreement: Agreement, count: int) -> float:
    """Seconds that the slowest rank takes; the same on all ranks."""
    (seconds,) = agreement.slowest([await _timed(bound, agreement, count)])
    return seconds


async def check(what: str, bound: Bound, agreement: Agreement, rank: int, wanted: Array | None) -> None:
    """Do it once on known inputs and compare every element; afterwards the arrays are zero.

    Args:
        what: is checked, for the text of an error.
        wanted: see `expected`.

    Raises:
        WrongResult: on all ranks, if it is wrong on any.
    """
    if bound.result is not None and bound.result is not bound.source:
        bound.result[:] = POISON
    if bound.source is not None:
        bound.source[:] = given(rank, bound.source.size)
    agreement.fence()
    await bound.run(1)
    is_right = wanted is None or (bound.result is not None and np.array_equal(bound.result, wanted))
    for array in (bound.source, bound.result):
        if array is not None:
            array[:] = 0
    wrong = [other for other, right in enumerate(agreement.of_all(is_right)) if not right]
    if wrong:
        raise WrongResult(
            f"{what} gave a wrong result on ranks {wrong}, so its time would mean nothing; please report it"
        )
