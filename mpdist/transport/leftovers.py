"""Leftovers: MPICH's shared memory has a name only until all ranks of the host have mapped it.

MPICH makes a file of some megabytes in /dev/shm when it starts, and unlinks it in MPI_Finalize: so a job
that ends badly leaves it behind. Nobody opens it by its name once MPI_Init has returned on all ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_PREFIX = "mpich_shm_"


def unlink_segments() -> None:
    """Take the names away from those that this process has mapped; after MPI's start on all ranks."""
    for path, inode in set(_mapped()):
        with contextlib.suppress(OSError):  # another rank of the host was first
            if os.stat(path).st_ino == inode:
                os.unlink(path)


def _mapped() -> Iterator[tuple[str, int]]:
    """Path and inode of each; those that have no name any more bear a mark behind it."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and os.path.basename(fields[5]).startswith(_PREFIX):
                yield fields[5], int(fields[4])
