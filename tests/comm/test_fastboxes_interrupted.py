"""Small arrays through shared memory, where a signal's handler comes in between: no message is lost, or comes twice."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import count as counting
from typing import Any

import numpy as np
import pytest
from comm.boxes import LARGE, LONG, nothing_pending, open_box, sent_two, until_mpi_has_one
from progress.interruptions import Interrupted, Interruptions, raising

import mpdist
from mpdist import Communicator
from mpdist.progress import received
from mpdist.progress.fastbox import OPENS_AFTER, SLOTS
from mpdist.progress.received import Received

pytestmark = pytest.mark.ranks(2)


@pytest.fixture
def _handler() -> Iterator[None]:
    with raising():
        yield


@pytest.mark.usefixtures("_handler")
@pytest.mark.parametrize("length", [1, LONG])
async def test_no_message_is_lost_wherever_its_sending_is_interrupted(comm: Communicator, length: int) -> None:
    """It goes or not, as a whole; those before and after it do, in their order, also where boxes open and are shut.

    Each time on a communicator of its own, which comes to its end: who was interrupted sends no more small arrays.
    """
    for number in counting():
        async with await comm.dup() as other:
            if comm.rank == 0:
                interruptions = Interruptions(number, "progress", ("fastbox", "sending"))
                try:
                    with interruptions:
                        for part in range(OPENS_AFTER + 2):
                            await other.send(np.full(length, part), 1)
                        await other.send(np.zeros(LARGE, int), 1)
                except Interrupted:
                    pass
                await other.send(np.full(LARGE, 77), 1)
                await comm.send_object(interruptions.left < 0, 1)
                is_interrupted = interruptions.left < 0
            else:
                got: list[int] = []
                while not got or got[-1] != 77:
                    got.append(int((await other.recv(src=0).within(10)).data[0]))
                whole = [*range(OPENS_AFTER + 2), 0, 77]
                assert got in ([*whole[: len(got) - 1], 77], [*whole[:-1], 77]), f"interrupted at place {number}"
                is_interrupted = (await comm.recv_object(0)).data
                assert is_interrupted or got == whole
        if not is_interrupted:
            break
    assert number > 30


@pytest.mark.usefixtures("_handler")
async def test_no_message_is_lost_wherever_one_is_interrupted_that_mpi_has_brought(comm: Communicator) -> None:
    """What was put into the box before it comes first."""
    files = ("array_receive", "fastbox_reader", "inbox", "mailbox", "message", "receive", "received", "transfer")
    for number in counting(1):  # before that its await has not begun
        async with await comm.dup() as other:
            await open_box(other)
            if comm.rank == 0:
                await other.send(np.array([1]), 1, 1)
                await other.send(np.array([2]), 1, 1)
                large = other.send(np.full(LARGE, 3), 1, 1)
                is_interrupted = (await comm.recv_object(1)).data
                await large
            else:
                until_mpi_has_one(other)
                interruptions = Interruptions(number, "progress", files)
                got = []
                x = np.zeros(LARGE, int)
                work = other.recv(x, 0, 1)
                try:
                    with interruptions:
                        message = await work
                    got.append(int(message.data[0]))
                except Interrupted:
                    pass
                while len(got) < 3:
                    got.append(int((await other.recv(src=0, tag=1).within(10)).data[0]))
                assert got == [1, 2, 3], f"interrupted at place {number}"
                is_interrupted = interruptions.left < 0
                await comm.send_object(is_interrupted, 0)
        if not is_interrupted:
            break
    assert number > 10


@pytest.mark.usefixtures("_handler")
@pytest.mark.parametrize("length", [1, LONG])
async def test_no_message_is_lost_wherever_a_receive_is_interrupted_that_is_met_at_once(
    comm: Communicator, length: int
) -> None:
    await open_box(comm)
    files = ("received", "fastbox_reader", "message", "inbox", "mailbox")
    for number in counting():
        if comm.rank == 0:
            await comm.send(np.full(length, 2 * number), 1)
            await comm.send(np.full(length, 2 * number + 1), 1)
            if not (await comm.recv(src=1)).data[0]:
                break
            continue
        reader = comm._channel.inbox.boxes[0]
        while not reader.has_one():
            pass
        interruptions = Interruptions(number, "progress", files)
        got = []
        try:
            with nothing_pending(comm), interruptions:
                work = comm.recv(np.zeros(length, int), 0)
            assert isinstance(work, Received)
            got.append(int((await work).data[0]))
        except Interrupted:
            pass
        while len(got) < 2:
            got.append(int((await comm.recv(src=0).within(10)).data[0]))
        assert got == [2 * number, 2 * number + 1], f"interrupted at place {number}"
        assert comm._channel.inbox.unclaimed() == []
        await comm.send(np.array([int(interruptions.left < 0)]), 0)
        if interruptions.left >= 0:
            break
    assert number > 4


@pytest.mark.usefixtures("_handler")
@pytest.mark.parametrize("length", [1, LONG])
async def test_no_message_is_lost_wherever_the_look_is_interrupted_that_finds_it(
    comm: Communicator, length: int
) -> None:
    """A receive waits for it. It gets it, now or at a later look, and the next one what comes after."""
    await open_box(comm)
    files = ("array_receive", "received", "fastbox_reader", "message", "inbox", "mailbox")
    for number in counting():
        if comm.rank == 0:
            await comm.recv(src=1)
            await comm.send(np.full(length, 2 * number), 1)
            await comm.send(np.full(length, 2 * number + 1), 1)
            if not (await comm.recv(src=1)).data[0]:
                break
            continue
        x = np.zeros(length, int)
        work = comm.recv(x, 0)
        comm.send(np.array([1]), 0)  # no await: the loop's turn would take what has come
        reader = comm._channel.inbox.boxes[0]
        while not reader.has_one():
            pass
        calls: list[Any] = []
        work.add_done_callback(calls.append)
        interruptions = Interruptions(number, "progress", files)
        try:
            with interruptions:
                comm._channel.engine.drive()
        except Interrupted:
            pass
        assert (await work).data is x
        assert x.tolist() == [2 * number] * length, f"interrupted at place {number}"
        assert (await comm.recv(src=0).within(10)).data.tolist() == [2 * number + 1] * length
        await asyncio.sleep(0)
        assert calls == [work], f"interrupted at place {number}"
        assert comm._channel.inbox.unclaimed() == []
        await comm.send(np.array([int(interruptions.left < 0)]), 0)
        if interruptions.left >= 0:
            break
    assert number > 4


@pytest.mark.parametrize("length", [1, LONG])
@pytest.mark.parametrize("does", ["posts", "withdraws"])
@pytest.mark.parametrize("way", ["drive", "await"])
async def test_no_message_is_lost_where_a_handler_posts_or_withdraws_a_receive_while_one_is_met(
    comm: Communicator, way: str, does: str, length: int
) -> None:
    await open_box(comm)
    files = ("array_receive", "received", "fastbox_reader", "message", "inbox", "mailbox")
    for number in counting(0 if way == "drive" else 1):
        if comm.rank == 0:
            await comm.recv(src=1)
            await comm.send(np.full(length, 2 * number), 1, 1)
            await comm.recv(src=1)
            await comm.send(np.full(length, 2 * number + 1), 1, 2)
            if not (await comm.recv(src=1)).data[0]:
                break
            continue
        x, y = np.zeros(length, int), np.zeros(length, int)
        work = comm.recv(x, 0, 1)
        others: list[Any] = []
        act = partial(comm.recv, y, 0, 2) if does == "posts" else work.cancel
        before_it = signal.signal(signal.SIGUSR2, lambda *_, act=act, others=others: others.append(act()))
        try:
            comm.send(np.array([1]), 0)  # no await: the loop's turn would take what has come
            reader = comm._channel.inbox.boxes[0]
            while not reader.has_one():
                pass
            interruptions = Interruptions(number, "progress", files)
            case = f"at place {number}"
            with interruptions:
                if way == "drive":
                    comm._channel.engine.drive()
                else:
                    with suppress(asyncio.CancelledError):
                        await work
        finally:
            signal.signal(signal.SIGUSR2, before_it)
        if others == [True]:
            assert work.cancelled(), case
            assert x.tolist() == [0] * length, case
            work = comm.recv(x, 0, 1)
        await work.within(10)
        assert x.tolist() == [2 * number] * length, case
        await comm.send(np.array([1]), 0)
        other = others[0] if others and does == "posts" else comm.recv(y, 0, 2)
        await other.within(10)
        assert y.tolist() == [2 * number + 1] * length, case
        assert comm._channel.inbox.unclaimed() == [], case
        await comm.send(np.array([int(interruptions.left < 0)]), 0)
        if interruptions.left >= 0:
            break
    assert number > 4


@pytest.mark.ranks(2)
@pytest.mark.parametrize("length", [1, LONG])
async def test_an_entry_that_a_handler_receives_as_it_is_taken_is_taken_once(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """The slot after it has an old entry, which looks like the next one."""
    await open_box(comm)
    if comm.rank == 0:
        for number in range(3 * SLOTS):
            await comm.send(np.full(length, number), 1)
            await comm.recv(src=1)
        return
    for number in range(3 * SLOTS - 2):
        assert (await comm.recv(np.zeros(length, int), 0)).data[0] == number
        await comm.send(b"", 0)
    got: list[mpdist.Work[Any]] = []
    taking = received.take

    def interrupted(*arguments: Any) -> bool:
        monkeypatch.setattr(received, "take", taking)
        got.append(comm.recv(np.zeros(length, int), 0))
        return taking(*arguments)

    while not comm._channel.inbox.boxes[0].has_one():
        pass
    with nothing_pending(comm):
        monkeypatch.setattr(received, "take", interrupted)
        got.append(comm.recv(np.zeros(length, int), 0))
    await comm.send(b"", 0)
    assert [(await work).data[0] for work in got] == [3 * SLOTS - 2, 3 * SLOTS - 1]
    await comm.send(b"", 0)


@pytest.mark.ranks(2)
async def test_what_a_handler_receives_first_comes_first_when_both_are_given_back(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if await sent_two(comm):
        return
    inbox = comm._channel.inbox
    next_order = inbox.box.next_order
    got: list[mpdist.Work[Any]] = []

    def interrupted() -> int:
        order = next_order()
        monkeypatch.setattr(inbox.box, "next_order", next_order)
        got.append(comm.recv(np.zeros(1, int), 0))
        return order

    monkeypatch.setattr(inbox.box, "next_order", interrupted)
    with nothing_pending(comm):
        got.append(comm.recv(np.zeros(1, int), 0))
    for work in got:
        work._abandon()
    assert [(await comm.recv(np.zeros(1, int), 0)).data[0] for _ in range(2)] == [1, 2]
    await comm.send(b"", 0)
