"""Leftovers: of MPICH's shared memory no file is left that bears a name."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from mpdist import Communicator
from mpdist.transport.leftovers import _mapped, unlink_segments

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")


def test_only_what_this_process_has_mapped_is_unlinked(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("mpich_shm_1_0", "mpich_shm_2_0", "other_shm_0")]
    for path in paths:
        path.write_bytes(bytes(mmap.PAGESIZE))
    files = [path.open("r+b") for path in (paths[0], paths[2])]
    maps = [mmap.mmap(file.fileno(), mmap.PAGESIZE) for file in files]
    unlink_segments()
    assert [path.exists() for path in paths] == [False, True, True]
    for each in (*maps, *files):
        each.close()


@pytest.mark.ranks(2)
def test_no_segment_of_a_started_job_has_a_name(comm: Communicator) -> None:
    assert [path for path, _ in _mapped() if os.path.exists(path)] == []
