"""Sharing: memory that the ranks of one node map together.

The files have no name: a rank makes one in memory, and its neighbours open it
through /proc while it is held open. So nothing is left behind, whatever kills the
job, and a small /dev/shm is no limit. Where the system has no such files, one in
/dev/shm is unlinked as soon as all have opened it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import TYPE_CHECKING, NamedTuple

from mpdist.memory.huge_pages import map_aligned

if TYPE_CHECKING:
    from mpdist.transport.mpi import Transport


def nameless_file(nbytes: int, folder: str = "") -> tuple[int, str]:
    """A sparse file in memory; its descriptor, and its path where it has one.

    Args:
        folder: make it there, instead of without a name.
    """
    descriptor, path = (-1 if folder else _file_in_memory()), ""
    if descriptor < 0:
        usual = "/dev/shm" if os.path.isdir("/dev/shm") else None
        descriptor, path = tempfile.mkstemp(prefix="mpdist-", dir=folder or usual)
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError:  # larger than the file system takes
        os.close(descriptor)
        if path:
            os.unlink(path)
        raise
    return descriptor, path


def _file_in_memory() -> int:
    """A descriptor, or -1 where there are no such files."""
    try:
        return os.memfd_create("mpdist")
    except (AttributeError, OSError):  # not Linux; an old kernel, or a sandbox, that refuses the call
        return -1


class Named(NamedTuple):
    """A file as its maker tells others of it: where it may be opened, and which one it is.

    Where processes are numbered in namespaces of their own, the path through /proc may lead to another file.
    """

    paths: tuple[str, str]
    device: int
    inode: int

    @classmethod
    def of(cls, descriptor: int, path: str) -> Named:
        status = os.fstat(descriptor)
        return cls((f"/proc/{os.getpid()}/fd/{descriptor}", path), status.st_dev, status.st_ino)

    def open(self) -> int:
        """A descriptor, or -1 where it can't be opened."""
        for path in filter(None, self.paths):
            try:
                descriptor = os.open(path, os.O_RDWR)
            except OSError:
                continue
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) == (self.device, self.inode):
                return descriptor
            os.close(descriptor)
        return -1


def shared_bytes(node: Transport, nbytes: int) -> mmap.mmap:
    """Zeroed bytes that all ranks of this node see; collective over them, and blocking.

    Where memory cannot be shared each rank gets bytes of its own.
    """
    unlink = ""
    if node.rank == 0:
        descriptor, unlink = nameless_file(nbytes)
        node.all_gather_now(Named.of(descriptor, unlink))
    else:
        named: Named = node.all_gather_now(None)[0]
        descriptor = named.open()
    opened = all(node.all_gather_now(descriptor >= 0))
    if unlink:
        os.unlink(unlink)
    flags = mmap.mmap(descriptor, nbytes) if opened else mmap.mmap(-1, nbytes)
    if descriptor >= 0:
        os.close(descriptor)
    return flags


def shared_files(node: Transport, nbytes: int, folder: str = "") -> tuple[int, list[mmap.mmap]] | None:
    """One sparse file of each rank of this node, mapped by all; collective over them, and blocking.

    Returns:
        The descriptor of this rank's own file and the mappings in the order of ranks; None, on all ranks,
        where memory cannot be shared.
    """
    try:
        descriptor, unlink = nameless_file(nbytes, folder)
    except OSError:
        descriptor, unlink = -1, ""
    everyone = node.all_gather_now(None if descriptor < 0 else Named.of(descriptor, unlink))
    opened = [
        descriptor if rank == node.rank else -1 if named is None else named.open()
        for rank, named in enumerate(everyone)
    ]
    maps = _mapped(opened, nbytes)
    is_shared = all(node.all_gather_now(maps is not None))
    if unlink:
        os.unlink(unlink)
    for each in opened:
        if each >= 0 and (each != descriptor or not is_shared):
            os.close(each)
    return (descriptor, maps) if is_shared and maps is not None else None


def _mapped(descriptors: list[int], nbytes: int) -> list[mmap.mmap] | None:
    if min(descriptors) < 0:
        return None
    try:
        return [map_aligned(descriptor, nbytes) for descriptor in descriptors]
    except (OSError, ValueError):  # a limit on address space
        return None
