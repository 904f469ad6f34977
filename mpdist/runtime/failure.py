"""Failure: one rank ends the whole job, and says why.

With MPI alone the others would wait for it for ever. The order is: say it, give
the text 0.1 s to get out (MPICH's launcher may lose the last lines otherwise), end
all ranks with MPI_Abort. Under `mpdist run` leaving with the status is enough: the
warden ends the others, and prints nothing of its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import NoReturn

from mpdist.runtime.board import Board
from mpdist.runtime.completion import has_warden, record_failure
from mpdist.runtime.last_words import flush_streams, let_out, write_error

FLUSH_SECONDS = 0.1
# A rank that is not the first to fail waits so long for its death. All limits together stay below 5 s.
DEATH_SECONDS = 2.5
# How long `finally` blocks may take after an exception or a signal.
FINALLY_SECONDS = 2.5
# How long the first rank that is through after a signal waits for the others' `finally` blocks.
NEIGHBOURS_SECONDS = 1.0
ABORT_SECONDS = 1.5

PENDING_SHOWN = 4
# Of a long reason: its begin, and its end, where an error that came from another process has its cause.
REASON_BEGIN, REASON_END = 400, 250


def one_line(reason: str) -> str:
    """A reason without its line ends; of a long one not the middle."""
    text = " ".join(reason.split())
    return text if len(text) <= REASON_BEGIN + REASON_END else f"{text[:REASON_BEGIN]} ... {text[-REASON_END:]}"


class Ender:
    """Ends the job for this rank.

    Attributes:
        is_ending: the end has begun; nothing else is to be reported.
        is_disarmed: the job has ended well, or this is a forked child: nothing is to be ended any more.
    """

    def __init__(self, rank: int, size: int, board: Board, pending: Callable[[], Iterable[object]]) -> None:
        """Prepare.

        Args:
            pending: gives what this rank waits for, to be told along.
        """
        self._rank = rank
        self._size = size
        self._host = socket.gethostname()
        self._board = board
        self._pending = pending
        self._stderr = sys.stderr
        self._announced = threading.Lock()
        self._ended = threading.Lock()
        self.is_ending = False
        self.is_disarmed = False

    def announce(self, reason: str, tell: Callable[[], object] | None = None) -> bool:
        """Say why the job ends, unless another rank or thread has; returns whether it was said now.

        Args:
            reason: the rest of a sentence.
            tell: prints more, a traceback for instance, before that.
        """
        if not self._announced.acquire(blocking=False) or not self._board.claim():
            return False
        with let_out(self._stderr):
            if tell is not None:
                with contextlib.suppress(Exception):  # whatever a user's own hook does; MemoryError is one, too
                    tell()
            self._say(reason)
        record_failure()
        return True

    def end(
        self, reason: str, code: int, tell: Callable[[], object] | None = None, *, patient: bool = False
    ) -> NoReturn:
        """End the job with this exit status; `announce` tells of the other arguments.

        Args:
            patient: other ranks may have been told to end at the same time: let them run their `finally` blocks.
        """
        if not self._ended.acquire(blocking=False):
            time.sleep(DEATH_SECONDS + NEIGHBOURS_SECONDS + ABORT_SECONDS)  # another thread ends this process
            os._exit(code)
        self.is_ending = True
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        is_reporter = self.announce(reason, tell) or self._board.claim()
        self._board.leave()
        if not is_reporter:
            self._wait_for_death(reason, patient=patient)
        elif patient:
            self._board.wait_for_all(NEIGHBOURS_SECONDS)
        time.sleep(FLUSH_SECONDS)
        leave(code)

    def _wait_for_death(self, reason: str, *, patient: bool) -> None:
        """Another rank has reported, and ends this one, too."""
        if has_warden():  # which would not say anything about this rank
            time.sleep(NEIGHBOURS_SECONDS + 2 * FLUSH_SECONDS if patient else 2 * FLUSH_SECONDS)
            return
        time.sleep(DEATH_SECONDS)
        with let_out(self._stderr):
            self._say(reason)

    def announce_lost(self) -> None:
        """If a rank of this node has died without a word, say that: the launcher stops this one for its sake."""
        lost = self._board.lost()
        if lost and self._announced.acquire(blocking=False) and self._board.claim():
            how = "has died: a crash, a signal, or os._exit; the job is stopped"
            with let_out(self._stderr):
                write_error("\n".join(f"mpdist: {self._name(rank, pid)}: {how}" for rank, pid in lost))

    def announce_crash(self, how: str) -> None:
        """Say how this process dies, in one write: little can be relied on any more."""
        if self._announced.acquire(blocking=False) and self._board.claim():
            line = f"mpdist: {self._name(self._rank, os.getpid())}: {how}; the job is stopped\n"
            with contextlib.suppress(OSError):
                os.write(2, line.encode())

    def end_after(self, seconds: float, reason: str, code: int) -> threading.Timer:
        """End the job unless the timer is cancelled before."""
        timer = threading.Timer(seconds, self.end, (reason, code))
        timer.daemon = True
        timer.start()
        return timer

    def _say(self, reason: str) -> None:
        short = one_line(reason)
        lines = [f"    pending: {text}" for text in self._pending_texts()]
        write_error("\n".join([*lines, f"mpdist: {self._name(self._rank, os.getpid())}: {short}; the job is stopped"]))

    def _name(self, rank: int, pid: int) -> str:
        return f"rank {rank} of {self._size} (host {self._host}, pid {pid})"

    def _pending_texts(self) -> list[str]:
        try:
            texts = list(itertools.islice(map(str, self._pending()), PENDING_SHOWN + 1))
        except Exception:  # another thread may change what is looked at; the reason is more important
            return []
        return [*texts[:PENDING_SHOWN], "..."] if len(texts) > PENDING_SHOWN else texts


def describe_error(error: BaseException) -> str:
    """`ValueError: text`."""
    with contextlib.suppress(Exception):  # an error's own __str__ may fail
        return "".join(traceback.format_exception_only(error)).strip()
    return type(error).__name__


def leave(code: int) -> NoReturn:
    """End every rank; nothing of Python runs any more."""
    code = exit_code(code) or 1
    flush_streams()
    if has_warden():
        os._exit(code)
    _limit_abort()
    from mpdist.transport import mpi

    with contextlib.suppress(Exception):
        if mpi.is_running():
            mpi.abort(code)
    os._exit(code)


def _limit_abort() -> None:
    """Leave with status 1 if MPI_Abort hangs: launchers also end a job whose rank leaves badly.

    mpi4py holds the GIL meanwhile, so that no thread of Python's could do it; faulthandler's watchdog needs none.
    """
    with contextlib.suppress(Exception):  # no more files, or threads
        nowhere = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(ABORT_SECONDS, exit=True, file=nowhere)


def exit_code(code: object) -> int:
    """The exit status that Python makes of the argument of `sys.exit`; never 0 for a number that is not 0."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF or int(code != 0)
    return 1
