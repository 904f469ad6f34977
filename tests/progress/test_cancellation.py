"""Cancellation under stress: receives are cancelled at random, and no message is lost, given twice, or out of order."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import numpy as np
import pytest

import mpdist
from mpdist import Communicator

pytestmark = [pytest.mark.ranks(2), pytest.mark.limit(40)]

NUMBER = int(os.environ.get("MPDIST_TEST_MESSAGES", "4000"))
SIZES = (1, 1, 1, 200, 3000, 40_000)


def size_of(number: int) -> int:
    return random.Random(number).choice(SIZES)


async def flood(comm: Communicator, tags: int) -> None:
    """Numbered messages of several sizes, a sequence for each tag."""
    pending: list[mpdist.Work[None]] = []
    for number in range(NUMBER):
        pending.append(comm.send(np.full(size_of(number), number), 1 - comm.rank, number % tags))
        if len(pending) > 50:
            await pending.pop(0)
        if number % 97 == 0:
            await asyncio.sleep(0)
    await asyncio.gather(*pending)


async def receive_with_interruptions(comm: Communicator, tag: int, count: int, chance: random.Random) -> list[int]:
    """One receive at a time, cancelled after a random while, again and again."""
    got = []
    while len(got) < count:
        out = np.full(max(SIZES), -1) if chance.random() < 0.5 else None
        task = asyncio.ensure_future(comm.recv(out, 1 - comm.rank, tag))
        for _ in range(chance.randrange(1, 5)):  # an await that never began cannot be cancelled
            await asyncio.sleep(0)
        if chance.random() < 0.5:
            task.cancel()
        try:
            message = await task
        except asyncio.CancelledError:
            continue
        value = int(message.data[0])
        assert message.count == size_of(value)
        assert (message.data[: message.count] == value).all()
        assert out is None or (out[message.count :] == -1).all()
        got.append(value)
    return got


async def test_one_receive_at_a_time_keeps_the_order(comm: Communicator) -> None:
    tags = 3
    sending = asyncio.create_task(flood(comm, tags))
    for_each = [list(range(tag, NUMBER, tags)) for tag in range(tags)]
    got = await asyncio.gather(
        *(receive_with_interruptions(comm, tag, len(for_each[tag]), random.Random(tag)) for tag in range(tags))
    )
    assert got == for_each
    await sending


async def test_of_many_receives_cancelled_at_random_none_loses_or_doubles_a_message(comm: Communicator) -> None:
    chance = random.Random(comm.rank)
    sending = asyncio.create_task(flood(comm, 3))
    got: list[int] = []
    waiting: set[asyncio.Future[mpdist.Message]] = set()
    while len(got) < NUMBER:
        while len(waiting) < min(20, NUMBER - len(got)):
            tag = chance.choice((0, 1, 2, mpdist.ANY_TAG, mpdist.ANY_TAG))
            waiting.add(asyncio.ensure_future(comm.recv(tag=tag)))
        await asyncio.sleep(0)  # an await that never began cannot be cancelled
        for task in chance.sample(sorted(waiting, key=id), (len(waiting) + 2) // 3):
            task.cancel()
        done, waiting = await asyncio.wait(waiting, timeout=0.001)
        got += [int(task.result().data[0]) for task in done if not task.cancelled()]
    for task in waiting:
        task.cancel()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    got += [int(result.data[0]) for result in results if isinstance(result, mpdist.Message)]
    assert sorted(got) == list(range(NUMBER))
    await sending
    await comm.barrier()


async def test_works_cancelled_directly_lose_nothing(comm: Communicator) -> None:
    chance = random.Random(comm.rank)
    sending = asyncio.create_task(flood(comm, 1))
    got = []
    while len(got) < NUMBER:
        works = [comm.recv() for _ in range(chance.randrange(1, 6))]
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
        kept = [work for work in works if not (chance.random() < 0.5 and work.cancel())]
        for work in kept:
            if len(got) == NUMBER:
                assert work.cancel()
                continue
            got.append(int((await work).data[0]))
        await asyncio.sleep(0)
    assert sorted(got) == list(range(NUMBER))
    await sending


async def test_probes_and_objects_cancelled_at_random_lose_nothing(comm: Communicator) -> None:
    chance = random.Random(comm.rank)
    number = NUMBER // 8

    async def send_all() -> None:
        for value in range(number):
            await comm.send_object((value, np.full(chance.choice(SIZES), value)), 1 - comm.rank)

    sending = asyncio.create_task(send_all())
    got = []
    while len(got) < number:
        work = comm.probe() if chance.random() < 0.5 else comm.recv_object()
        task = asyncio.ensure_future(work)
        for _ in range(chance.randrange(1, 5)):  # an await that never began cannot be cancelled
            await asyncio.sleep(0)
        if chance.random() < 0.5:
            task.cancel()
        try:
            message = await task
        except asyncio.CancelledError:
            continue
        if message.data is None:
            message = await message.recv()
        value, array = message.data
        assert (array == value).all()
        got.append(value)
    assert got == list(range(number))
    await sending
    await comm.barrier()


async def test_cancelled_awaits_of_collectives_and_sends_leave_everything_usable(comm: Communicator) -> None:
    chance = random.Random(comm.rank)
    works = []
    for turn in range(200):
        work = comm.all_reduce(np.full(1, turn)) if turn % 3 else comm.all_gather([np.full(3, turn)])
        receive = comm.recv()
        sent = comm.send(np.full(50_000 if turn % 10 == 0 else 1, turn), 1 - comm.rank)
        for each in (work, sent):
            task = asyncio.ensure_future(each)
            await asyncio.sleep(0)
            if chance.random() < 0.5:
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        works.append((work, sent))
        assert (await receive).data[0] == turn
    for turn, (work, sent) in enumerate(works):
        result = await work
        assert (result == 2 * turn).all() if turn % 3 else all((each == turn).all() for each in result)
        await sent
    assert comm._channel.unfinished() == []


def test_a_wait_that_a_handler_of_a_signal_ends_withdraws_its_receive(comm: Communicator) -> None:
    def ends(*_: object) -> None:
        raise KeyError

    before = signal.signal(signal.SIGALRM, ends)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyError):
            comm.recv(src=1 - comm.rank, tag=3).wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    comm.barrier().wait()
    comm.send(np.full(3, comm.rank), 1 - comm.rank, 3).wait()
    assert comm.recv(src=1 - comm.rank, tag=3).wait().data.tolist() == [1 - comm.rank] * 3


async def test_large_objects_leave_nothing_behind(comm: Communicator) -> None:
    for tag in range(3):
        work = comm.send_object(["x" * 200_000, np.full(100_000, tag)], 1 - comm.rank, tag)
        assert (await comm.recv_object(src=1 - comm.rank, tag=tag)).data[1][-1] == tag
        await work
    assert comm._channel.inbox._in_pieces == {}
