"""Collectives of one round that a signal's handler interrupts, wherever that is: who waits again gets the right result.

Each place is tried in turn, see `interruptions`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from algorithms.forcing import SHARED, replaced
from progress.interruptions import Interrupted, Interruptions, raising

from mpdist import Communicator, Work
from mpdist.algorithms.shared.pace import Pace

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.limit(240)]

FILES = (
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

# Elements of float32, and the way where there is a choice: small, short without and with it, and sliced.
CASES = (
    pytest.param(500, True, marks=pytest.mark.ranks(2)),
    pytest.param(16_000, True, marks=pytest.mark.ranks(2)),
    pytest.param(30_000, False, marks=pytest.mark.ranks(2)),
    pytest.param(30_000, True, marks=pytest.mark.ranks(2)),
    pytest.param(50_000, True, marks=pytest.mark.ranks(3)),
)


@pytest.mark.parametrize("resident", ["none", "rank 0", "all"])
@pytest.mark.parametrize(("count", "through_slots"), CASES)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_nothing_is_reduced_twice(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, op: str, count: int, resident: str, through_slots: bool
) -> None:
    monkeypatch.setattr(Pace, "is_through_slots", lambda *_: through_slots)
    with replaced(comm, SHARED):
        made = comm.dup().wait()
    made.barrier().wait()
    is_resident = resident == "all" or (resident == "rank 0" and made.rank == 0)
    xs = [made.empty(count, np.float32) if is_resident else np.empty(count, np.float32) for _ in range(3)]

    def post() -> list[Work[Any]]:
        return [made.all_reduce(x, op) for x in xs]

    def check(number: int, text: str) -> None:
        for place, x in enumerate(xs):
            wanted = place + number + (made.size - 1) / 2
            wanted *= made.size if op == "sum" else 1
            np.testing.assert_array_equal(x, wanted, f"array {place}, {text}")

    interrupt_everywhere(made, xs, post, check)
    made.close().wait()


# What three calls of it have left in out, of 1000 elements, where rank r's x has r + number and so on for each.
def taken(comm: Communicator, op: str, x: float) -> Any:
    inputs = [x - comm.rank + rank for rank in range(comm.size)]
    if op == "reduce_scatter":
        return sum(inputs)
    return inputs[1] if op == "broadcast" else np.repeat(inputs, 1000)


@pytest.mark.parametrize("resident", ["none", "rank 0", "all"])
@pytest.mark.parametrize("op", ["reduce_scatter", "broadcast", "all_gather", "all_to_all"])
def test_everything_is_taken_once(comm: Communicator, op: str, resident: str) -> None:
    with replaced(comm, SHARED):
        made = comm.dup().wait()
    made.barrier().wait()
    is_resident = resident == "all" or (resident == "rank 0" and made.rank == 0)
    counts = {"reduce_scatter": (made.size, 1), "broadcast": (1, 1), "all_gather": (1, made.size)}
    rows, out_rows = counts.get(op, (made.size, made.size))
    make = made.empty if is_resident else np.empty
    xs = [make(1000 * rows, np.float32) for _ in range(3)]
    outs = xs if op == "broadcast" else [np.empty(1000 * out_rows, np.float32) for _ in range(3)]

    def post() -> list[Work[Any]]:
        if op == "broadcast":
            return [made.broadcast(x, 1) for x in xs]
        return [getattr(made, op)(x, out=out) for x, out in zip(xs, outs, strict=True)]

    def check(number: int, text: str) -> None:
        for place, out in enumerate(outs):
            np.testing.assert_array_equal(out, taken(made, op, made.rank + place + number), f"array {place}, {text}")

    interrupt_everywhere(made, xs, post, check)
    made.close().wait()


def interrupt_everywhere(
    comm: Communicator, xs: list[Any], post: Callable[[], list[Work[Any]]], check: Callable[[int, str], None]
) -> None:
    """Post calls on new numbers again and again, and interrupt the wait for the last, on each rank in turn."""
    for number in itertools.count():
        for place, x in enumerate(xs):
            x[:] = comm.rank + place + number
        works = post()
        is_interrupted = number % comm.size == comm.rank
        interruptions = Interruptions(number // comm.size if is_interrupted else -1, "shared", FILES)
        with raising():
            try:
                with interruptions:
                    works[-1].wait()
            except Interrupted:
                works[-1].wait()
        for work in works:
            work.wait()
        check(number, f"interrupted at place {number // comm.size}")
        is_past = is_interrupted and interruptions.left >= 0
        if comm.all_reduce(np.full(1, is_past), "lor").wait().any():
            assert number > 20
            return
