"""Closing: no message stays in a communicator, whoever has sent it, and however large it is."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from mpdist import CollectiveMismatch, Communicator, MessageTruncated, UsageError
from mpdist.algorithms import meeting
from mpdist.progress import wire

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

SIZES = (0, 1, 300, 300_000)  # the last waits with its sender until it is received


def after(comm: Communicator) -> int:
    return (comm.rank + 1) % comm.size


async def leave_messages(comm: Communicator, mark: int) -> int:
    """Send messages that nobody receives, as a large one waits, and close; returns their number."""
    async with comm.dup() as part:
        works = [part.send(np.full(count, mark), after(part), 7) for count in SIZES]
        works.append(part.send_object(mark, after(part), 7))
        works.append(part.send_object(np.full(100_000, mark), after(part), 7))
    assert all(work.done() and work.exception() is None for work in works)
    assert part._channel.under_way() == []
    return len(works)


async def test_a_message_that_nobody_received_never_meets_the_next_communicator(comm: Communicator) -> None:
    """MPICH gives the next one the number of the last."""
    for turn in range(5):
        await leave_messages(comm, turn)
    async with comm.dup() as part:
        await part.send(np.full(3, -1), after(part), 7)
        assert (await part.recv(tag=7)).data.tolist() == [-1] * 3
        await part.barrier()
        assert part._channel.inbox.unclaimed() == []


async def test_all_messages_that_nobody_received_are_reported(
    comm: Communicator, capfd: pytest.CaptureFixture[str]
) -> None:
    number = await leave_messages(comm, 1)
    told = capfd.readouterr().err
    for word in (f"rank {comm.rank}", f"{number} messages that nobody received", "int64 x 300 from", "tag 7"):
        assert word in told, told


async def test_pieces_and_a_probed_message_are_dropped_too(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async with comm.dup() as part:
        probe = part.probe(tag=1)
        await part.send(np.zeros(3), after(part), 1)
        assert (await probe).count == 3
        with monkeypatch.context() as patch:
            patch.setattr(wire, "PIECE_BYTES", 400_000)
            works = [part.send(np.zeros(100_000), after(part), 2)]
            await part.barrier()
    assert all(work.done() for work in works)
    assert "2 messages that nobody received" in capfd.readouterr().err
    async with comm.dup() as part:
        await part.barrier()
        assert part._channel.inbox.unclaimed() == []


async def test_a_communicator_of_the_node_is_left_empty_too(
    comm: Communicator, capfd: pytest.CaptureFixture[str]
) -> None:
    async with comm.dup() as part:
        await part.node.send(np.zeros(5), after(part.node), 3)
    assert "float64 x 5" in capfd.readouterr().err
    async with comm.dup() as part, part.subgroup(part.node.ranks) as other:
        await other.send(np.ones(1), after(other), 3)
        assert (await other.recv(tag=3)).data == [1]


async def test_sends_whose_await_has_ended_early_are_completed(
    comm: Communicator, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody may have their Works; others are to be awaited."""
    part, x, sends = await comm.dup(), np.ones(SIZES[-1]), []
    if comm.rank == 0 < comm.size - 1:
        cancelled, failed, kept = part.sendrecv(x, 1, tag=1), part.sendrecv(x, 1, np.zeros(1), 0, 2), part.send(x, 1, 3)
        await part.send(np.zeros(2), 0, 2)
        sends = [cancelled._send, failed._send, kept]  # type: ignore[attr-defined]  # SendReceives
        with pytest.raises(MessageTruncated):
            await failed
        for work in (cancelled, kept):
            with pytest.raises(UsageError, match=r"(is|are) pending"):
                part.close()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await work
        await part.recv(tag=2)
    assert not any(work.done() for work in sends)
    await comm.barrier()
    await part.close()
    assert all(work.exception() is None for work in sends)
    if comm.rank == 1:
        assert "is closed with 3 messages that nobody received" in capfd.readouterr().err


async def test_only_members_that_have_spoken_are_heard_of(comm: Communicator) -> None:
    part = await comm.dup()
    if part.rank == 0:
        await part.send(np.zeros(1), part.size - 1)
    if part.rank == part.size - 1:
        await part.recv()
    assert part._channel.addressed == ({part.size - 1} if part.rank == 0 < part.size - 1 else set())
    await part.close()
    assert part._channel.inbox._all_came_of == ({0} if part.rank == part.size - 1 > 0 else set())


async def test_a_close_that_waits_for_a_collective_says_its_last_too(comm: Communicator) -> None:
    """When its turn comes, nothing may be posted any more."""
    async with comm.dup() as part:
        sent = part.send(np.ones(4), after(part))
        await part.recv()
        await sent
        work = part.all_gather_object({"rank": part.rank})
    assert await work == [{"rank": rank} for rank in range(comm.size)]


@pytest.mark.parametrize("op", ["barrier", "all_reduce"])
async def test_what_is_pending_ends_well_though_others_have_seen_its_end_before(comm: Communicator, op: str) -> None:
    """They meet in shared memory, which is given back when the communicator is closed."""
    for _ in range(100):
        x = np.full(16, comm.rank)
        async with comm.dup() as part:
            await part.barrier()
            work = part.barrier() if op == "barrier" else part.all_reduce(x, "max")
            if comm.rank == 0:
                await work
        assert work.done()
        assert work.exception() is None
        assert op == "barrier" or (x == comm.size - 1).all()


@pytest.mark.parametrize("count", [1, 100, 300_000])
async def test_a_member_that_has_left_is_not_waited_for(comm: Communicator, count: int) -> None:
    """What it has begun there is not taken for the others' end."""
    leaver = comm.size - 1
    try:
        async with comm.dup() as part:
            if comm.rank == leaver:
                part.all_to_all(np.full(count * comm.size, 255, np.uint8)).forget()
                raise KeyError
    except KeyError:
        assert comm.rank == leaver
    assert part._channel.is_closed
    await comm.barrier()


@pytest.mark.ranks(2, 3)
async def test_what_is_pending_at_the_end_of_a_block_is_done_before_it(comm: Communicator) -> None:
    """Of several steps, one of them behind another."""
    arrays = [np.full(50_000, comm.rank + 1.0), np.full(50_000, 10.0)]
    async with comm.dup() as part:
        works = [part.all_reduce(array) for array in arrays]
        if comm.rank == 0:
            await asyncio.sleep(0.1)
    assert all(work.done() and work.exception() is None for work in works)
    assert (arrays[0] == sum(range(1, comm.size + 1))).all()
    assert (arrays[1] == 10 * comm.size).all()


async def test_the_first_may_leave_too(comm: Communicator) -> None:
    try:
        async with comm.dup() as part:
            if comm.rank == 0:
                raise KeyError
    except KeyError:
        assert comm.rank == 0
    assert part._channel.is_closed
    async with comm.dup() as part:
        await part.barrier()


@pytest.mark.ranks(2, 3, 4)
async def test_different_numbers_of_collectives_are_named(comm: Communicator) -> None:
    part = await comm.dup()
    if comm.rank == 1:
        part._channel.sequence += 1  # as after a broadcast from here that others have not called
    with pytest.raises(CollectiveMismatch, match=r"rank 0: 0, rank 1: 1.*may not belong together"):
        await part.close()
    assert part._channel.is_closed


async def test_names_of_one_tag_are_told_apart(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that close several at the same time, in different order; and some leave some."""
    monkeypatch.setattr(meeting, "tag_of", lambda *_: 7)
    parts = [await comm.dup() for _ in range(8)]

    async def end(number: int, part: Communicator) -> None:
        try:
            async with part:
                if number % 3 == 0 and comm.rank == number % comm.size:
                    raise KeyError
        except KeyError:
            assert number % 3 == 0

    order = list(enumerate(parts))
    random.Random(comm.rank).shuffle(order)
    await asyncio.gather(*(end(*each) for each in order))
    assert all(part._channel.is_closed for part in parts)
    async with comm.dup() as part, part.subgroup(range(comm.size)) as whole:
        await whole.barrier()
