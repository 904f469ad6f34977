"""Small arrays through shared memory: they arrive, keep their order beside MPI's messages, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from comm.arrays import assert_values, libraries, numbers
from comm.boxes import LARGE, LONG, after, before, box_to, nothing_pending, open_box, until_mpi_has_one
from comm.meeting import met

import mpdist
from mpdist import ANY_SOURCE, ANY_TAG, Communicator
from mpdist.memory import as_buffer
from mpdist.progress.doorbell import ASLEEP
from mpdist.progress.fastbox import (
    BOX_BYTES,
    BOXES_WITH_STRETCHES,
    EPOCH,
    OPENS_AFTER,
    OPENS_AFTER_AT_MOST,
    SLOT_DATA_BYTES,
    SLOTS,
    STRETCHES,
)
from mpdist.progress.fastbox_reader import ONCE
from mpdist.progress.inbox import POLL_MESSAGES
from mpdist.progress.received import Received

pytestmark = pytest.mark.ranks(2, 3, 4)


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("fence", [False, True], ids=["", "fences"])
async def test_small_arrays_of_every_library_type_and_size_arrive(comm: Communicator, fence: bool) -> None:
    """With fences as on processors that do not order memory accesses."""
    fences = []
    shared = comm._channel.engine.shared
    assert shared is not None
    before_it, shared.fence = shared.fence, (lambda: fences.append(1)) if fence else shared.fence
    try:
        await open_box(comm)
    finally:
        shared.fence = before_it
    put = 0
    for library in libraries():
        for dtype in library.dtypes:
            itemsize = as_buffer(library.make(numbers(1, dtype, 0), dtype)).nbytes
            for count in (0, 1, 7, SLOT_DATA_BYTES // itemsize, SLOT_DATA_BYTES // itemsize + 1, BOX_BYTES // itemsize):
                for src, tag in (
                    (before(comm), count),
                    (ANY_SOURCE, count),
                    (before(comm), ANY_TAG),
                    (ANY_SOURCE, ANY_TAG),
                ):
                    case = f"{library} {dtype} x {count} from {src}, {tag}"
                    x = library.make(numbers(count, dtype, comm.rank), dtype)
                    out = library.make(numbers(count, dtype, 99), dtype)
                    number = box_to(comm, after(comm)).number & EPOCH - 1
                    await comm.send(x, after(comm), count)
                    put += (box_to(comm, after(comm)).number & EPOCH - 1) - number
                    message = await comm.recv(out, src, tag)
                    assert message.data is out, case
                    assert (message.src, message.tag, message.count) == (before(comm), count, count), case
                    assert_values(library.read(out), numbers(count, dtype, before(comm)), case)
    assert put > 100
    assert fence == bool(fences)


async def test_receives_without_an_array_get_one_of_their_own(comm: Communicator) -> None:
    await open_box(comm)
    kept = []
    for number in range(3 * SLOTS):
        await comm.send(np.array([number, comm.rank], np.int16), after(comm), number)
        kept.append((await comm.recv(src=before(comm))).data)
    assert [each.tolist() for each in kept] == [[number, before(comm)] for number in range(3 * SLOTS)]
    assert all(each.flags.writeable and each.dtype == np.int16 for each in kept)


async def test_shapes_do_not_matter(comm: Communicator) -> None:
    await open_box(comm)
    for x, out in (
        (np.arange(6).reshape(2, 3), np.zeros((3, 2, 1), int)),
        (np.array(5), np.array(0)),
        (np.arange(6)[::-1].copy(), np.zeros(6, int)),
        (np.zeros((2, 0)), np.ones((0, 7))),
        (np.arange(600).reshape(20, 30), np.zeros((10, 3, 20), int)),
    ):
        await comm.send(x, after(comm))
        await comm.recv(out, before(comm))
        assert_values(out.ravel(), x.ravel(), (x, out))


async def test_a_sent_array_may_be_changed_at_once(comm: Communicator) -> None:
    await open_box(comm)
    x = np.zeros(3)
    for number in range(10):
        x[:] = number
        assert comm.send(x, after(comm)).done()
        x[:] = -1
    for number in range(10):
        assert (await comm.recv(src=before(comm))).data.tolist() == [number] * 3


async def test_the_largest_of_them_and_one_byte_more(comm: Communicator) -> None:
    await open_box(comm)
    for nbytes in (BOX_BYTES, BOX_BYTES + 1):
        box = box_to(comm, after(comm))
        number = box.number
        x = numbers(nbytes, "uint8", comm.rank)
        sending = comm.send(x, after(comm))
        assert (box.number > number) == (nbytes == BOX_BYTES)
        out = np.zeros(nbytes + 50, np.uint8)
        message = await comm.recv(out, before(comm))
        assert message.count == nbytes
        assert_values(out[:nbytes], numbers(nbytes, "uint8", before(comm)), nbytes)
        await sending
        assert not out[nbytes:].any()


# ---------------------------------------------------------------------- order


@pytest.mark.parametrize("seed", range(6))
async def test_messages_keep_their_order_whichever_way_they_go(comm: Communicator, seed: int) -> None:
    """Small and large ones, objects, bursts that fill the box, to every rank; received early, late, from any rank."""
    common, own = random.Random(seed), random.Random(f"{seed} {comm.rank}")
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    choices = [1, 1, 1, 1, 20, 22, 23, 200, 5000, LARGE, -1]
    for turn in range(12):
        sizes = [common.choice(choices) for _ in range(common.choice([1, 3, 10, 60]))]
        way = common.choice(["early", "late", "any", "each"])
        receives = []
        if way == "early":
            receives = [receive(comm, sizes[number], src, own) for src in others for number in range(len(sizes))]
        works = []
        for number, size in enumerate(sizes):
            for dst in others:
                if size < 0:
                    works.append(comm.send_object((comm.rank, turn, number), dst))
                else:
                    works.append(comm.send(np.full(size, 1000 * turn + number, float), dst))
                if own.random() < 0.1:
                    await asyncio.sleep(0)
        if way == "late":
            await asyncio.sleep(0.002)
        if way == "early":
            got = [await each for each in receives]
        elif way == "any" and min(sizes) > 0:
            got = [await comm.recv(tag=0) for _ in range(len(others) * len(sizes))]
        else:
            got = [await receive(comm, size, src, own) for src in others for size in sizes]
        for src in others:
            come = [value_of(message, turn) for message in got if message.src == src]
            assert come == list(range(len(sizes))), f"turn {turn}, {way}, from {src}, of {sizes}"
        for work in works:
            await work
        await met(comm)
    assert comm._channel.inbox.unclaimed() == []


def receive(comm: Communicator, size: int, src: int, own: random.Random) -> Any:
    if size < 0:
        return comm.recv_object(src)
    return comm.recv(own.choice([None, np.zeros(size), np.zeros(size + 3)]), src)


def value_of(message: mpdist.Message, turn: int) -> int:
    if isinstance(message.data, tuple):
        assert message.data[1] == turn
        return int(message.data[2])
    return int(message.data[0]) - 1000 * turn


@pytest.mark.parametrize("is_any", [False, True])
async def test_a_large_array_gets_the_small_message_that_was_sent_first(comm: Communicator, is_any: bool) -> None:
    await open_box(comm)
    await comm.send(np.array([1.0]), after(comm))
    large = comm.send(np.full(LARGE, 2.0), after(comm))
    until_mpi_has_one(comm)
    x = np.zeros(LARGE)
    for count in (1, LARGE):
        message = await comm.recv(x, ANY_SOURCE if is_any else before(comm), 0)
        assert (message.count, message.src) == (count, before(comm))
    await large


@pytest.mark.ranks(3)
async def test_from_any_rank_means_from_each_in_turn(comm: Communicator) -> None:
    """Two full boxes and a message by MPI: none waits until another one's are all read."""
    if comm.rank:
        while 0 not in comm._channel.opened:
            await comm.send(np.array([0]), 0, 1)
        while not box_to(comm, 0).is_read():
            pass
        comm._channel.transport.comm.Ibarrier().Wait()
        comm._channel.transport.comm.Barrier()  # rank 0 takes in no more
        for _ in range(SLOTS - 1):
            await comm.send(np.array([0]), 0)
        large = comm.send(np.zeros(LARGE), 0) if comm.rank == 2 else None
        comm._channel.transport.comm.Barrier()
        if large is not None:
            await large
        return
    all_are_read = comm._channel.transport.comm.Ibarrier()
    while not all_are_read.Test():
        comm._channel.inbox.take_in()
    comm._channel.transport.comm.Barrier()
    comm._channel.transport.comm.Barrier()
    got = []
    while len(got) < 2 * SLOTS - 1:
        message = await comm.recv(tag=0)
        got.append((message.src, message.count))
    assert [src for src, _ in got[:6]] in ([1, 2] * 3, [2, 1] * 3)
    assert got.index((2, LARGE)) > got.index((2, 1))
    for _ in range(comm._channel.inbox.box.messages):
        await comm.recv(tag=1)


async def test_what_fills_the_box_goes_by_mpi(comm: Communicator) -> None:
    await open_box(comm)
    for number in range(5 * SLOTS):
        await comm.send(np.array([number]), after(comm))
    assert after(comm) not in comm._channel.opened
    comm._channel.transport.comm.Barrier()
    for number in range(5 * SLOTS):
        assert (await comm.recv(src=before(comm), tag=0)).data[0] == number


async def test_long_arrays_take_turns_in_the_stretches_behind_the_page(comm: Communicator) -> None:
    """So many as there are stretches, with small ones between them or not; the next goes by MPI."""
    for between, put in ((0, STRETCHES), (1, 5), (3, 7)):
        async with await comm.dup() as other:
            await open_box(other)
            box = box_to(other, after(other))
            start = box.number
            sent = []
            for number in range(3 * STRETCHES):
                sizes = [1] * between + [LONG]
                sent += [other.send(np.full(size, number), after(other)) for size in sizes]
            assert box.number - start == put
            comm._channel.transport.comm.Barrier()
            for number in range(3 * STRETCHES):
                for size in [1] * between + [LONG]:
                    assert (await other.recv(src=before(other))).data.tolist() == [number] * size
            for each in sent:
                await each


async def test_a_box_opens_again_when_small_arrays_follow_each_other(comm: Communicator) -> None:
    """The more of them, the more often something else came in between."""
    await open_box(comm)
    needed = []
    for _ in range(8):
        large = comm.send(np.zeros(LARGE), after(comm))
        await comm.recv(src=before(comm))
        await large
        assert after(comm) not in comm._channel.opened
        sent = 0
        while after(comm) not in comm._channel.opened:
            await comm.send(np.array([sent]), after(comm))
            assert (await comm.recv(src=before(comm))).data[0] == sent
            sent += 1
        needed.append(sent)
    assert needed == sorted(needed)
    assert needed[0] < needed[-1] <= OPENS_AFTER_AT_MOST + 2


async def test_messages_of_several_ranks_that_send_much_all_come(comm: Communicator) -> None:
    if comm.rank:
        for number in range(OPENS_AFTER + 1 + 10 * SLOTS):
            await comm.send(np.array([number]), 0)
        if comm.rank == comm.size - 1:
            await comm.send(np.zeros(LARGE), 0)
        await comm.recv(src=0)
        return
    each = OPENS_AFTER + 1 + 10 * SLOTS
    last: dict[int, int] = {}
    for _ in range((comm.size - 1) * each + 1):
        message = await comm.recv()
        if message.count == 1:
            assert message.data[0] == last.get(message.src, -1) + 1
            last[message.src] = message.data[0]
    for rank in range(1, comm.size):
        await comm.send(b"", rank)


@pytest.mark.ranks(2)
async def test_what_came_late_by_a_little_is_looked_for_longer_the_next_time(comm: Communicator) -> None:
    await open_box(comm)
    if comm.rank == 0:
        await comm.recv(src=1)
        await comm.send(np.array([1]), 1)
        await comm.recv(src=1)
        return
    inbox = comm._channel.inbox
    reader = inbox.boxes[0]
    reader.looks, reader.rest = ONCE, 1
    with nothing_pending(comm):
        work = comm.recv(np.zeros(1, int), 0)
        comm.send(b"", 0)  # not awaited: the loop's turn would take the entry
        while not reader.has_one():
            pass
        await work
    assert reader.looks is inbox.looks_at_once
    await comm.send(b"", 0)


@pytest.mark.ranks(2)
async def test_mpi_is_called_as_often_as_messages_come_while_it_has_something_to_do(comm: Communicator) -> None:
    """It moves large data only within calls, and a ping-pong of small arrays would not make any."""
    other = await comm.dup()
    await open_box(comm)
    peer, inbox = 1 - comm.rank, comm._channel.inbox
    probes = without = 0

    def counted(probed_for: Iterator[Any]) -> Iterator[Any]:
        nonlocal probes
        for handle in probed_for:
            probes += 1
            yield handle

    inbox.probed_for = counted(inbox.probed_for)
    large = other.send(np.zeros(200_000), peer)
    for number in range(100):
        sent = comm.send(np.array([number]), peer, 4)
        while not inbox.boxes[peer].has_one():
            pass
        before_it = probes
        await comm.recv(np.zeros(1, int), peer, 4)
        without += probes == before_it
        await sent
    assert without <= 10  # those for which the event loop had a turn, in which all that is pending is looked at
    await other.recv(src=peer)
    await large
    await other.close()


@pytest.mark.ranks(2)
async def test_all_that_has_come_is_taken_in(comm: Communicator) -> None:
    """Also where so many were read before that it was the turn of MPI's messages."""
    await open_box(comm)
    for before_it in range(POLL_MESSAGES + 2):
        for _ in range(before_it):
            await comm.send(np.array([0]), after(comm))
            await comm.recv(src=before(comm))
        await met(comm)
        for _ in range(SLOTS):
            await comm.send(np.array([1]), after(comm))
        comm._channel.transport.comm.Barrier()
        assert comm._channel.inbox.take_in() == SLOTS
        comm._channel.transport.comm.Barrier()
        for _ in range(SLOTS):
            await comm.recv(src=before(comm))


# ---------------------------------------------------------------------- what does not fit, and what is given up


async def test_a_message_that_does_not_fit_stays_queued(comm: Communicator) -> None:
    await open_box(comm)
    await comm.send(np.arange(3), after(comm), 1)
    await comm.send(np.arange(4.0), after(comm), 2)
    await met(comm)
    with pytest.raises(mpdist.MessageTruncated, match="int64 x 3 from rank"):
        await comm.recv(np.zeros(2, int), before(comm), 1)
    with pytest.raises(mpdist.UnsupportedBuffer, match="int64 x 3 from rank"):
        await comm.recv(np.zeros(3), before(comm), 1)
    with pytest.raises(mpdist.UnsupportedBuffer, match="a receive of an object"):
        await comm.recv_object(before(comm), 1)
    out = np.full(5, -1)
    assert (await comm.recv(out, before(comm), 1)).count == 3
    assert out.tolist() == [0, 1, 2, -1, -1]
    assert (await comm.recv(src=before(comm))).data.tolist() == [0, 1, 2, 3]


async def test_an_array_that_cannot_be_sent_leaves_no_trace(comm: Communicator) -> None:
    await open_box(comm)
    for bad in (np.arange(8)[::2], np.arange(8, dtype=">i4"), np.array([None])):
        with pytest.raises(mpdist.UnsupportedBuffer, match="send on"):
            comm.send(bad, after(comm))
    with pytest.raises(mpdist.UsageError):
        comm.send(np.arange(3), after(comm), -1)
    await comm.send(np.arange(3), after(comm))
    assert (await comm.recv(src=before(comm))).data.tolist() == [0, 1, 2]
    assert comm._channel.inbox.unclaimed() == []


async def test_a_probe_an_iterator_and_a_cancelled_receive(comm: Communicator) -> None:
    await open_box(comm)
    await comm.send(np.arange(3), after(comm), 7)
    probed = await comm.probe(before(comm))
    assert (probed.src, probed.tag, probed.count, probed.nbytes) == (before(comm), 7, 3, 24)
    assert (await probed.recv(np.zeros(3, int))).data.tolist() == [0, 1, 2]

    cancelled = comm.recv(np.zeros(1, int), before(comm), 0)
    assert cancelled.cancel()
    waiting = comm.recv(src=before(comm), tag=0)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(waiting, 0.01)
    await met(comm)
    for number in range(4):
        await comm.send(np.array([number]), after(comm))
    got = [int((await comm.recv(src=before(comm), tag=0)).data[0])]
    async for message in comm.messages(before(comm), 0):
        got.append(int(message.data[0]))
        if len(got) == 4:
            break
    assert got == [0, 1, 2, 3]


async def met_at_once(comm: Communicator, value: int) -> mpdist.Work[mpdist.Message]:
    """A receive of this, from the rank before, that was done when it was posted."""
    await comm.send(np.array([value]), after(comm))
    reader = comm._channel.inbox.boxes[before(comm)]
    while not reader.has_one():
        pass
    with nothing_pending(comm):
        work = comm.recv(np.zeros(1, int), before(comm), 0)
    assert isinstance(work, Received)
    return work


async def test_a_receive_that_was_met_at_once_is_a_work_like_others(comm: Communicator) -> None:
    await open_box(comm)
    calls = []
    for way in ("await", "twice", "result", "callback", "within", "gather"):
        work = await met_at_once(comm, 5)
        assert work.done()
        assert not work.cancel()
        assert not work.cancelled()
        assert work.exception() is None
        if way == "callback":
            work.add_done_callback(lambda work: calls.append(work.result().data[0]))
            await asyncio.sleep(0)
            assert calls == [5]
        elif way == "within":
            assert (await work.within(5)).data[0] == 5
        elif way == "gather":
            [message] = await asyncio.gather(work)
            assert message.src == before(comm)
        elif way == "result":
            assert work.result().data[0] == 5
        else:
            assert (await work).data[0] == 5
            assert (await work) is work.result()
        assert f"recv from {before(comm)}, tag 0" in work.describe()
        comm._channel.transport.comm.Barrier()


async def test_tasks_that_are_cancelled_before_they_begin_give_the_messages_back(comm: Communicator) -> None:
    """In their old order, whoever goes first."""
    await open_box(comm)
    for last_first in (False, True):
        works = [await met_at_once(comm, value) for value in range(3)]
        tasks = [asyncio.ensure_future(work) for work in (reversed(works) if last_first else works)]
        for task in tasks:
            assert task.cancel()
        await asyncio.wait(tasks)
        for _ in range(3):
            await asyncio.sleep(0)
        assert all(work.cancelled() for work in works)
        with pytest.raises(asyncio.CancelledError):
            await works[0]
        await comm.send(np.array([3]), after(comm))
        assert [(await comm.recv(np.zeros(1, int), before(comm), 0)).data[0] for _ in range(4)] == list(range(4))
        comm._channel.transport.comm.Barrier()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(await met_at_once(comm, 6), 0)
    assert (await comm.recv(np.zeros(1, int), before(comm), 0)).data[0] == 6


async def posted_and_come(comm: Communicator, x: np.ndarray, src: int, tag: int, value: int) -> mpdist.Work[Any]:
    """A receive that was posted before its message lay in the box of the rank before, where that is now; tag 7."""
    work = comm.recv(x, src, tag)
    assert not work.done()
    comm._channel.transport.comm.Barrier()
    comm.send(np.full(len(x), value), after(comm), 7)  # no await: the loop's turn would take what has come
    reader = comm._channel.inbox.boxes[before(comm)]
    while not reader.has_one():
        pass
    return work


@pytest.mark.parametrize("length", [1, LONG])
async def test_a_receive_that_waits_gets_what_comes_into_its_array_at_once(comm: Communicator, length: int) -> None:
    await open_box(comm)
    for src in (before(comm), ANY_SOURCE):
        for tag in (7, ANY_TAG):
            x = np.zeros(length, int)
            work = await posted_and_come(comm, x, src, tag, comm.rank)
            assert comm._channel.engine.drive()
            assert x.tolist() == [before(comm)] * length
            message = await work
            assert message.data is x
            assert (message.src, message.tag, message.count) == (before(comm), 7, length)
            comm._channel.transport.comm.Barrier()


@pytest.mark.parametrize("length", [1, LONG])
async def test_a_task_that_is_cancelled_when_its_message_has_come_gives_it_back(
    comm: Communicator, length: int
) -> None:
    await open_box(comm)
    x = np.zeros(length, int)
    work = await posted_and_come(comm, x, before(comm), 7, 1)
    task = asyncio.ensure_future(work)
    assert comm._channel.engine.drive()
    assert task.cancel()
    await asyncio.wait([task])
    for _ in range(3):
        await asyncio.sleep(0)
    assert work.cancelled()
    x[:] = -1
    await comm.send(np.full(length, 2), after(comm), 7)
    for value in (1, 2):
        message = await comm.recv(np.zeros(length, int), before(comm))
        assert (message.data[-1], message.src, message.tag) == (value, before(comm), 7)
    assert comm._channel.inbox.unclaimed() == []


def test_it_can_be_waited_for_without_a_loop(comm: Communicator) -> None:
    for number in range(100):
        sent = comm.send(np.array([number]), after(comm))
        assert comm.recv(np.zeros(1, int), before(comm)).wait(20).data[0] == number
        sent.wait()


async def test_sleepers_are_woken(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has waited for long looks seldom by itself; whoever puts something into a box rings."""
    await open_box(comm)
    doorbell = comm._channel.engine.doorbell
    rung, ring = [], doorbell.ring
    monkeypatch.setattr(doorbell, "ring", lambda rank: (rung.append(rank), ring(rank)))
    if comm.rank == 1:
        assert (await comm.recv(np.zeros(1, int), 0, 0)).data[0] == 1
    elif comm.rank == 0:
        peer = comm._channel.world_ranks[1]
        flags = bytearray(doorbell.flags[:])
        flags[peer] = ASLEEP
        monkeypatch.setattr(comm._channel, "flags", flags)
        box = box_to(comm, 1)
        number = box.number
        assert comm.send(np.array([1]), 1).done()
        assert box.number == number + 1
        assert peer in rung


# ---------------------------------------------------------------------- end


async def test_closing_gives_the_memory_back_and_lists_what_nobody_received(comm: Communicator) -> None:
    shared = comm._channel.engine.shared
    assert shared is not None
    used = []
    for turn in range(12):
        async with comm.dup() as other:
            await open_box(other)
            for length in (LONG, 3):
                await other.send(np.arange(length), after(other), 5)
            await other.recv(src=before(other), tag=5)
            if turn % 2:
                await other.recv(src=before(other), tag=5)
            channel = other._channel
        assert len(channel.inbox.unclaimed()) == (turn + 1) % 2
        assert not channel.inbox.boxes
        assert not channel.opened
        used.append(shared.arena.used_bytes)
    assert used[-1] == used[3], used


async def test_nothing_is_sent_on_a_closed_communicator(comm: Communicator) -> None:
    other = await comm.dup()
    await open_box(other)
    await other.close()
    with pytest.raises(mpdist.ClosedError, match="send on"):
        other.send(np.zeros(1), after(other))
    with pytest.raises(mpdist.ClosedError, match="recv on"):
        other.recv(np.zeros(1), before(other))


async def test_nothing_is_sent_on_one_that_was_given_up(comm: Communicator) -> None:
    other = await comm.dup()
    await open_box(other)
    other._channel.give_up("for a test")
    number = box_to(other, after(other)).number
    with pytest.raises(mpdist.ClosedError, match="for a test"):
        other.send(np.zeros(1), after(other))
    with pytest.raises(mpdist.ClosedError, match="for a test"):
        other.recv(np.zeros(1), before(other))
    assert box_to(other, after(other)).number == number
    await other.close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # has several threads; the child ends at once
def test_a_forked_child_puts_nothing_into_the_box(comm: Communicator) -> None:
    asyncio.run(open_box(comm))
    child = os.fork()
    if not child:
        try:
            comm.send(np.array([66]), after(comm))
        except mpdist.ClosedError:
            os._exit(3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    comm.send(np.array([1]), after(comm)).wait()
    assert comm.recv(src=before(comm)).wait(20).data[0] == 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # has several threads; the child ends at once
def test_a_forked_child_is_refused_whatever_thread_had_the_lock(comm: Communicator) -> None:
    """Its copy of a lock that another thread had is never given back."""
    has_lock, may_go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with comm._channel.engine.lock:
            has_lock.set()
            may_go_on.wait()

    asyncio.run(met(comm))
    other = threading.Thread(target=hold)
    other.start()
    has_lock.wait()
    child = os.fork()
    if not child:
        refused = 0
        try:
            for _ in range(OPENS_AFTER + 2):
                try:
                    comm.send(np.array([66]), after(comm))
                except mpdist.ClosedError:
                    refused += 1
        finally:
            os._exit(refused)
    may_go_on.set()
    other.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == OPENS_AFTER + 2


async def test_ranks_of_other_nodes_have_none(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = comm._channel.engine.shared
    assert shared is not None
    monkeypatch.setattr(type(shared), "has", lambda *_: False)
    for number in range(20):
        await comm.send(np.array([number]), after(comm))
        assert (await comm.recv(np.zeros(1, int), before(comm))).data[0] == number
    assert not comm._channel.opened


async def test_a_full_arena_leaves_all_to_mpi(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = comm._channel.engine.shared
    assert shared is not None
    monkeypatch.setattr(shared.arena, "allocate", lambda *_: None)
    for number in range(20):
        await comm.send(np.array([number]), after(comm))
        assert (await comm.recv(np.zeros(1, int), before(comm))).data[0] == number
    assert not comm._channel.opened


@pytest.mark.parametrize("why", ["no memory", "too many"])
async def test_without_memory_for_long_arrays_mpi_has_them(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Small ones between them have their box, when it has opened again."""
    await open_box(comm)
    shared = comm._channel.engine.shared
    assert shared is not None
    if why == "no memory":
        monkeypatch.setattr(shared.arena, "allocate", lambda *_: None)
    else:
        monkeypatch.setattr(shared, "boxes_with_stretches", BOXES_WITH_STRETCHES)
    box = box_to(comm, after(comm))
    put = 0
    for number in range(3 * OPENS_AFTER_AT_MOST):
        before_it = box.number & EPOCH - 1
        length = 1 if number % OPENS_AFTER_AT_MOST else LONG
        await comm.send(np.full(length, number), after(comm))
        put += (box.number & EPOCH - 1) - before_it
        assert length == 1 or (box.number & EPOCH - 1) == before_it
        assert (await comm.recv(np.zeros(length, int), before(comm))).data[0] == number
    assert put > OPENS_AFTER_AT_MOST
    assert box.stretches == []


async def test_memory_for_long_arrays_is_taken_when_the_first_comes_and_given_back(comm: Communicator) -> None:
    shared = comm._channel.engine.shared
    assert shared is not None
    count = shared.boxes_with_stretches
    async with comm.dup() as other:
        await open_box(other)
        assert shared.boxes_with_stretches == count
        assert box_to(other, after(other)).long_block is None
        for _ in range(3 * STRETCHES):
            await other.send(np.zeros(LONG), after(other))
            await other.recv(src=before(other))
        assert shared.boxes_with_stretches == count + 1
    assert shared.boxes_with_stretches == count
    kept = len(shared.kept)
    other = await comm.dup()
    await open_box(other)
    for _ in range(2):
        await other.send(np.zeros(LONG), after(other))
    await other.recv(src=before(other))
    comm._channel.transport.comm.Barrier()
    blocks = [box_to(other, after(other)).block, box_to(other, after(other)).long_block]
    other._channel.close("left")  # as where the ranks do not come to its end together: one array is not read
    comm._channel.transport.comm.Barrier()
    assert shared.kept[kept:] == blocks


@pytest.mark.parametrize("length", [1, LONG])
async def test_an_array_that_takes_nothing_any_more_leaves_the_message_where_it_is(
    comm: Communicator, length: int
) -> None:
    await open_box(comm)
    x = np.zeros(length)
    work = comm.recv(x, before(comm))
    x.flags.writeable = False
    comm._channel.transport.comm.Barrier()
    await comm.send(np.full(length, 5.0), after(comm))
    with pytest.raises(mpdist.UnsupportedBuffer, match="read-only"):
        await work
    assert (await comm.recv(np.zeros(length), before(comm))).data.tolist() == [5.0] * length
