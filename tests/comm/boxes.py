"""Boxes: what tests of small arrays through shared memory have in common."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from comm.meeting import met

from mpdist import Communicator
from mpdist.progress.fastbox import BOX_BYTES, OPENS_AFTER, SLOT_DATA_BYTES, Fastbox

# So many numbers of 8 bytes go by MPI; and a few that do not lie in a slot.
LARGE = BOX_BYTES // 8 + 1
LONG = SLOT_DATA_BYTES // 8 + 10


def after(comm: Communicator) -> int:
    return (comm.rank + 1) % comm.size


def before(comm: Communicator) -> int:
    return (comm.rank - 1) % comm.size


async def open_box(comm: Communicator) -> None:
    """Send to the next rank until the box is open; each rank has one from the rank before."""
    for number in range(OPENS_AFTER + 1):
        sent = comm.send(np.array([number]), after(comm))
        assert (await comm.recv(src=before(comm))).data[0] == number
        await sent
    await met(comm)
    comm._channel.transport.comm.Barrier()  # none is still about to take what others send from here on
    assert after(comm) in comm._channel.opened
    assert before(comm) in comm._channel.inbox.boxes


def box_to(comm: Communicator, dst: int) -> Fastbox:
    return comm._channel.fastboxes._boxes[dst]


async def sent_two(comm: Communicator) -> bool:
    """Rank 0 sends 1 and 2, and waits for a message: True there; rank 1 comes back when the first is in its box."""
    await open_box(comm)
    if comm.rank == 0:
        await comm.send(np.array([1]), 1)
        await comm.send(np.array([2]), 1)
        await comm.recv(src=1)
        return True
    while not comm._channel.inbox.boxes[0].has_one():
        pass
    return False


def until_mpi_has_one(comm: Communicator) -> None:
    while not comm._channel.transport.comm.Iprobe():
        pass


@contextmanager
def nothing_pending(comm: Communicator) -> Iterator[None]:
    """A receive may be met at once, whatever tests before this one have left pending."""
    engine = comm._channel.engine
    engine.credit = 64
    left, engine.active = engine.active, deque()
    try:
        yield
    finally:
        engine.active = left
