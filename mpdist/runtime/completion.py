"""Completion record: what a rank tells the warden that `mpdist run` has put above it.

An exit status can't prove that a rank finished its work: `os._exit(0)` in the
middle leaves with 0. So the rank writes words into a pipe that its warden
holds: it is about to start MPI, it starts mpdist, mpdist has started, it has explained its
failure, all ranks agreed that the job is finished. Without `mpdist run` there is no pipe, and nothing happens.
Only the process that the warden started may write: forked and spawned children
inherit the variables, but not the process id in them.
"""

from __future__ import annotations

import os
import stat

FD_VARIABLE = "MPDIST_COMPLETION_FD"
PID_VARIABLE = "MPDIST_COMPLETION_PID"


def record_attempt() -> None:
    """This rank is about to start MPI, which waits for all ranks."""
    _record(b"init")


def record_start() -> None:
    """mpdist starts on this rank: from now on only `record_completion` makes it successful."""
    _record(b"used")


def record_opening() -> None:
    """The start of mpdist is over: what ends this rank from now on is not what kept mpdist from starting."""
    _record(b"open")


def record_failure() -> None:
    """This rank has printed why it ends the job, so that nobody needs to say it again.

    The job is stopped 3 s later if it has not ended by then.
    """
    _record(b"told")


def record_completion() -> None:
    """All ranks agreed that the job is finished."""
    _record(b"done")


def has_warden() -> bool:
    """Whether a warden stands above this process, so that its exit status alone ends the job."""
    return _pipe() is not None


def _record(word: bytes) -> None:
    fd = _pipe()
    if fd is not None:
        os.set_inheritable(fd, False)
        os.write(fd, word)


def _pipe() -> int | None:
    """The warden's pipe, if this process is its rank and has not closed it."""
    if os.environ.get(PID_VARIABLE) != str(os.getpid()):
        return None
    try:
        fd = int(os.environ[FD_VARIABLE])
        return fd if stat.S_ISFIFO(os.fstat(fd).st_mode) else None
    except (KeyError, ValueError, OSError):
        return None
