"""A sender that awaits an answer takes the lines of its next stretch out of the receiver's cache, see `fastbox`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from comm.boxes import LONG, after, before, box_to, nothing_pending, open_box

from mpdist import Communicator
from mpdist.progress.fastbox import BOX_BYTES, READ_AT, READY_BYTES, SLOTS, STRETCHES, Fastbox

pytestmark = pytest.mark.ranks(2, 3)

FULL = BOX_BYTES // 8


async def pass_on(comm: Communicator, value: int, length: int = LONG) -> None:
    """To the next rank, and what comes from the one before is read."""
    await comm.send(np.full(length, value), after(comm))
    assert (await comm.recv(src=before(comm))).data.tolist() == [value] * length


async def boxed(comm: Communicator) -> Fastbox:
    """A box whose stretches have all been used and read."""
    await open_box(comm)
    for value in range(STRETCHES + 1):
        await pass_on(comm, value + 1, FULL)
    comm._channel.transport.comm.Barrier()
    return box_to(comm, after(comm))


def next_lines(box: Fastbox) -> Any:
    return box.lines[(box.number + 1) % STRETCHES]


def not_yet() -> Any:
    """Of an answer: the words, where in them it shows, and which number shows it."""
    return (memoryview(bytes(8)).cast("q"), 0, 5)


async def test_as_much_as_the_last_one_had_once_for_each_entry(comm: Communicator) -> None:
    box = await boxed(comm)
    await pass_on(comm, 3, READY_BYTES // 8 + 1)
    comm._channel.transport.comm.Barrier()
    lines = next_lines(box)
    assert lines.all()
    box.make_ready(*not_yet())
    assert not lines[:2].any()
    assert lines[2:].all()
    lines[:] = 7
    box.make_ready(*not_yet())
    assert (lines == 7).all()
    await pass_on(comm, 4)
    comm._channel.transport.comm.Barrier()
    lines = next_lines(box)
    box.make_ready(*not_yet())
    assert not lines[0].any()
    assert lines[1:].all()


async def test_a_receive_does_it_where_the_answer_comes_from_whom_the_last_one_went_to(comm: Communicator) -> None:
    box = await boxed(comm)
    with nothing_pending(comm):
        work = comm.recv(np.empty(FULL, int), before(comm))
    assert next_lines(box).any() == (comm.size != 2)
    comm._channel.transport.comm.Barrier()
    await comm.send(np.full(FULL, 5), after(comm))
    assert ((await work).data == 5).all()


async def test_not_while_the_answer_is_there(comm: Communicator) -> None:
    box = await boxed(comm)
    box.make_ready(memoryview((5).to_bytes(8, "little")).cast("q"), 0, 5)
    assert next_lines(box).all()


async def test_what_has_not_been_read_is_left_alone(comm: Communicator) -> None:
    box = await boxed(comm)
    sent = [comm.send(np.full(FULL, value + 10), after(comm)) for value in range(STRETCHES)]  # no turn of the loop
    box.make_ready(*not_yet())
    assert after(comm) in comm._channel.opened
    assert box.words[READ_AT] != box.number - STRETCHES or next_lines(box).all()
    for work in sent:
        await work
    for value in range(STRETCHES):
        assert ((await comm.recv(src=before(comm))).data == value + 10).all()
    comm._channel.transport.comm.Barrier()


async def test_what_is_put_meanwhile_is_left_alone(comm: Communicator) -> None:
    """By a signal's handler or another thread, which may go on between any two pieces."""
    box = await boxed(comm)
    number = box.number

    class Words:
        looks = 0

        def __getitem__(self, at: int) -> int:
            self.looks += 1
            if self.looks == 2:
                comm.send(np.full(FULL, 9), after(comm))
            return 0

    words: Any = Words()
    box.make_ready(words, 0, 5)
    assert box.number == number + 1
    assert words.looks == BOX_BYTES // READY_BYTES
    assert (box.lines[box.number % STRETCHES] == 9).all()
    assert ((await comm.recv(src=before(comm))).data == 9).all()
    comm._channel.transport.comm.Barrier()


async def test_not_after_a_small_one(comm: Communicator) -> None:
    box = await boxed(comm)
    await pass_on(comm, 3, 1)
    comm._channel.transport.comm.Barrier()
    box.make_ready(*not_yet())
    assert next_lines(box).all()


async def test_looking_takes_no_place_from_small_ones(comm: Communicator) -> None:
    """In a new epoch nothing says how far the receiver has read, until it has read something."""
    box = await boxed(comm)
    comm._channel.fastboxes.shut(after(comm))
    for value in range(box.after):
        await pass_on(comm, value, 1)
    comm._channel.transport.comm.Barrier()
    lengths = [1] + [LONG] * (STRETCHES - 1) + [1] * (SLOTS - STRETCHES)
    sent = [comm.send(np.full(length, 1), after(comm)) for length in lengths[:STRETCHES]]
    assert after(comm) in comm._channel.opened
    box.make_ready(*not_yet())
    sent += [comm.send(np.full(length, 1), after(comm)) for length in lengths[STRETCHES:]]
    assert box.number == box.began + SLOTS
    for work in sent:
        await work
    for length in lengths:
        assert (await comm.recv(src=before(comm))).data.tolist() == [1] * length
    comm._channel.transport.comm.Barrier()


async def test_not_in_a_box_that_is_closed(comm: Communicator) -> None:
    other = await comm.dup()
    box = await boxed(other)
    lines = next_lines(box)
    await other.close()
    box.make_ready(*not_yet())
    assert lines.all()


async def test_answers_of_all_lengths_arrive_as_they_were_sent(comm: Communicator) -> None:
    """By receives into arrays, which make the next stretch ready before they look."""
    await open_box(comm)
    random = np.random.default_rng(3)
    x = np.empty(BOX_BYTES, np.uint8)
    y = np.empty(BOX_BYTES, np.uint8)
    for number in range(200):
        nbytes = int(random.integers(1, BOX_BYTES + 1))
        x[:nbytes] = number % 251 + 1
        works = [comm.send(x[:nbytes], after(comm)) for _ in range(number % 2 + 1)]
        for _ in works:
            with nothing_pending(comm):
                received = comm.recv(y[:nbytes], before(comm))
            await received
            assert (y[:nbytes] == number % 251 + 1).all()
        for work in works:
            await work
