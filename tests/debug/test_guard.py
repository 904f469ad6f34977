"""Guard on ranks: memory of pending operations that is used for anything else is noticed on the rank that does it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest

import mpdist
from mpdist.debug import install_debug

pytestmark = pytest.mark.ranks(2, 3)

# Larger than what MPI copies when it is posted, so that the send is pending until its receiver takes it.
LARGE = 1 << 20

SENDER, RECEIVER = 0, 1


@pytest.fixture
async def guarded(comm: mpdist.Communicator) -> AsyncIterator[mpdist.Communicator]:
    """A communicator in debug mode."""
    engine = comm._channel.engine
    install_debug(engine)
    try:
        async with await comm.dup() as guarded:
            yield guarded
    finally:
        engine.on_channel = None


async def test_a_send_whose_buffer_changes_fails_on_its_rank(guarded: mpdist.Communicator) -> None:
    if guarded.rank == SENDER:
        x = np.ones(LARGE)
        work = guarded.send(x, RECEIVER, tag=5)
        await asyncio.sleep(0.05)
        x[-1] = 7
        await guarded.send(np.ones(1), RECEIVER)
        with pytest.raises(
            mpdist.UsageError,
            match=r"send to 1, tag 5 on '.*' .*, called at .*test_guard.py:\d+: the buffer was changed",
        ):
            await work
    if guarded.rank == RECEIVER:
        await guarded.recv(src=SENDER, tag=0)
        assert (await guarded.recv(src=SENDER, tag=5)).count == LARGE
    await guarded.barrier()


async def test_a_send_whose_buffer_stays_is_fine(guarded: mpdist.Communicator) -> None:
    x = np.arange(LARGE)
    if guarded.rank == SENDER:
        work, again = guarded.send(x, RECEIVER), guarded.send(x[: LARGE // 2], RECEIVER)
        await asyncio.gather(work, again)
        x[:] = 0
    if guarded.rank == RECEIVER:
        assert (await guarded.recv(x, src=SENDER)).data[-1] == LARGE - 1
        assert (await guarded.recv(x, src=SENDER)).count == LARGE // 2
    await guarded.barrier()


Post = Callable[[mpdist.Communicator, np.ndarray], Awaitable[object]]

INPUTS: dict[str, Post] = {
    "all_reduce": lambda c, x: c.all_reduce(x, out=np.empty_like(x)),
    "reduce": lambda c, x: c.reduce(x, 0),
    "all_gather": lambda c, x: c.all_gather(x),
    "uneven all_gather": lambda c, x: c.all_gather([x]),
    "gather": lambda c, x: c.gather(x, 0),
    "scan": lambda c, x: c.scan(x),
    "uneven all_to_all": lambda c, x: c.all_to_all([x] * c.size),
    "scatter": lambda c, x: c.scatter(x if c.rank == 0 else None, 0),
    "uneven scatter": lambda c, x: c.scatter(np.split(x, range(1, c.size)) if c.rank == 0 else None, 0),
    "uneven reduce_scatter": lambda c, x: c.reduce_scatter(np.split(x, range(1, c.size))),
    "reduce by function": lambda c, x: c.all_reduce(x, op=np.add, out=np.empty_like(x)),
}


@pytest.mark.parametrize("what", INPUTS)
async def test_a_collective_whose_input_changes_fails_on_its_rank(guarded: mpdist.Communicator, what: str) -> None:
    x = np.ones(12, np.float32)
    await guarded.barrier()
    if guarded.rank == 1:
        await guarded.recv(src=0)
    work = INPUTS[what](guarded, x)
    if guarded.rank == 0:
        x[3] = 7  # the others have not come yet
        for rank in range(1, guarded.size):
            await guarded.send(np.ones(1), rank)
    if guarded.rank > 1:
        await guarded.recv(src=0)
    if guarded.rank == 0:
        with pytest.raises(mpdist.UsageError, match=r"#\d+ on .*, called at .*test_guard.py:\d+: the buffer was chang"):
            await work
    else:
        await work
    x = np.full(3, guarded.rank + 1.0)
    assert (await guarded.all_reduce(x))[0] == guarded.size * (guarded.size + 1) / 2  # still in step


async def test_a_sendrecv_whose_send_is_refused_takes_no_message(guarded: mpdist.Communicator) -> None:
    x = np.zeros(4)
    if guarded.rank == RECEIVER:
        for tag in (8, 9):  # its message has not come, and it has
            leaseholder = guarded.recv(x, src=SENDER, tag=tag)
            with pytest.raises(mpdist.UsageError, match=r"send on .* overlaps in memory"):
                guarded.sendrecv(x, SENDER, np.zeros(4), tag=3)
            assert guarded._channel.unfinished() == [leaseholder]
            await guarded.send(np.ones(1), SENDER)
            await leaseholder
        assert (await guarded.recv(src=SENDER, tag=3)).data.tolist() == [7] * 4
    if guarded.rank == SENDER:
        await guarded.recv(src=RECEIVER)
        await guarded.send(np.full(4, 7.0), RECEIVER, 3)
        await guarded.send(x, RECEIVER, 8)
        await guarded.recv(src=RECEIVER)
        await guarded.send(x, RECEIVER, 9)
    await guarded.barrier()


async def test_overlapping_receives_are_refused(guarded: mpdist.Communicator) -> None:
    x = np.zeros(10)
    if guarded.rank == RECEIVER:
        first = guarded.recv(x[:6], src=SENDER, tag=1)
        with pytest.raises(
            mpdist.UsageError,
            match=r"recv on .*: its buffer overlaps in memory with that of recv from 0, tag 1 on .*, called at "
            r".*test_guard.py:\d+, which is pending",
        ):
            guarded.recv(x[5:], src=SENDER, tag=2)
        second = guarded.recv(x[6:], src=SENDER, tag=2)
        await guarded.send(np.ones(1), SENDER)
        await asyncio.gather(first, second)
        assert x.tolist() == [1] * 6 + [2] * 4
        await guarded.recv(x, src=SENDER, tag=3)
    if guarded.rank == SENDER:
        await guarded.recv(src=RECEIVER)
        await guarded.send(np.full(6, 1.0), RECEIVER, tag=1)
        await guarded.send(np.full(4, 2.0), RECEIVER, tag=2)
        await guarded.send(x, RECEIVER, tag=3)
    await guarded.barrier()


async def test_a_cancelled_receive_gives_its_memory_back(guarded: mpdist.Communicator) -> None:
    x = np.zeros(10)
    assert guarded.recv(x, tag=9).cancel()
    work = guarded.recv(x, tag=9)
    assert work.cancel()
    await guarded.all_reduce(x)


BUSY: dict[str, Post] = {
    "all_reduce": lambda c, x: c.all_reduce(x),
    "broadcast to here": lambda c, x: c.broadcast(x, 1 - c.rank if c.rank < 2 else 0),
    "gather into it": lambda c, x: c.all_gather(np.ones(12 // c.size, np.float32), out=x),
    "send": lambda c, x: c.send(x, 1 - c.rank if c.rank < 2 else 0),
}


@pytest.mark.parametrize("what", BUSY)
async def test_memory_of_a_pending_receive_is_refused_to_others(guarded: mpdist.Communicator, what: str) -> None:
    x = np.zeros(12, np.float32)
    receive = guarded.recv(x, tag=9)
    with pytest.raises(mpdist.UsageError, match=re.escape("overlaps in memory with that of recv from any rank, tag 9")):
        await BUSY[what](guarded, x)
    assert receive.cancel()
    await guarded.barrier()


async def test_all_forms_of_collectives_pass(guarded: mpdist.Communicator) -> None:
    n = guarded.size
    x = np.arange(2 * n, dtype=np.float32)
    for _ in range(2):
        await guarded.all_reduce(x.copy())
        await guarded.broadcast(x, 0)
        await guarded.gather(x, 0, out=np.empty((n, 2 * n), np.float32) if guarded.rank == 0 else None)
        await guarded.scatter(x if guarded.rank == 0 else None, 0, out=np.empty(2, np.float32))
        await guarded.scatter([x] * n if guarded.rank == 0 else None, 0)
        await guarded.reduce_scatter(x)
        await guarded.reduce_scatter([x[:2]] * n)
        await guarded.all_to_all(x)
        await guarded.all_to_all([x] * n, out=[np.empty_like(x) for _ in range(n)])
        await guarded.exscan(x)
        await guarded.all_gather_object({"x": x})
        await guarded.broadcast_object(x, 0)
        await asyncio.gather(guarded.all_gather(x), guarded.all_gather(x))  # both only read it
        blocks = np.split(x, n) if guarded.rank == 0 else None
        await asyncio.gather(guarded.scatter(blocks, 0), guarded.scatter(blocks, 0))
        await asyncio.gather(*[guarded.scatter(x if guarded.rank == 0 else None, 0) for _ in range(2)])


async def test_an_object_that_holds_itself_is_broadcast(guarded: mpdist.Communicator) -> None:
    ring: list[object] = ["ring"]
    ring.append(ring)
    got = await guarded.broadcast_object(ring if guarded.rank == 0 else None)
    assert got[0] == "ring"
    assert got[1] is got


@pytest.mark.parametrize("count", [1, 10_000])
async def test_one_array_may_be_read_by_several_reductions(guarded: mpdist.Communicator, count: int) -> None:
    """Also where it is small and goes through shared memory, which is a call of another form."""
    await guarded.all_reduce(np.ones(10_000))
    x, total, largest = np.full(count, guarded.rank + 1.0), np.empty(count), np.empty(count)
    works = guarded.all_reduce(x, out=total), guarded.all_reduce(x, "max", out=largest)
    await asyncio.gather(*works)
    assert (total == guarded.size * (guarded.size + 1) / 2).all()
    assert (largest == guarded.size).all()
