"""Several collectives through shared memory at once, on one communicator and on several, however they are awaited."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from algorithms.forcing import CHANGING, NATIVE, PAIRS, SHARED, SLOTS, Way, forced, replaced
from progress.test_loops import in_threads

import mpdist
from mpdist import Communicator
from mpdist.algorithms.shared.plans import KNOWN_PLANS

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.either_mpi, pytest.mark.limit(120)]

SIZES = (1, 900, 8192, 16_000, 40_000, 300_000, 70_001)
BIG = 2_000_000

WAYS = (
    SHARED,
    SLOTS,
    pytest.param(CHANGING, marks=pytest.mark.ranks(2)),
    pytest.param(PAIRS, marks=pytest.mark.ranks(3, 4)),
    NATIVE,
)

Posted = tuple["mpdist.Work[Any]", Callable[[], None]]


def value(number: int, rank: int) -> int:
    return number + 3 * rank + 1


def post(comm: Communicator, number: int) -> Posted:
    """One of several kinds of collective, and what checks its result; equal on all ranks but for where x lies."""
    count = SIZES[number % len(SIZES)]
    is_resident = (number + comm.rank) % 3 == 0
    x = comm.empty(count * comm.size, np.float32) if is_resident else np.empty(count * comm.size, np.float32)
    x[:] = value(number, comm.rank)
    part = x[:count]
    ranks = range(comm.size)
    total = sum(value(number, rank) for rank in ranks)
    root = number % comm.size

    def check(wanted: object) -> Callable[[], None]:
        def checked() -> None:
            got = work.result()
            np.testing.assert_array_equal(got, np.broadcast_to(wanted, got.shape), f"{work}, number {number}")

        return checked

    def nothing() -> None:
        assert work.result() is None

    column = np.array([[value(number, rank)] for rank in ranks])
    work: mpdist.Work[Any]
    match number % 9:
        case 0 | 1:
            work = comm.all_reduce(part)
            return work, check(total)
        case 2:
            work = comm.broadcast(part, root)
            return work, check(value(number, root))
        case 3:
            work = comm.all_gather(part)
            return work, check(column)
        case 4:
            work = comm.reduce_scatter(x)
            return work, check(total)
        case 5:
            work = comm.all_to_all(x)
            return work, check(np.repeat(column, count))
        case 6:
            work = comm.reduce(part, root)
            return work, check(total) if comm.rank == root else nothing
        case 7:
            work = comm.barrier()
            return work, nothing
        case _:
            work = comm.scatter(x if comm.rank == root else None, root)
            return work, check(value(number, root))


def shuffled(comm: Communicator, posted: list[Posted], seed: int) -> Iterator[Posted]:
    """In another order on every rank."""
    yield from random.Random(seed * 100 + comm.rank).sample(posted, len(posted))


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_twenty_at_once_awaited_in_any_order(comm: Communicator, way: Way) -> None:
    async with forced(comm, way) as made:
        for seed in range(4):
            posted = [post(made, 20 * seed + number) for number in range(20)]
            for work, check in shuffled(comm, posted, seed):
                await work
                check()


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_small_all_reduces_keep_their_order_whichever_is_awaited_first(comm: Communicator, way: Way) -> None:
    async with forced(comm, way) as made:
        await made.all_reduce(np.ones(8192, np.float32))
        for seed in range(30):
            arrays = [np.full(8192, number + 1, np.float32) for number in range(6)]
            works = [made.all_reduce(array) for array in arrays]
            for number in random.Random(seed * 100 + comm.rank).sample(range(6), 6):
                await works[number]
                assert (arrays[number] == (number + 1) * comm.size).all(), (seed, number)


async def test_small_all_reduces_of_more_sizes_than_are_remembered(comm: Communicator) -> None:
    async with forced(comm, SHARED) as made:
        for turn in range(2):
            works = [made.all_reduce(np.full(count, turn + made.rank)) for count in range(KNOWN_PLANS + 40)]
            for count, work in enumerate(works):
                assert (await work).tolist() == [turn * made.size + made.size * (made.size - 1) / 2] * count
        team: Any = made._channel.team
        assert 0 < len(team.plans) <= KNOWN_PLANS
        assert 0 < len(team.known) <= KNOWN_PLANS


async def test_an_op_by_its_name_and_as_an_object_is_the_same_call(comm: Communicator) -> None:
    """Ranks may mix them, and neither takes more steps."""
    ops = ["sum", mpdist.ReduceOp("sum")]
    async with forced(comm, SHARED) as made:
        await made.barrier()
        for number in range(6):
            x = np.full(12_000, made.rank + 1.0)
            await made.all_reduce(x, ops[(number + made.rank) % 2])
            assert (x == made.size * (made.size + 1) / 2).all()
        team: Any = made._channel.team
        assert len(team.known) == len(team.plans) == 1


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_twenty_at_once_waited_for_without_a_loop(comm: Communicator, way: Way) -> None:
    with replaced(comm, way):
        made = comm.dup().wait()
        for seed in range(4):
            posted = [post(made, 20 * seed + number) for number in range(20)]
            for work, check in shuffled(comm, posted, seed):
                work.wait(60)
                check()
        made.close().wait()


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_several_communicators_meet_and_work_at_once(comm: Communicator, way: Way) -> None:
    """Each of them begins in another order on every rank: making their slots must not wait for one another."""
    async with contextlib.AsyncExitStack() as stack:
        made = [await stack.enter_async_context(forced(comm, way)) for _ in range(4)]
        order = random.Random(comm.rank).sample(range(4), 4)
        posted: list[Posted] = []
        for turn in range(8):
            for each in order:
                posted.append(post(made[each], 4 * turn + each))
                if turn % 3 == comm.rank % 3:
                    await asyncio.sleep(0)
        for work, check in shuffled(comm, posted, 5):
            await work
            check()


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_tasks_with_communicators_of_their_own(comm: Communicator, way: Way) -> None:
    async def work_alone(made: Communicator, seed: int) -> None:
        for number in range(18):
            work, check = post(made, number + seed)
            await work
            check()

    async with contextlib.AsyncExitStack() as stack:
        made = [await stack.enter_async_context(forced(comm, way)) for _ in range(3)]
        await asyncio.gather(*(work_alone(each, seed) for seed, each in enumerate(made)))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_progress_thread_drives_them(comm: Communicator, way: Way) -> None:
    """With it operations advance while this thread sleeps."""
    engine = comm._channel.engine
    had_one = engine._thread is not None
    with replaced(comm, way):
        made = comm.dup().wait()
        engine.start_thread()
        try:
            posted = [post(made, number) for number in range(20)]
            end = time.monotonic() + 60
            while not all(work.done() for work, _ in posted) and time.monotonic() < end:
                time.sleep(0.001)
            for work, check in posted:
                assert work.done(), work
                check()
        finally:
            if not had_one:
                engine.stop_thread()
        made.close().wait()


def test_threads_with_communicators_of_their_own(comm: Communicator) -> None:
    with replaced(comm, SHARED):
        made = [comm.dup().wait() for _ in range(3)]

        def work_alone(which: int) -> Callable[[], None]:
            def run() -> None:
                for number in range(15):
                    work, check = post(made[which], number + which)
                    work.wait(60)
                    check()

            return run

        in_threads(*(work_alone(which) for which in range(3)))
        for each in made:
            each.close().wait()


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_a_cancelled_await_leaves_the_collective_running(comm: Communicator, way: Way) -> None:
    async with forced(comm, way) as made:
        for turn in range(5):
            x = np.full(BIG, comm.rank + turn, np.float32)
            work = made.all_reduce(x)

            async def wait(pending: mpdist.Work[Any] = work) -> None:
                await pending

            task = asyncio.create_task(wait())
            for _ in range(turn):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert work.cancel() is False
            small, check = post(made, turn)
            await small
            check()
            assert (await work == sum(rank + turn for rank in range(comm.size))).all()


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_arrays_dropped_while_their_collective_runs(comm: Communicator, way: Way) -> None:
    """The work leases them; their memory comes back when it is done, and no one has read anything else."""
    async with forced(comm, way) as made:
        await post(made, 3)[0]
        await comm.barrier()  # both have their slots
        gc.collect()
        before = used_bytes(comm)
        for turn in range(8):
            x = comm.empty(BIG // 4, np.float32)
            x[:] = value(turn, comm.rank)
            work = made.all_gather(x)
            del x
            noise = comm.empty(BIG // 4, np.float32)
            noise[:] = -1
            del noise
            if turn % 2:
                await comm.barrier()
            rows = await work
            assert rows[:, 0].tolist() == [value(turn, rank) for rank in range(comm.size)]
            assert (rows == rows[:, :1]).all()
            del work, rows
        await made.barrier()
        gc.collect()
        assert used_bytes(comm) <= before


def used_bytes(comm: Communicator) -> int:
    shared = comm._channel.engine.shared
    assert shared is not None
    return shared.arena.used_bytes


async def test_a_long_all_reduce_leaves_the_loop_its_turns(comm: Communicator) -> None:
    """A heartbeat beside 256 MiB: generous, for ranks share cores here; bench/ has the figures."""
    if comm.size > 2:
        pytest.skip("the ranks' memory together, and cores that they share")
    x = np.ones(2**26, np.float32)
    async with forced(comm, SHARED) as made:
        await made.all_reduce(np.ones(100_000, np.float32))
        beats: list[float] = []

        async def beat() -> None:
            while True:
                beats.append(time.monotonic())
                await asyncio.sleep(0)

        cpu = time.thread_time()
        heart = asyncio.create_task(beat())
        await made.all_reduce(x)
        heart.cancel()
        cpu = time.thread_time() - cpu
        assert (x == comm.size).all()
        gaps = np.diff(beats)
        assert len(gaps) > 20, "the loop had hardly a turn"
        assert np.quantile(gaps, 0.95) < 0.05, f"95 % of the turns came within {np.quantile(gaps, 0.95):.3f} s"
        assert cpu / len(gaps) < 0.005, f"{cpu / len(gaps):.4f} s of work in a turn"


def test_no_thread_is_left(comm: Communicator) -> None:
    """Waiting without a loop for shared collectives starts none."""
    with replaced(comm, SHARED):
        before = threading.active_count()
        made = comm.dup().wait()
        for number in range(9):
            work, check = post(made, number)
            work.wait(60)
            check()
        made.close().wait()
        assert threading.active_count() <= before
