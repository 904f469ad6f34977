"""Collectives of one round that a signal's handler interrupts, wherever that is: who waits again gets the right result.

Each place is tried in turn, see `interruptions`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from algorithms.forcing import SHARED, SLOTS, Way, replaced
from progress.interruptions import Interrupted, Interruptions, raising

from mpdist import Communicator, Work
from mpdist.algorithms.shared.pace import Pace
from mpdist.algorithms.shared.team import BARRIER, STAGED

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.any_mpi, pytest.mark.limit(240)]

FILES = (
    "few",
    "few_works",
    "members",
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
    monkeypatch.setattr(Communicator, "_note", lambda *_: None)  # what goes at once: test_interruption_of_posting.py
    for _ in range(2):
        made.all_reduce(np.zeros(count, np.float32), op).wait()
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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("resident", ["none", "all"])
@pytest.mark.parametrize("count", [500, 16_000])
async def test_a_call_of_which_nobody_heard_may_be_made_again(
    comm: Communicator, count: int, resident: str, is_second: bool
) -> None:
    """Rank 0 is interrupted while it posts, at each place until the other has heard; another call may be under way."""
    with replaced(comm, SHARED):
        made = await comm.dup()
    await made.barrier()
    earlier, x, _ = inputs(made, count, resident)
    await made.all_reduce(x)
    for place in itertools.count():
        earlier[:] = x[:] = 1 + made.rank
        works, has_heard, is_past = [], False, False
        if made.rank == 0:
            works += [made.all_reduce(earlier)] if is_second else []
            has_heard, is_past = post_again(works, lambda: made.all_reduce(x), made, STAGED, place)
        has_heard, is_past = await comm.broadcast_object((has_heard, is_past), 0)
        if has_heard:
            break
        if made.rank == 1:
            works = [made.all_reduce(each) for each in ([earlier, x] if is_second else [x])]
        for work in works:
            await work
        assert (x == 3).all(), f"interrupted at place {place}"
        assert (earlier == (3 if is_second else 1 + made.rank)).all(), f"interrupted at place {place}"
        if is_past:
            break
    assert place > 1
    await leave(made)


@pytest.mark.ranks(2)
async def test_a_barrier_of_which_nobody_heard_may_be_entered_again(comm: Communicator) -> None:
    """Once others have, no handler comes before its Work is there."""
    with replaced(comm, SHARED):
        made = await comm.dup()
    await made.barrier()
    for place in itertools.count():
        works, is_past = [], False
        if made.rank == 0:
            has_heard, is_past = post_again(works, made.barrier, made, BARRIER, place)
            assert not has_heard
        else:
            works = [made.barrier()]
        await asyncio.wait_for(works[0], 30)
        if await comm.broadcast_object(is_past, 0):
            break
    assert place > 0
    await made.close()


def post_again(
    works: list[Work[Any]], post: Callable[[], Work[Any]], comm: Communicator, word: int, place: int
) -> tuple[bool, bool]:
    """Post, interrupted at that place, and once more if the others have not heard of it.

    Returns:
        Whether they have, which this word tells, and whether there are fewer places.
    """
    team = comm._channel.team
    assert team is not None
    before = team.mine[word]
    interruptions = Interruptions(place, "shared", FILES)
    with raising():
        try:
            with interruptions:
                works.append(post())
        except Interrupted:
            if team.mine[word] != before:
                return True, False
            works.append(post())
    return False, interruptions.left >= 0


async def leave(comm: Communicator) -> None:
    """Without the other, which may not have heard of a call."""
    with pytest.raises(Interrupted):
        async with comm:
            raise Interrupted


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
