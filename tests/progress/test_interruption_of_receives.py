"""Receives whose meeting with a message a signal's handler interrupts, wherever that is: nothing is lost.

Each place is tried in turn, in each file that has to do with receives, see `interruptions`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from progress.interruptions import Interrupted, Interruptions, raising

import mpdist
from mpdist import Communicator
from mpdist.progress import sending, wire

pytestmark = pytest.mark.ranks(2)

FILES = (
    "array_receive", "fastbox_reader", "inbox", "mailbox", "message", "pickling", "receive", "received", "sendrecv",
    "transfer",
)  # fmt: skip
GO = 9


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    with raising():
        yield


def array(count: int) -> Callable[[Communicator, int], Any]:
    return lambda comm, number: comm.send(np.full(count, number), 1)


def objects(*counts: int) -> Callable[[Communicator, int], Any]:
    return lambda comm, number: comm.send_object([np.full(count, number) for count in counts], 1)


CASES = {
    "small array": (array(3), lambda comm: comm.recv(np.zeros(3, int))),
    "small new array": (array(3), lambda comm: comm.recv()),
    "large array": (array(20_000), lambda comm: comm.recv(np.zeros(20_000, int))),
    "small object": (objects(3), lambda comm: comm.recv_object()),
    "object": (objects(300), lambda comm: comm.recv_object()),
    "object in pieces": (objects(300, 20_000, 300), lambda comm: comm.recv_object()),
    "probe": (array(3), lambda comm: comm.probe()),
}


def first(message: mpdist.Message) -> int:
    data = message.data if message.data is not None else message.recv().wait().data  # type: ignore[attr-defined]
    return int(np.concatenate([np.ravel(each) for each in data] if isinstance(data, list) else [data])[0])


def test_a_transfer_that_was_interrupted_twice_goes_on(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time before it was begun again: where it had been given up, the next receive was told of a loss."""
    monkeypatch.setattr(wire, "PIECE_BYTES", 8 * 1024)  # more pieces than one look takes
    count = 100_000
    if comm.rank == 0:
        comm.send(np.arange(count), 1).wait()
        return
    work = comm.recv(np.zeros(count, int), 0)
    while work._steps is None:  # type: ignore[attr-defined]  # a Receive
        assert not work._done
        comm._channel.engine.drive()
    with pytest.raises(KeyboardInterrupt):
        work._steps.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    message = work.wait(20)
    assert (message.data == np.arange(count)).all()


@pytest.mark.parametrize("how", ["comes", "is kept", "came back"])
@pytest.mark.parametrize("case", CASES)
def test_no_message_is_lost_wherever_a_wait_is_interrupted(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, case: str, how: str
) -> None:
    """The message comes meanwhile, has come before, or has been given back by a receive that was cancelled."""
    monkeypatch.setattr(wire, "SMALL_FRAME_BYTES", 4000)
    monkeypatch.setattr(sending, "INLINE_OBJECT_BYTES", 4000)
    send, post = CASES[case]
    for number in itertools.count(1):
        if comm.rank == 0:
            works = [send(comm, 2 * number), send(comm, 2 * number + 1)]
            go_on = comm.recv(np.zeros(1, int), 1, GO).wait().data[0]
            for work in works:
                work.wait()
            if not go_on:
                return
            continue
        interruptions = Interruptions(number, "progress", FILES)
        got = receive_two(comm, post, interruptions, how)
        assert got == [2 * number, 2 * number + 1], f"interrupted at place {number}"
        assert comm._channel.unfinished() == []
        assert comm._channel.inbox.unclaimed() == []
        comm.send(np.full(1, int(interruptions.left < 0)), 0, GO).wait()
        if interruptions.left >= 0:
            assert number > 10
            return


def until_one_has_come(comm: Communicator) -> None:
    """By MPI, or into a fastbox."""
    probe, readers = comm._channel.transport.comm.Iprobe, comm._channel.inbox.readers
    while not (probe() or any(reader.has_one() for reader in readers)):
        pass


def receive_two(
    comm: Communicator, post: Callable[[Communicator], mpdist.Work[Any]], interruptions: Interruptions, how: str
) -> list[int]:
    engine, inbox = comm._channel.engine, comm._channel.inbox
    until_one_has_come(comm)
    work = None
    if how == "comes":
        work = post(comm)
    elif how == "is kept":
        other = comm.recv(tag=GO + 1)
        while not inbox.box.messages:
            engine.drive()
        assert other.cancel()
    else:
        cancelled = post(comm)
        while not cancelled._done:
            engine.drive()
        cancelled._abandon()
    got = []
    try:
        with interruptions:
            if work is None:
                work = post(comm)
            message = work.wait()
        got.append(first(message))
    except Interrupted:
        if work is not None and work.done() and not work.cancelled():
            got.append(first(work.result()))
    while len(got) < 2:
        got.append(first(post(comm).wait(5)))
    return got


AWAITED: dict[str, tuple[Callable[[Communicator, int], Any], Callable[[Communicator], mpdist.Work[Any]]]] = {
    "small array": (array(3), lambda comm: comm.recv(np.zeros(3, int), 0)),
    "any": (array(3), lambda comm: comm.recv(np.zeros(3, int))),
    "large array": (array(20_000), lambda comm: comm.recv(np.zeros(20_000, int), 0)),
    "another comes first": (array(3), lambda comm: comm.recv(np.zeros(3, int), 0, GO + 1)),
    "small array, sent one": (array(3), lambda comm: comm.sendrecv(np.zeros(1, int), 1, np.zeros(3, int), 0)),
    "large array, sent one": (array(20_000), lambda comm: comm.sendrecv(np.zeros(1, int), 1, np.zeros(20_000, int), 0)),
}


@pytest.mark.parametrize("seconds", [0.0, 0.003], ids=["soon", "late"])
@pytest.mark.parametrize("case", AWAITED)
async def test_no_message_is_lost_wherever_an_await_is_interrupted(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, case: str, seconds: float
) -> None:
    """Rank 1 receives the first of two messages and is interrupted; with sendrecv it sends to itself.

    One that comes late finds an await that looks for it no more, and leaves that to the Engine.
    """
    if seconds:
        monkeypatch.setattr(comm._channel.engine, "quick_polls", range(2))
    send, post = AWAITED[case]
    for number in itertools.count(1):
        if comm.rank == 0:
            await asyncio.sleep(seconds)
            works = [send(comm, 2 * number), send(comm, 2 * number + 1)]
            if case == "another comes first":
                works.append(comm.send(np.full(3, 2 * number), 1, GO + 1))
            for work in works:
                await work
            if not (await comm.recv(np.zeros(1, int), 1, GO)).data[0]:
                return
            continue
        interruptions = Interruptions(number, "progress", FILES)
        got = []
        work = post(comm)
        try:
            with interruptions:
                message = await work
            got.append(first(message))
        except Interrupted:
            if case == "another comes first":
                got.append(first(await comm.recv(np.zeros(3, int), 0, GO + 1).within(5)))
        while len(got) < 2 + (case == "another comes first"):
            got.append(first(await comm.recv(src=0, tag=0).within(5)))
        if "sent one" in case:
            await comm.recv(np.zeros(1, int), 1)
        wanted = [2 * number, 2 * number + 1]
        assert got == ([2 * number, *wanted] if case == "another comes first" else wanted), f"place {number}"
        assert comm._channel.unfinished() == []
        assert comm._channel.inbox.unclaimed() == []
        await comm.send(np.full(1, int(interruptions.left < 0)), 0, GO)
        if interruptions.left >= 0:
            assert number > 5
            return


@pytest.mark.ranks(1)
def test_a_message_is_given_back_wherever_its_copying_is_interrupted(comm: Communicator) -> None:
    """As by a second signal, while the receive is given up for the first: the message was lost."""
    for number in itertools.count():
        comm.send(np.full(3, number), comm.rank).wait()
        work = comm.recv()
        while not work._done:
            comm._channel.engine.drive()
        place = Interruptions(number, "progress", ("message", "transfer"))
        try:
            with place:
                work._abandon()
        except Interrupted:
            pass
        assert work.cancelled()
        assert comm.recv().wait(5).data.tolist() == [number] * 3, f"interrupted at place {number}"
        if place.left >= 0:
            break
    assert number > 3
