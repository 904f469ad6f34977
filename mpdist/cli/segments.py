"""Segments: a folder for the shared memory of Open MPI's ranks of one job on this host, gone with the job.

Open MPI names its files by 16 bits of a hash of the job. So one job in 65536 that runs beside another one of the same
user meets the other's files, and crashes or hangs. And it leaves them behind when its ranks are killed. Should
`mpdist run` be killed itself, the wardens remove the folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from mpdist.cli import warden
from mpdist.cli.launcher import Kind

SHARED_MEMORY = "/dev/shm"
VARIABLE = "OMPI_MCA_btl_sm_backing_directory"


@contextmanager
def own_segments(kind: Kind, environ: Mapping[str, str], *, is_local: bool) -> Iterator[dict[str, str]]:
    """Variables that lead the ranks of a job to such a folder while it is open; none where it is not for us to say."""
    if kind is not Kind.OPENMPI or not is_local or VARIABLE in environ or not os.access(SHARED_MEMORY, os.W_OK):
        yield {}
        return
    with TemporaryDirectory(prefix="openmpi-", dir=SHARED_MEMORY, ignore_cleanup_errors=True) as folder:
        yield {VARIABLE: folder, warden.FOLDER_VARIABLE: folder}
