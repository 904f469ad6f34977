"""Small arrays through shared memory, where several threads of a rank send or receive them."""

from __future__ import annotations

import random
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from comm.boxes import LARGE, nothing_pending, sent_two

import mpdist
from mpdist import Communicator
from mpdist.progress import wire
from mpdist.progress.array_receive import ArrayReceive


@pytest.mark.ranks(2)
def test_each_thread_that_sends_keeps_its_order(comm: Communicator) -> None:
    """Three threads send small and large arrays to the same rank, where one receives for each."""
    number_of, threads = 300, 3
    if not comm._channel.engine.is_threaded:
        pytest.skip("MPI may not be called from several threads")

    def send(tag: int) -> None:
        sizes = random.Random(tag)
        for number in range(number_of):
            comm.send(np.full(sizes.choice([1, 1, 1, 1, 1, 1, 1, 500, LARGE]), number), 1, tag).wait()

    def receive(tag: int) -> None:
        sizes = random.Random(tag)
        for number in range(number_of):
            size = sizes.choice([1, 1, 1, 1, 1, 1, 1, 500, LARGE])
            got.append((tag, number, comm.recv(np.zeros(size, int), 0, tag).wait(30).data.tolist() == [number] * size))

    got: list[tuple[int, int, bool]] = []
    workers = [threading.Thread(target=receive if comm.rank else send, args=(tag,)) for tag in range(threads)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    if comm.rank:
        assert len(got) == threads * number_of
        assert all(is_right for _, _, is_right in got), [each for each in got if not each[2]][:3]


@pytest.mark.ranks(2)
def test_a_thread_that_sends_while_another_one_opens_the_box_keeps_its_order(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPI is called without Python's lock: here the other thread has all its turns in that call."""
    channel = comm._channel
    isend = channel.isend

    def interleaved(spec: list[Any], dst: int, wire_tag: int) -> Any:
        if wire_tag == wire.FASTBOX and not others:  # the box may be shut and opened once more
            others.append(threading.Thread(target=send_both))
            others[0].start()
            others[0].join(1)  # it may have to wait for the Engine's lock
        return isend(spec, dst, wire_tag)

    def send_both() -> None:
        works.append(comm.send(np.array([1]), 1, 5))
        works.append(comm.send(np.full(50, 2), 1, 5))

    if comm.rank == 0:
        monkeypatch.setattr(channel, "isend", interleaved)
        monkeypatch.setattr(channel.transport, "isend", interleaved)
        others: list[threading.Thread] = []
        works: list[mpdist.Work[None]] = []
        while len(works) < 2:
            comm.send(np.array([0]), 1).wait()
        for work in works:
            work.wait()
        return
    assert [comm.recv(src=0, tag=5).wait(20).data[0] for _ in range(2)] == [1, 2]
    while comm._channel.inbox.box.messages:
        comm.recv(src=0).wait(20)


@pytest.mark.ranks(2)
async def test_a_receive_waits_for_what_another_thread_is_about_to_keep(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, where the Engine has found it."""
    if await sent_two(comm):
        return
    inbox, engine = comm._channel.inbox, comm._channel.engine
    is_kept = threading.Event()
    keep = inbox.box.keep

    def keep_slowly(incoming: Any) -> None:
        is_kept.set()
        time.sleep(0.05)
        keep(incoming)

    def look() -> None:
        with engine.lock:
            inbox.poll_once()

    monkeypatch.setattr(inbox.box, "keep", keep_slowly)
    other = threading.Thread(target=look)
    other.start()
    is_kept.wait()
    with nothing_pending(comm):
        assert [(await comm.recv(np.zeros(1, int), 0)).data[0] for _ in range(2)] == [1, 2]
    other.join()
    await comm.send(b"", 0)


@pytest.mark.ranks(2)
async def test_a_receive_waits_for_what_another_thread_has_in_hand(comm: Communicator) -> None:
    """It reads an entry and has not delivered it yet, so the next one is not for whoever comes now."""
    if await sent_two(comm):
        return
    inbox, engine = comm._channel.inbox, comm._channel.engine
    has_read = threading.Event()

    def read() -> None:
        reader = inbox.boxes[0]
        with engine.lock:
            incoming = reader.pass_on(inbox)
            assert incoming is not None
            has_read.set()
            time.sleep(0.05)
            inbox.deliver(incoming)

    other = threading.Thread(target=read)
    other.start()
    has_read.wait()
    assert [(await comm.recv(np.zeros(1, int), 0)).data[0] for _ in range(2)] == [1, 2]
    other.join()
    await comm.send(b"", 0)


@pytest.mark.ranks(2)
async def test_what_does_not_fit_a_receive_is_the_first_for_another_threads(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if await sent_two(comm):
        return
    does_not_fit = threading.Event()
    accept = ArrayReceive.accept
    got = []

    def accept_slowly(self: ArrayReceive, incoming: Any) -> bool:
        fits = accept(self, incoming)
        if not fits:
            does_not_fit.set()
            time.sleep(0.05)
        return fits

    def receive() -> None:
        does_not_fit.wait()
        got.append(comm.recv(np.zeros(1, int), 0).wait(20).data[0])

    monkeypatch.setattr(ArrayReceive, "accept", accept_slowly)
    other = threading.Thread(target=receive)
    other.start()
    with nothing_pending(comm), pytest.raises(mpdist.UnsupportedBuffer):
        await comm._post_receive(np.zeros(1), 0, 0)
    other.join()
    assert [*got, (await comm.recv(np.zeros(1, int), 0)).data[0]] == [1, 2]
    await comm.send(b"", 0)


@pytest.mark.ranks(2)
def test_nothing_overtakes_whichever_thread_receives_it(comm: Communicator) -> None:
    """Three threads receive what one sends: what each gets comes in order; a fourth one gets what shuts the box."""
    number_of, threads = 3000, 3
    if not comm._channel.engine.is_threaded:
        pytest.skip("MPI may not be called from several threads")
    if comm.rank == 0:
        for number in range(number_of):
            comm.send(np.array([number]), 1).wait()
            if number % 100 == 0:
                comm.send(np.zeros(LARGE), 1, 1).wait()
        for _ in range(threads):
            comm.send(np.array([-1]), 1).wait()
        return
    got: list[list[int]] = [[] for _ in range(threads)]

    def receive(mine: list[int]) -> None:
        while (number := int(comm.recv(np.zeros(1, int), 0, 0).wait(30).data[0])) >= 0:
            mine.append(number)

    def receive_large() -> None:
        for _ in range(0, number_of, 100):
            comm.recv(np.zeros(LARGE), 0, 1).wait(30)

    workers = [threading.Thread(target=receive, args=(mine,)) for mine in got]
    workers.append(threading.Thread(target=receive_large))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for each in workers:
            each.start()
        for each in workers:
            each.join()
    finally:
        sys.setswitchinterval(before)
    assert all(mine == sorted(mine) for mine in got)
    assert sorted(number for mine in got for number in mine) == list(range(number_of))
