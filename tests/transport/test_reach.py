"""Reach: the private memory of other ranks, read and written through the kernel."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from mpdist import Communicator
from mpdist.errors import CommunicationError
from mpdist.transport import reach
from mpdist.transport.reach import Reach, Remote

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system has no process_vm_readv")


def address_of(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_memory_is_read_and_written_in_parts() -> None:
    x = np.arange(100_000, dtype=np.int32)
    remote = Remote(Reach({0: os.getpid()}), 0, address_of(x), x.size, x.dtype)
    assert len(remote) == x.size
    part = np.empty(3, np.int32)
    remote[500:503].read_into(part)
    assert part.tolist() == [500, 501, 502]
    remote[99_998:].write(np.array([-1, -2], np.int32))
    assert x[-3:].tolist() == [99_997, -1, -2]
    assert len(remote[10:10]) == 0
    remote[10:20][2:4].write(np.array([7, 8], np.int32))
    assert x[11:15].tolist() == [11, 7, 8, 14]


def test_nothing_is_moved_for_no_elements() -> None:
    Remote(Reach({0: 2**30}), 0, 0, 0, np.dtype("float32")).read_into(np.empty(0, np.float32))


def test_a_process_that_is_gone_is_named() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(CommunicationError, match=rf"read 8 bytes .* rank 3 \(pid {child.pid}\).*MPDIST_REACH=0"):
        Reach({3: child.pid}).read(3, 4096, np.empty(1))


def test_memory_that_is_not_there_is_an_error_not_a_fault() -> None:
    for move in (Reach({0: os.getpid()}).read, Reach({0: os.getpid()}).write):
        with pytest.raises(CommunicationError, match="Bad address"):
            move(0, 4096, np.empty(4))


@pytest.mark.ranks(1, 2, 3, 4)
def test_every_rank_reads_and_writes_every_other(comm: Communicator) -> None:
    made = reach.connect(comm._channel.transport)
    if made is None:
        pytest.skip("the kernel keeps processes from each other's memory here")
    x = np.full(300_000, comm.rank, np.float64)
    addresses = comm.all_gather(np.array([address_of(x)])).wait().reshape(-1)
    for rank in range(comm.size):
        found = np.empty_like(x)
        made.read(comm.ranks[rank], int(addresses[rank]), found)
        assert (found == rank).all()
    comm.barrier().wait()
    mark = np.array([comm.rank + 100.0])
    for rank in range(comm.size):
        made.write(comm.ranks[rank], int(addresses[rank]) + 8 * comm.rank, mark)
    comm.barrier().wait()
    assert x[: comm.size].tolist() == [rank + 100.0 for rank in range(comm.size)]
    assert (x[comm.size :] == comm.rank).all()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("what", ["_read", "_write"])
def test_where_one_rank_cannot_reach_none_does(comm: Communicator, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the process of that number is another one."""
    made = Reach.__init__

    def refuse(self: Reach, pids: dict[int, int]) -> None:
        made(self, pids)
        setattr(self, what, lambda *_: -1)

    if comm.rank == 1:
        monkeypatch.setattr(Reach, "__init__", refuse)
    assert reach.connect(comm._channel.transport) is None


@pytest.mark.ranks(2, 3)
def test_another_process_of_that_number_is_not_taken(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where ranks are in containers that number their processes themselves: the token is not there."""
    if comm.rank == 1:
        wrong = np.frombuffer(bytearray(64), np.uint8)
        monkeypatch.setattr(reach, "address_of", lambda array: address_of(wrong))
    assert reach.connect(comm._channel.transport) is None
