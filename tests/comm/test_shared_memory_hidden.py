"""Memory that the kernel does not show to other processes, as some of devices: an error on all ranks."""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
import pytest
from algorithms.forcing import SHARED, forced, skip_without_reach

import mpdist
from mpdist import Communicator
from mpdist.algorithms.shared.team import SLOT_BYTES

pytestmark = [
    pytest.mark.ranks(2, 3),
    pytest.mark.either_mpi,
    pytest.mark.skipif(sys.platform != "linux", reason="the system has no process_vm_readv"),
]

NBYTES = 64 * mmap.PAGESIZE


def protect(x: np.ndarray, access: int, page: int = 0) -> None:
    """What may be done with a page of x."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(x.ctypes.data + page * mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE), access):
        raise OSError(ctypes.get_errno(), "mprotect")


@pytest.mark.parametrize("nbytes", [NBYTES, 2 * SLOT_BYTES], ids=["request", "program"])
async def test_all_ranks_hear_of_it_and_stay_in_step(comm: Communicator, nbytes: int) -> None:
    """The first page of the root's array is read by others only."""
    skip_without_reach(comm)
    x = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    x[:] = comm.rank
    async with forced(comm, SHARED) as made:
        for _ in range(2):
            if made.rank == 0:
                protect(x, 0)
                with pytest.raises(mpdist.CommunicationError, match=r"broadcast on .*could not do its share"):
                    await made.broadcast(x, 0)
                protect(x, mmap.PROT_READ | mmap.PROT_WRITE)
            else:
                with pytest.raises(mpdist.CommunicationError, match=r"rank 0 .*ordinary memory.*MPDIST_REACH=0"):
                    await made.broadcast(x, 0)
        await made.broadcast(x, 0)
        assert (x == 0).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["sum", "avg"])
async def test_so_do_those_of_an_all_reduce(comm: Communicator, op: str) -> None:
    """A page of rank 0's array, in the half that rank 1 reduces; as one request, and as a program."""
    skip_without_reach(comm)
    x = np.frombuffer(mmap.mmap(-1, NBYTES), np.float32)
    async with forced(comm, SHARED) as made:
        assert (await made.all_reduce(np.ones(x.size, np.float32), op) == (2 if op == "sum" else 1)).all()
        for _ in range(2):
            x[:] = 1
            if made.rank == 0:
                protect(x, 0, 60)
                with pytest.raises(mpdist.CommunicationError, match=r"all_reduce on .*rank 1 could not do its share"):
                    await made.all_reduce(x, op)
                protect(x, mmap.PROT_READ | mmap.PROT_WRITE, 60)
            else:
                with pytest.raises(mpdist.CommunicationError, match=r"rank 0 .*ordinary memory.*MPDIST_REACH=0"):
                    await made.all_reduce(x, op)
            x[:] = made.rank
            assert (await made.all_reduce(x, op) == (1 if op == "sum" else 0.5)).all()
