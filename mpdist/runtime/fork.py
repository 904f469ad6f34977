"""Fork: only the process that the launcher started may communicate.

A forked child has a copy of everything, but MPI does not survive the fork: there
all is disarmed, so that DataLoader workers and `multiprocessing` do no harm. A
spawned child (or any other program that is started) inherits the launcher's
variables, and would start MPI in the place of its parent's rank: it is refused
before. The first rank leaves its process id in MPDIST_OWNER for that.
"""

from __future__ import annotations

import atexit
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any, NoReturn

from mpdist.errors import UsageError
from mpdist.progress.engine import Engine
from mpdist.progress.ticking import Ticking
from mpdist.progress.work import Work
from mpdist.runtime.failure import exit_code
from mpdist.runtime.last_words import flush_streams
from mpdist.transport.facts import launched_as

OWNER_VARIABLE = "MPDIST_OWNER"

_disarm: Callable[[], None] | None = None

# A child has the parent's handlers, pipes and stores until it is disarmed: a pool that is closed at once sends
# SIGTERM to a worker that has not come so far, and would end the parent's job.
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class ForkedEngine(Engine):
    """The Engine in a forked child: it never touches MPI."""

    refusal = ""

    def _refuse(self, *_: object, **__: object) -> Any:
        raise UsageError(self.refusal)

    drive = drive_inline = drive_while = wait = _refuse

    def look(self) -> None:
        """Nothing is driven."""


class ForkedTicking(Ticking):
    """No loop drives there."""

    def park(self, work: Work[Any]) -> Generator[Any, None, None]:
        """Raise what every operation there raises."""
        self._engine.drive()
        yield

    def ensure(self) -> None:
        """Nothing is driven."""

    def _tick(self) -> None:
        """Nothing is driven."""


def disarm_engine(engine: Engine, refusal: str) -> None:
    """Let every operation of this copy of the Engine raise an error with this text."""
    engine.__class__ = ForkedEngine
    engine.ticking.__class__ = ForkedTicking
    engine.shared = None  # `comm.empty` would hand out the parent's memory
    engine.refusal = refusal  # type: ignore[attr-defined]  # of the new class
    for channel in list(engine.channels):
        channel.refuse(refusal)


def on_fork(disarm: Callable[[], None] | None) -> None:
    """Call this in every forked child from now on, before a signal that ends jobs can reach it."""
    global _disarm
    _disarm = disarm


class _Forking(threading.local):
    """Of each fork that this thread is in, for one hook may fork again: the signals that were blocked before."""

    def __init__(self) -> None:
        self.blocked: list[set[signal.Signals] | None] = []


_forking = _Forking()


def _before() -> None:
    _forking.blocked.append(None if _disarm is None else signal.pthread_sigmask(signal.SIG_BLOCK, ()))  # type: ignore[arg-type]  # or numbers
    if _disarm is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # a handler may raise in here: what was blocked is known


def _unblock() -> None:
    blocked = _forking.blocked.pop() if _forking.blocked else None  # a handler may have raised before it was known
    if blocked is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _in_child() -> None:
    try:
        if _disarm is not None:
            _disarm()
    finally:
        _unblock()


os.register_at_fork(before=_before, after_in_parent=_unblock, after_in_child=_in_child)


def prevent_finalize(status: Callable[[], object]) -> None:
    """Let this forked child end before mpi4py calls MPI_Finalize at the very end: that breaks the parent's job.

    Args:
        status: gives the argument of `sys.exit`, if that was called.
    """

    def leave() -> NoReturn:
        atexit.unregister(leave)
        atexit._run_exitfuncs()
        flush_streams()
        has_failed = hasattr(sys, "last_value")  # set when the traceback of an uncaught exception is printed
        os._exit(exit_code(status()) or int(has_failed))

    atexit.register(leave)


def mark_owner() -> None:
    """This process is the rank; programs that it starts are not."""
    if launched_as(os.environ) is not None:
        os.environ[OWNER_VARIABLE] = f"{os.getpid()} {_job_name(os.environ)}"


def refuse_child() -> None:
    """Check that this process is not a child of a rank; before MPI starts.

    Raises:
        UsageError: it is.
    """
    launched = launched_as(os.environ)
    if launched is None or not _is_child(os.environ):
        return
    raise UsageError(
        f"mpdist was started in a process that rank {launched.rank} of {launched.size} has itself started (by spawn, "
        "subprocess, ...): it has the launcher's variables of that rank, and MPI would take it for the same rank. "
        "Communicate in the rank itself, and hand the data over. A worker (of a DataLoader, of a pool) that is spawned "
        'runs the script once more: write what is for the rank alone under `if __name__ == "__main__":`'
    )


def _is_child(environ: Mapping[str, str]) -> bool:
    workers = sys.modules.get("multiprocessing.process")  # loaded in every process that multiprocessing has started
    if workers is not None and workers.parent_process() is not None:
        return True
    owner, _, job = environ.get(OWNER_VARIABLE, "").partition(" ")
    return owner not in ("", str(os.getpid())) and _job_name(environ) in (job, "")


def _job_name(environ: Mapping[str, str]) -> str:
    """What tells this job from one that is started inside it; empty if unknown."""
    if "PMIX_NAMESPACE" in environ:
        return environ["PMIX_NAMESPACE"]
    try:  # hydra numbers nothing, but each of its ranks has a socket to it
        status = os.fstat(int(environ["PMI_FD"]))
    except (KeyError, ValueError, OSError):
        return ""
    return str(status.st_ino) if stat.S_ISSOCK(status.st_mode) else ""
