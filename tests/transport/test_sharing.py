"""Sharing: the files that the ranks of a node map together, and the arenas on them."""

from __future__ import annotations

import errno
import mmap
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from mpdist import Communicator
from mpdist.memory import as_buffer
from mpdist.memory.arena import PAGE_BYTES
from mpdist.transport import neighbours, sharing
from mpdist.transport.sharing import Named, nameless_file

NBYTES = 16 * PAGE_BYTES


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---------------------------------------------------------------------- files


def test_a_file_in_memory_has_no_name_and_no_pages() -> None:
    descriptor, path = nameless_file(1 << 40)
    assert path == ""
    assert (os.fstat(descriptor).st_size, os.fstat(descriptor).st_blocks) == (1 << 40, 0)
    os.close(descriptor)


def test_a_file_in_a_folder_has_a_name_until_it_is_unlinked(tmp_path: Path) -> None:
    descriptor, path = nameless_file(NBYTES, str(tmp_path))
    assert [str(each) for each in tmp_path.iterdir()] == [path]
    os.close(descriptor)


def test_where_the_call_for_files_in_memory_is_refused_they_have_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has the function wherever it was built: without the kernel's call no job could start."""

    def refuse(name: str) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    descriptor, path = nameless_file(NBYTES)
    assert os.path.samestat(os.stat(path), os.fstat(descriptor))
    assert os.fstat(descriptor).st_size == NBYTES
    os.unlink(path)
    os.close(descriptor)


def test_a_file_that_cannot_be_so_long_leaves_nothing_behind(tmp_path: Path) -> None:
    before = descriptors()
    for folder in ("", str(tmp_path)):
        with pytest.raises(OSError, match="Invalid argument"):
            nameless_file(-1, folder)  # as one that is larger than the file system takes
    assert list(tmp_path.iterdir()) == []
    assert descriptors() == before


def test_a_named_file_is_opened_by_any_of_its_paths(tmp_path: Path) -> None:
    descriptor, path = nameless_file(NBYTES, str(tmp_path))
    named = Named.of(descriptor, path)
    again = named.open()
    assert os.fstat(again).st_ino == os.fstat(descriptor).st_ino
    elsewhere = Named(("/proc/0/fd/0", path), named.device, named.inode).open()
    assert os.fstat(elsewhere).st_ino == os.fstat(descriptor).st_ino
    for each in (descriptor, again, elsewhere):
        os.close(each)


def test_another_file_at_the_same_path_is_not_taken(tmp_path: Path) -> None:
    """As where /proc shows other processes than those of the maker."""
    descriptor, _ = nameless_file(NBYTES)
    other = tmp_path / "other"
    other.write_bytes(b"precious")
    before = descriptors()
    named = Named.of(descriptor, "")
    assert Named((str(other), ""), named.device, named.inode).open() == -1
    assert descriptors() == before
    assert other.read_bytes() == b"precious"
    os.close(descriptor)


def test_what_cannot_be_opened_is_none(tmp_path: Path) -> None:
    assert Named((str(tmp_path / "gone"), ""), 0, 0).open() == -1
    with socket.socket() as closed:
        assert Named.of(closed.fileno(), "").open() == -1


# ---------------------------------------------------------------------- shared by ranks


@pytest.mark.ranks(1, 2, 3, 4)
def test_every_rank_sees_what_the_others_write(comm: Communicator, tmp_path: Path) -> None:
    node = comm._channel.transport
    for folder in ("", "/dev/shm" if os.path.isdir("/dev/shm") else str(tmp_path)):
        before = descriptors()
        shared = sharing.shared_files(node, NBYTES, folder)
        assert shared is not None
        descriptor, maps = shared
        assert [len(each) for each in maps] == [NBYTES] * comm.size
        maps[comm.rank][:4] = bytes([comm.rank + 1] * 4)
        comm.barrier().wait()
        assert [each[3] for each in maps] == [rank + 1 for rank in range(comm.size)]
        comm.barrier().wait()
        for each in maps:
            each.close()
        os.close(descriptor)
        assert descriptors() == before


@pytest.mark.ranks(2, 3)
def test_where_one_rank_cannot_share_none_does(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    node = comm._channel.transport

    def refuse(*_: object) -> int:
        raise OSError("no more files")

    for name in ("nameless_file", "Named", "_mapped"):
        before = descriptors()
        with monkeypatch.context() as patch:
            if comm.rank == 1 and name == "nameless_file":
                patch.setattr(sharing, name, refuse)
            if comm.rank == 1 and name == "Named":
                patch.setattr(sharing.Named, "open", lambda self: -1)
            if comm.rank == 1 and name == "_mapped":
                patch.setattr(sharing, name, lambda *_: None)
            assert sharing.shared_files(node, NBYTES) is None
        assert descriptors() == before, name


@pytest.mark.ranks(2, 3)
def test_bytes_of_its_own_where_one_rank_cannot_share(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    node = comm._channel.transport
    shared = sharing.shared_bytes(node, 64)
    shared[comm.rank] = comm.rank + 1
    comm.barrier().wait()
    assert list(shared[: comm.size]) == [rank + 1 for rank in range(comm.size)]
    if comm.rank == 1:
        monkeypatch.setattr(sharing.Named, "open", lambda self: -1)
    own = sharing.shared_bytes(node, 64)
    own[comm.rank] = 9
    comm.barrier().wait()
    assert [place for place in range(64) if own[place]] == [comm.rank]


@pytest.mark.ranks(1, 2, 4)
def test_arenas_are_read_by_offset(comm: Communicator) -> None:
    """Also where every process has them at another address."""
    pad = mmap.mmap(-1, PAGE_BYTES * (1 + comm.rank * 7))
    made = neighbours.connect(comm._channel.transport)
    assert made is not None
    x = made.empty((50, 3), np.float64)
    x[:] = comm.rank
    part = x[10:]
    offset = made.offset_of(as_buffer(part))
    assert offset is not None
    assert made.offset_of(as_buffer(np.empty(5))) is None
    assert made.offset_of(as_buffer(made.empty(0, np.float32))) is None
    assert made.offset_of(as_buffer(made.empty((3, 5), np.int8))) is not None
    whole = made.offset_of(as_buffer(x))
    assert offset == whole + 10 * 3 * 8
    for same in (x.view(np.int32), x.reshape(-1), x[:], np.ndarray(1200, np.uint8, x.base), x.base):
        assert made.offset_of(as_buffer(same)) == whole
    for shifted in (np.ndarray(148, np.float64, x.base, 16), np.frombuffer(x, np.float64)[2:], x.reshape(-1)[2:]):
        assert made.offset_of(as_buffer(shifted)) == whole + 16
    others = neighbours.connect(comm._channel.transport)
    assert others is not None
    assert made.offset_of(as_buffer(others.empty((50, 3), np.float64))) is None
    offsets = comm.all_gather(np.array([offset])).wait().reshape(-1)
    for rank in range(comm.size):
        world_rank = comm.ranks[rank]
        assert (made.array(world_rank, int(offsets[rank]), part.size, "float64") == rank).all()
        assert made.words(world_rank, int(offsets[rank]), 2).nbytes == 16
    comm.barrier().wait()
    pad.close()
    del x, part
    os.close(made.arena._descriptor)
