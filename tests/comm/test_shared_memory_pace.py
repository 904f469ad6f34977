"""The way of a pair's private arrays: what rank 0 tells is what both do, whatever it tells and when."""

from __future__ import annotations

import random

import numpy as np
import pytest
from algorithms.forcing import SHARED, forced, skip_without_reach

from mpdist import Communicator, premul_sum
from mpdist.algorithms.shared.pace import Pace
from mpdist.algorithms.shared.spread import SAMPLES

pytestmark = [pytest.mark.ranks(2), pytest.mark.either_mpi, pytest.mark.limit(120)]

COUNTS = (100_000, 140_000, 500_001)


async def test_both_follow_what_rank_0_tells(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 changes its mind at random; rank 1 knows of it by what it is told only."""
    skip_without_reach(comm)
    chance = random.Random(comm.rank)
    taken: list[bool] = []

    def took(self: Pace, nbytes: int, through_slots: bool, seconds: float) -> None:
        assert comm.rank == 0
        assert seconds > 0
        taken.append(through_slots)
        self.word ^= (chance.random() < 0.5) << nbytes.bit_length()

    monkeypatch.setattr(Pace, "took", took)
    order = random.Random(1)
    async with forced(comm, SHARED) as made:
        for number in range(300):
            count = order.choice(COUNTS)
            kind = order.randrange(12)
            expected = 2.0 * number + 1
            x = np.full(count, number + made.rank, np.float16 if kind == 0 else np.float32)
            if kind == 1 and made.rank == number % 2:
                resident = made.empty(count, np.float32)
                resident[:] = x
                x = resident
            if kind == 2:
                assert (await made.all_reduce(x, premul_sum(made.rank + 1.0)) == number + 2.0 * (number + 1)).all()
            elif kind == 3:
                out = np.empty_like(x)
                assert (await made.all_reduce(x, out=out, deterministic=number % 2 == 0) == expected).all()
                assert (x == number + made.rank).all()
            elif kind in (6, 7):
                rows = np.stack([x, x + 1]).astype(np.float16 if kind == 7 else np.float32)
                assert (await made.reduce_scatter(rows) == expected + 2 * made.rank).all()
            elif kind == 8:
                gathered = await made.all_gather(x)
                assert (gathered.reshape(2, count) == [[number], [number + 1]]).all()
            elif kind == 9:
                rows = np.stack([x, x + 10])
                assert (await made.all_to_all(rows) == np.array([[number], [number + 1]]) + 10 * made.rank).all()
            elif kind in (10, 11):
                assert (await made.broadcast(x, kind - 10) == number + kind - 10).all()
            elif kind == 4:
                small = [made.all_reduce(np.ones(3)) for _ in range(3)]
                assert (await made.all_reduce(x) == expected).all()
                for work in small:
                    assert (await work == 2).all()
            else:
                assert (await made.all_reduce(x) == expected).all()
    if comm.rank == 0:
        assert 30 < sum(taken) < len(taken) - 30
    else:
        assert not taken


async def test_rounds_in_places_that_are_tried_are_not_timed(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be the slower ones, see Spread, and would make slots look slow."""
    skip_without_reach(comm)
    taken: list[bool] = []
    monkeypatch.setattr(Pace, "is_through_slots", lambda *_: True)
    monkeypatch.setattr(Pace, "took", lambda self, nbytes, through_slots, seconds: taken.append(through_slots))
    async with forced(comm, SHARED) as made:
        for _ in range(3 * SAMPLES):
            assert (await made.all_reduce(np.ones(100_000, np.float32)) == 2).all()
    assert taken == ([True] * SAMPLES if comm.rank == 0 else [])
