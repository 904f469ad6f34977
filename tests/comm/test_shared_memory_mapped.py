"""All_reduces of a pair whose arrays are all mapped: what is known of their places is used again, and never wrong."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from algorithms.forcing import SHARED, forced, skip_without_reach

from mpdist import Communicator
from mpdist.algorithms.shared import short
from mpdist.algorithms.shared.one_round import VIEWS, AllReducePlan
from mpdist.algorithms.shared.short import ShortPlan

pytestmark = [pytest.mark.ranks(2), pytest.mark.either_mpi]

KNOWN = 5


@pytest.mark.parametrize("op", ["sum", "avg", "max"])
@pytest.mark.parametrize("count", [16_000, 50_001])
async def test_arrays_in_many_places(comm: Communicator, monkeypatch: pytest.MonkeyPatch, op: str, count: int) -> None:
    """Each rank takes its arrays in another order, in place and not; some are freed, and others lie there then."""
    skip_without_reach(comm)
    monkeypatch.setattr(short, "KNOWN_SHARES", KNOWN)
    chance = random.Random(comm.rank)
    async with forced(comm, SHARED) as made:
        arrays = [made.empty(count, np.float32) for _ in range(4)]
        for number in range(100):
            x, out = chance.choice(arrays), chance.choice(arrays)
            x[:] = number + made.rank + np.arange(count) % 3
            before = x.copy()
            result: Any = await made.all_reduce(x, op, out=None if out is x else out)
            one, other = (number + rank + np.arange(count, dtype=np.float32) % 3 for rank in range(2))
            wanted = {"sum": one + other, "avg": (one + other) / 2, "max": other}[op]
            np.testing.assert_array_equal(result, wanted, f"call {number}")
            assert out is x or (x == before).all()
            if number % 10 == 9:
                del x, out, result
                arrays[chance.randrange(4)] = made.empty(count, np.float32)
        team: Any = made._channel.team
        assert [plan.nbytes for plan in team.plans.values() if isinstance(plan, ShortPlan)] == [4 * count]
        assert 0 < len(team.shares) <= KNOWN


async def test_views_are_made_once(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_reach(comm)
    made_for: list[int] = []
    reducing = ShortPlan.reducing

    def noted(plan: ShortPlan, *arrays: Any) -> Any:
        made_for.append(plan.nbytes)
        return reducing(plan, *arrays)

    async with forced(comm, SHARED) as made:
        x = made.empty(20_000, np.float32)
        x[:] = 1
        await made.all_reduce(x)  # maybe in another way: it is not known yet that all arrays are mapped
        await made.all_reduce(x)
        monkeypatch.setattr(ShortPlan, "reducing", noted)
        for _ in range(3):
            await made.all_reduce(x)
        assert (x == 2**5).all()
        assert made_for == []


async def test_a_plan_keeps_some_views_of_slots_and_gives_all(comm: Communicator) -> None:
    skip_without_reach(comm)
    async with forced(comm, SHARED) as made:
        await made.all_reduce(np.ones(4000, np.float32))
        team: Any = made._channel.team
        [plan] = [plan for plan in team.plans.values() if isinstance(plan, AllReducePlan)]
        first = plan.slots.array(0, 0, 4000)
        for start in range(0, 64 * 3 * VIEWS, 64):
            assert plan.view(0, start).ctypes.data == first.ctypes.data + start
        assert len(plan._views[0]) == VIEWS
