"""Collectives of one round that a signal's handler interrupts, wherever that is: who waits again gets the right result.

Each place is tried in turn, see `interruptions`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from algorithms.forcing import SHARED, SLOTS, Way, replaced
from progress.interruptions import Interrupted, Interruptions, raising

from mpdist import Communicator, Work
from mpdist.algorithms.shared.pace import Pace

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.any_mpi, pytest.mark.limit(240)]

FILES = (
    "few",
    "one_round",
    "broadcast",
    "reduce_scatter",
    "small",
    "short",
    "sliced",
    "slots",
    "spread",
    "pace",
    "team",
    "moving",
)

# Elements of float32, and the way where there is a choice: few, small, short without and with it, and sliced.
CASES = (
    pytest.param(2, True, marks=pytest.mark.ranks(2)),
    pytest.param(500, True, marks=pytest.mark.ranks(2)),
    pytest.param(16_000, True, marks=pytest.mark.ranks(2)),
    pytest.param(30_000, False, marks=pytest.mark.ranks(2)),
    pytest.param(30_000, True, marks=pytest.mark.ranks(2)),
    pytest.param(50_000, True, marks=pytest.mark.ranks(3)),
)


@pytest.mark.parametrize("resident", ["none", "rank 0", "all"])
@pytest.mark.parametrize(("count", "through_slots"), CASES)
@pytest.mark.parametrize("op", ["sum", pytest.param("avg", marks=pytest.mark.ranks(2))])
def test_nothing_is_reduced_twice(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, op: str, count: int, resident: str, through_slots: bool
) -> None:
    monkeypatch.setattr(Pace, "is_through_slots", lambda *_: through_slots)
    with replaced(comm, SHARED):
        made = comm.dup().wait()
    made.barrier().wait()
    xs = inputs(made, count, resident)

    def post() -> list[Work[Any]]:
        return [made.all_reduce(x, op) for x in xs]

    def check(number: int, text: str) -> None:
        for place, x in enumerate(xs):
            wanted = place + number + (made.size - 1) / 2
            wanted *= made.size if op == "sum" else 1
            np.testing.assert_array_equal(x, wanted, f"array {place}, {text}")

    interrupt_everywhere(made, xs, post, check)
    made.close().wait()


@pytest.mark.parametrize("resident", ["none", "rank 0", "all"])
@pytest.mark.parametrize("count", [1000, 10_000])
def test_rows_are_reduced_once(comm: Communicator, count: int, resident: str) -> None:
    """Small ones always begin where a slot does."""
    with replaced(comm, SHARED):
        made = comm.dup().wait()
    made.barrier().wait()
    xs = inputs(made, count * made.size, resident)
    outs = [np.empty(count, np.float32) for _ in xs]

    def post() -> list[Work[Any]]:
        for x in xs:
            x += np.repeat(np.arange(made.size), count)
        return [made.reduce_scatter(x, out=out) for x, out in zip(xs, outs, strict=True)]

    def check(number: int, text: str) -> None:
        for place, out in enumerate(outs):
            wanted = made.size * (place + number + (made.size - 1) / 2 + made.rank)
            np.testing.assert_array_equal(out, wanted, f"array {place}, {text}")

    interrupt_everywhere(made, xs, post, check)
    made.close().wait()


@pytest.mark.parametrize("resident", ["none", "rank 0", "all"])
@pytest.mark.parametrize("way", [SHARED, SLOTS], ids=str)
def test_everybody_gets_what_the_root_has(comm: Communicator, way: Way, resident: str) -> None:
    with replaced(comm, way):
        made = comm.dup().wait()
        made.barrier().wait()
        xs = inputs(made, 1000, resident)

        def post() -> list[Work[Any]]:
            return [made.broadcast(x, 0) for x in xs]

        def check(number: int, text: str) -> None:
            for place, x in enumerate(xs):
                np.testing.assert_array_equal(x, place + number, f"array {place}, {text}")

        interrupt_everywhere(made, xs, post, check)
        made.close().wait()


def inputs(comm: Communicator, count: int, resident: str) -> list[Any]:
    """Three arrays, in memory that all map on some ranks."""
    is_resident = resident == "all" or (resident == "rank 0" and comm.rank == 0)
    return [comm.empty(count, np.float32) if is_resident else np.empty(count, np.float32) for _ in range(3)]


def interrupt_everywhere(
    comm: Communicator, xs: list[Any], post: Callable[[], list[Work[Any]]], check: Callable[[int, str], None]
) -> None:
    """Post calls on new numbers again and again, and interrupt the wait for the last, on each rank in turn.

    Each of two ranks at every place; of more ranks, which take long, each at one place in so many.
    """
    stride = 1 if comm.size == 2 else comm.size
    places = {rank: itertools.count(rank % stride, stride) for rank in range(comm.size)}
    number = 0
    while places:
        for rank in tuple(places):
            place = next(places[rank])
            if interrupt(comm, xs, post, check, number, rank, place):
                assert place > 20
                del places[rank]
            number += 1


def interrupt(
    comm: Communicator,
    xs: list[Any],
    post: Callable[[], list[Work[Any]]],
    check: Callable[[int, str], None],
    number: int,
    rank: int,
    place: int,
) -> bool:
    """At one place of one rank; returns whether it has fewer."""
    for index, x in enumerate(xs):
        x[:] = comm.rank + index + number
    works = post()
    is_interrupted = rank == comm.rank
    interruptions = Interruptions(place if is_interrupted else -1, "shared", FILES)
    with raising():
        try:
            with interruptions:
                works[-1].wait()
        except Interrupted:
            works[-1].wait()
    for work in works:
        work.wait()
    check(number, f"rank {rank} interrupted at place {place}")
    is_past = is_interrupted and interruptions.left >= 0
    return bool(comm.all_reduce(np.full(1, is_past), "lor").wait().any())
