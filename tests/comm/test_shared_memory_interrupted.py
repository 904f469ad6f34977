"""All_reduces of one round that a signal's handler interrupts, wherever that is: who waits again gets the right result.

Each place is tried in turn, see `interruptions`.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from algorithms.forcing import SHARED, replaced
from progress.interruptions import Interrupted, Interruptions, raising

from mpdist import Communicator
from mpdist.algorithms.shared.pace import Pace

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.limit(240)]

FILES = ("one_round", "small", "short", "sliced", "slots", "spread", "pace", "team", "moving")

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
    for number in itertools.count():
        for place, x in enumerate(xs):
            x[:] = made.rank + place + number
        works = [made.all_reduce(x, op) for x in xs]
        is_interrupted = number % made.size == made.rank
        interruptions = Interruptions(number // made.size if is_interrupted else -1, "shared", FILES)
        with raising():
            try:
                with interruptions:
                    works[-1].wait()
            except Interrupted:
                works[-1].wait()
        for place, (x, work) in enumerate(zip(xs, works, strict=True)):
            work.wait()
            wanted = place + number + (made.size - 1) / 2
            wanted *= made.size if op == "sum" else 1
            np.testing.assert_array_equal(x, wanted, f"array {place}, interrupted at place {number // made.size}")
        is_past = is_interrupted and interruptions.left >= 0
        if made.all_reduce(np.full(1, is_past), "lor").wait().any():
            assert number > 20
            break
    made.close().wait()
