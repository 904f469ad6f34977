"""Reach: the private memory of another process on this node, read and written by the kernel.

One copy instead of two through a slot, and nothing to prepare. The kernel allows it
between processes of one user (process_vm_readv), unless a sandbox forbids it; so it
is tried at start, with a token that proves that the right process was reached.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from mpdist.errors import CommunicationError
from mpdist.memory import address_of
from mpdist.memory.elements import Array

if TYPE_CHECKING:
    from mpdist.transport.mpi import Transport

_TOKEN_BYTES = 32

# prctl: any process of this user may attach.
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)


class _Vector(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class Reach:
    """The memory of the ranks of this node."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        """Take each rank's process id, by its rank in the world."""
        libc = ctypes.CDLL(None, use_errno=True)
        self._read, self._write = libc.process_vm_readv, libc.process_vm_writev
        for call in (self._read, self._write):
            pointer, count = ctypes.c_void_p, ctypes.c_ulong
            call.argtypes = (ctypes.c_int, pointer, count, pointer, count, count)
            call.restype = ctypes.c_ssize_t
        self._pids = pids
        # Used again and again: only the thread that drives the Engine moves memory.
        self._mine, self._theirs = _Vector(), _Vector()
        self._vectors = (ctypes.addressof(self._mine), 1, ctypes.addressof(self._theirs), 1)

    def read(self, world_rank: int, address: int, target: Array) -> None:
        """Copy a rank's memory into a contiguous array."""
        self._move("read", world_rank, address, target)

    def write(self, world_rank: int, address: int, source: Array) -> None:
        """Copy a contiguous array into a rank's memory."""
        self._move("write", world_rank, address, source)

    def _move(self, what: str, world_rank: int, address: int, array: Array) -> None:
        call = self._read if what == "read" else self._write
        mine, theirs = self._mine, self._theirs
        here, nbytes = address_of(array), array.nbytes
        done = 0
        while done < nbytes:
            mine.base, theirs.base = here + done, address + done
            mine.nbytes = theirs.nbytes = nbytes - done
            moved = call(self._pids[world_rank], *self._vectors, 0)
            if moved <= 0:
                raise CommunicationError(
                    f"cannot {what} {nbytes} bytes of the memory of rank {world_rank} (pid {self._pids[world_rank]}) "
                    f"on this node: {_why(ctypes.get_errno())}; MPDIST_REACH=0 does without"
                )
            done += moved


def _why(code: int) -> str:
    if code == errno.EFAULT:
        return f"{os.strerror(code)}: not all of it is ordinary memory, which alone the kernel shows to other processes"
    return f"{os.strerror(code)}; did the rank end?"


class Remote:
    """`count` elements of a rank's private memory, to be read and written in parts."""

    __slots__ = ("_address", "_dtype", "_reach", "_world_rank", "count")

    def __init__(self, reach: Reach, world_rank: int, address: int, count: int, dtype: np.dtype[np.generic]) -> None:
        self._reach = reach
        self._world_rank = world_rank
        self._address = address
        self._dtype = dtype
        self.count = count

    def __getitem__(self, part: slice) -> Remote:
        start, end, _ = part.indices(self.count)
        address = self._address + start * self._dtype.itemsize
        return Remote(self._reach, self._world_rank, address, max(0, end - start), self._dtype)

    def __len__(self) -> int:
        return self.count

    def read_into(self, target: Array, start: int = 0) -> None:
        """Copy as much as the target takes, from this element on."""
        self._reach.read(self._world_rank, self._address + start * self._dtype.itemsize, target)

    def write(self, source: Array, start: int = 0) -> None:
        """Overwrite as much as the source has, from this element on."""
        self._reach.write(self._world_rank, self._address + start * self._dtype.itemsize, source)


def connect(node: Transport) -> Reach | None:
    """Try to reach all ranks of the node; collective and blocking, at start.

    Returns:
        None, on all ranks of the node, where one of them can't reach another.
    """
    if sys.platform != "linux":
        return None
    if _all_reached(node):
        return _made(node)
    let_others_reach()
    node.all_gather_now(None)
    return _made(node) if _all_reached(node) else None


def let_others_reach() -> None:
    """Open this process's memory to others of its user, where the Yama module keeps it for its ancestors."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)


def _made(node: Transport) -> Reach:
    return Reach(dict(zip(node.world_ranks(), node.all_gather_now(os.getpid()), strict=True)))


def _all_reached(node: Transport) -> bool:
    """Whether every rank can read every other's token, and write to it."""
    token = np.frombuffer(bytearray(secrets.token_bytes(_TOKEN_BYTES)), np.uint8)
    marks = np.zeros(node.size, np.uint8)
    facts = (os.getpid(), address_of(token), address_of(marks), token.tobytes())
    everyone = node.all_gather_now(facts)
    is_read = all(_reads(rank, *other) for rank, other in enumerate(everyone) if rank != node.rank)
    if not all(node.all_gather_now(is_read)):
        return False
    one = np.ones(1, np.uint8)
    for rank, (pid, _, address, _) in enumerate(everyone):
        if rank != node.rank:
            _tried(Reach({rank: pid}), rank, address + node.rank, one)
    node.all_gather_now(None)
    marks[node.rank] = 1
    return all(node.all_gather_now(bool(marks.all())))


def _reads(rank: int, pid: int, address: int, _: int, token: bytes) -> bool:
    found = np.zeros(_TOKEN_BYTES, np.uint8)
    try:
        Reach({rank: pid}).read(rank, address, found)
    except (CommunicationError, AttributeError):  # not allowed; a C library without the call
        return False
    return found.tobytes() == token


def _tried(reach: Reach, rank: int, address: int, mark: Array) -> None:
    try:
        reach.write(rank, address, mark)
    except CommunicationError:
        return  # the mark is missed by its reader
