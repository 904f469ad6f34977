"""Unstarted: a rank of `mpdist run` that fails while MPI runs, and mpdist does not.

Who imports mpi4py starts MPI, as Lightning does in `Trainer()`; mpi4py ends it when Python ends, and MPI waits there
for all ranks. Where an exception has ended the program of one the others never come: so it leaves at once, and
`mpdist run` ends the job.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys


def watch() -> None:
    """Have this process looked at when it ends, if `mpdist run` has started it."""
    if os.environ.get("MPDIST_COMPLETION_PID") == str(os.getpid()):
        atexit.register(_leave_if_failed, os.getpid())


def _leave_if_failed(pid: int) -> None:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not hasattr(sys, "last_value") or os.getpid() != pid:
        return
    if mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # None, closed, or nobody reads it
                stream.flush()
        os._exit(1)
