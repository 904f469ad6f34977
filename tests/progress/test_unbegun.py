"""Unbegun: a task that is cancelled before its first step gives its receive up, and loses no message."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import mpdist
from mpdist import Communicator

pytestmark = [pytest.mark.ranks(2), pytest.mark.loops]

TURNS = 4


def peer(comm: Communicator) -> int:
    return 1 - comm.rank


async def some_turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def test_a_task_that_never_began_leaves_no_receive_behind(comm: Communicator) -> None:
    """Also while the task is kept: its error's traceback holds the Work."""
    for make in (comm.recv, lambda: comm.recv(np.zeros(1)), comm.recv_object, comm.probe):
        work = make()
        task = asyncio.ensure_future(work)
        assert task.cancel()
        await some_turns()
        assert task.cancelled()
        assert work.cancelled()
    assert comm._channel.unfinished() == []
    await comm.barrier()
    await comm.send(np.full(1, 7.0), peer(comm))
    assert (await comm.recv()).data[0] == 7


async def test_a_timeout_of_nothing_leaves_no_receive_behind(comm: Communicator) -> None:
    """The next receive is posted where the error is still held."""
    try:
        await asyncio.wait_for(comm.recv(), 0)
    except TimeoutError:
        await comm.barrier()
        await comm.send(np.full(1, 3.0), peer(comm))
        assert (await comm.recv()).data[0] == 3
    else:
        pytest.fail("nobody has sent yet")


async def test_gather_that_is_cancelled_at_once_leaves_no_receive_behind(comm: Communicator) -> None:
    gathered = asyncio.gather(*(comm.recv(tag=tag) for tag in range(3)))
    gathered.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gathered
    await asyncio.sleep(0)
    assert comm._channel.unfinished() == []


async def test_a_message_that_was_here_goes_to_the_next_receive(comm: Communicator) -> None:
    """The receive is done as soon as it is posted, and nobody ever sees its result."""
    for value in range(2):
        await comm.send(np.full(1, float(value)), comm.rank, 1)
    task = asyncio.ensure_future(comm.recv(tag=1))
    task.cancel()
    await some_turns()
    assert [(await comm.recv(tag=1)).data[0] for _ in range(2)] == [0, 1]


async def test_a_receive_posted_before_the_task_dies_gets_the_message(comm: Communicator) -> None:
    task = asyncio.ensure_future(comm.recv(src=comm.rank, tag=1))
    task.cancel()
    later = comm.recv(src=comm.rank, tag=1)
    await comm.send(np.full(1, 5.0), comm.rank, 1)
    assert (await later).data[0] == 5


async def test_sendrecv_that_never_began_withdraws_its_receive(comm: Communicator) -> None:
    work = comm.sendrecv(np.full(1, 1.0), comm.rank, None, peer(comm), tag=2)
    task = asyncio.ensure_future(work)
    task.cancel()
    await some_turns()
    assert work.cancelled()
    assert (await comm.recv(src=comm.rank, tag=2)).data[0] == 1


async def test_a_task_that_begins_keeps_its_receive(comm: Communicator) -> None:
    """Wrapped once or twice, by tasks that wait for long."""
    work = comm.recv(src=comm.rank, tag=1)
    tasks = [asyncio.ensure_future(work) for _ in range(2)]
    await some_turns()
    again = asyncio.ensure_future(work)
    await some_turns()
    assert not work.done()
    await comm.send(np.full(1, 9.0), comm.rank, 1)
    assert [message.data[0] for message in await asyncio.gather(*tasks, again)] == [9] * 3


async def test_wrapping_again_in_the_turn_of_the_first_step_keeps_it(comm: Communicator) -> None:
    work = comm.recv(src=comm.rank, tag=1)
    first = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    second = asyncio.ensure_future(work)
    await some_turns()
    assert not work.done()
    await comm.send(np.full(1, 9.0), comm.rank, 1)
    assert (await first) is (await second)


async def test_asking_whether_it_is_a_future_changes_nothing(comm: Communicator) -> None:
    work = comm.recv(src=comm.rank, tag=1)
    kind = type(work)
    assert not asyncio.isfuture(work)
    await some_turns()
    assert not work.done()
    assert type(work) is kind
    await comm.send(np.full(1, 2.0), comm.rank, 1)
    assert (await work).data[0] == 2


async def test_a_result_that_was_seen_is_not_given_twice(comm: Communicator) -> None:
    """Awaited, asked or waited for before a task that never begins is made of it."""
    for look in ("await", "result"):
        work = comm.recv(src=comm.rank, tag=1)
        await comm.send(np.full(1, 4.0), comm.rank, 1)
        message = await work if look == "await" else work.result()
        assert message.data[0] == 4
        asyncio.ensure_future(work).cancel()
        await some_turns()
        assert comm._channel.inbox.unclaimed() == []
        assert work.result() is message


async def test_sends_and_collectives_that_never_began_go_on(comm: Communicator) -> None:
    works: list[mpdist.Work[object]] = [comm.send(np.ones(100_000), peer(comm)), comm.all_reduce(np.ones(1))]
    for work in works:
        asyncio.ensure_future(work).cancel()
    await some_turns()
    assert (await comm.recv()).count == 100_000
    await asyncio.gather(*works)
