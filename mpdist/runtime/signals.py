"""Signals: SIGTERM, SIGHUP and Ctrl-C end the job, after the `finally` blocks.

SIGTERM and SIGHUP become a SystemExit in the main thread, as SIGINT becomes a
KeyboardInterrupt. Python runs its handlers between two bytecodes, so a long call of
C code, or a `finally` block that waits for another rank, would hold the end up.
faulthandler's handler runs at once: it writes into a pipe, on which a
thread waits that ends the job some time later in any case.

If the launcher is killed the kernel sends SIGTERM (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import selectors
import signal
import sys
import threading
import time
import traceback
from types import FrameType
from typing import NoReturn

from mpdist.debug.uncollected import uncollected
from mpdist.runtime.crash import Crash
from mpdist.runtime.failure import FINALLY_SECONDS, Ender

_TERMINATING = (signal.SIGTERM, signal.SIGHUP)

_SET_PARENT_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG, PR_GET_PDEATHSIG
_GET_PARENT_SIGNAL = 2


class Terminated(SystemExit):
    """SIGTERM or SIGHUP has come."""


class Signals:
    """The handlers, while installed. A signal for which the program has its own handler is left to it.

    Attributes:
        reason: why the process ends, once SIGTERM or SIGHUP has come; else empty.
    """

    def __init__(self, ender: Ender) -> None:
        self._ender = ender
        self._crash = Crash(ender.announce_crash)
        self._parent = os.getppid()
        self._watched: dict[int, tuple[int, int]] = {}
        self._status = 0
        self.reason = ""

    def install(self) -> None:
        """Begin; only the main thread can."""
        self._crash.install()
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _TERMINATING:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self._on_term)
                self._watch(number)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._watch(signal.SIGINT)
        if self._watched:
            pipes = {read: number for number, (read, _) in self._watched.items()}
            threading.Thread(target=self._limit, args=(pipes,), name="mpdist-signals", daemon=True).start()

    def rearm(self) -> None:
        """Watch SIGINT again where asyncio has set its own handler, or taken it away; one of the program's stays."""
        if signal.SIGINT not in self._watched or threading.current_thread() is not threading.main_thread():
            return
        if _interrupts(signal.getsignal(signal.SIGINT)):
            self._register(signal.SIGINT)

    def remove(self) -> None:
        """Put back what was there before."""
        self._crash.remove()
        for number, (_, write) in self._watched.items():
            _unregister(number)  # first: nothing is to write there any more
            os.close(write)  # ends the thread
        self._watched.clear()
        with contextlib.suppress(ValueError):  # not the main thread: then ours does nothing any more
            for number in _TERMINATING:
                if signal.getsignal(number) == self._on_term:
                    signal.signal(number, signal.SIG_DFL)

    def _watch(self, number: int) -> None:
        read, write = os.pipe()
        os.set_blocking(write, False)
        self._watched[number] = (read, write)
        self._register(number)

    def _register(self, number: int) -> None:
        faulthandler.unregister(number)
        faulthandler.register(number, self._watched[number][1], all_threads=False, chain=True)

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        if self._ender.is_disarmed or self._ender.is_ending or self.reason:
            return
        self._status = _status(number)
        self.reason = signal.Signals(number).name if os.getppid() == self._parent else "its launcher is gone"
        # Open MPI's launcher sends SIGKILL 0.2 s later: say it now.
        self._ender.announce_lost()
        self._ender.announce(self.reason)
        raise Terminated(self._status)

    def end(self) -> NoReturn:
        """End the job for that; the `finally` blocks have run."""
        self._ender.end(self.reason, self._status, patient=True)

    def _limit(self, pipes: dict[int, int]) -> None:
        """In a thread of its own: wait for a signal, then for the end, but not for long."""
        with selectors.DefaultSelector() as selector:  # select() refuses descriptors above 1023
            for read in pipes:
                selector.register(read, selectors.EVENT_READ)
            ready = [key.fd for key, _ in selector.select()]
        numbers = [pipes[read] for read in ready if os.read(read, 1 << 16)]
        if numbers:
            time.sleep(FINALLY_SECONDS)
        if numbers and not self._ender.is_disarmed:
            code = _status(numbers[0])
            name = signal.Signals(numbers[0]).name
            self._ender.end(f"{name}, and it has not ended within {FINALLY_SECONDS:g} s", code, _print_main_stack)
        for read in pipes:
            os.close(read)


def _status(number: int) -> int:
    """What a shell shows."""
    return 128 + number


def _interrupts(handler: object) -> bool:
    """Whether it is Python's own, or the one that asyncio.Runner puts in its place."""
    name = getattr(getattr(handler, "func", None), "__qualname__", "")  # of a functools.partial
    return handler is signal.default_int_handler or name == "Runner._on_sigint"


def _unregister(number: int) -> None:
    """faulthandler puts back what was there when it began; what the program has set since stays, instead."""
    now = signal.getsignal(number)
    faulthandler.unregister(number)
    if now in (signal.SIG_IGN, signal.SIG_DFL):
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(number, now)


@uncollected
def _print_main_stack() -> None:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    print("It is here:", *traceback.format_stack(frame), sep="\n", end="", file=sys.stderr)


def end_with_launcher() -> None:
    """Let the kernel send SIGTERM when the process that started this one is gone, unless it does something already."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is None:
        return
    current = ctypes.c_int(0)
    prctl(_GET_PARENT_SIGNAL, ctypes.byref(current))
    if current.value == 0:
        prctl(_SET_PARENT_SIGNAL, int(signal.SIGTERM))
