"""Crash: one line that names the rank when a fault in C code (SIGSEGV and the like) kills it.

faulthandler prints the Python stack, but not which rank it is; some launchers name a
process id only, and stop the other ranks before they notice. faulthandler passes
the signal on to the handler that was there before it. We put ours there. It says the
line, puts back what was there before, and the signal comes again.

Running Python inside such a handler is not safe in general; this process is lost in any
case, its stack is out already, and the handler does next to nothing. Should it come to no end, as
where the C library has found its heap broken and holds the lock of that, an alarm ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable

from mpdist.runtime.completion import has_warden

FATAL = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)

# MPICH's launcher may lose the last lines otherwise.
FLUSH_SECONDS = 0.1

# More than a `struct sigaction` takes anywhere; its contents are no concern of ours.
_ACTION_BYTES = 512

# Then an alarm kills a process whose handler stands still.
ALARM_SECONDS = 2

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)


class Crash:
    """Our handlers, beneath faulthandler's, while installed."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        """Call `tell("crashed by SIGSEGV")` in a rank that is about to die."""
        self._tell = tell
        self._pid = os.getpid()
        self._before: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._handler = _Handler(self._on_fault)  # C code refers to it
        self._libc = ctypes.CDLL(None)

    def install(self) -> None:
        """Begin, and enable faulthandler; where the program has done so, maybe into a file, all stays as it is."""
        if faulthandler.is_enabled() and not _is_enabled_by_option():
            return
        faulthandler.disable()
        # A warden tells of the signal. MPI's own handler would print the stack by means that may stand still.
        self._put(None if has_warden() else self._handler)
        _enable_faulthandler()

    def remove(self) -> None:
        """Put back what was there before."""
        if self._before:
            faulthandler.disable()
            self._put_back()
            _enable_faulthandler()

    def _put(self, handler: object) -> None:
        """None: the system's own way, which ends the process."""
        with contextlib.suppress(AttributeError):  # a C library without sigaction
            libc = self._libc
            self._alarm, self._signal, self._sigaction = libc.alarm, libc.signal, libc.sigaction
            for number in FATAL:
                self._before[number] = ctypes.create_string_buffer(_ACTION_BYTES)
                libc.sigaction(int(number), None, self._before[number])
                libc.signal(int(number), handler)

    def _put_back(self) -> None:
        for number, action in self._before.items():
            self._libc.sigaction(int(number), action, None)
        self._before.clear()

    def _on_fault(self, number: int) -> None:
        self._signal(signal.SIGALRM, None)  # SIG_DFL is a null pointer; both before anything that may need memory
        self._alarm(ALARM_SECONDS)
        try:
            if os.getpid() == self._pid:  # a forked child is no rank
                self._tell(f"crashed by {signal.Signals(number).name}")
                time.sleep(FLUSH_SECONDS)
        finally:
            self._sigaction(number, self._before[number], None)
            signal.raise_signal(number)  # it is blocked until we return


def _enable_faulthandler() -> None:
    with contextlib.suppress(Exception):  # stderr may have no descriptor
        faulthandler.enable()


def _is_enabled_by_option() -> bool:
    """Whether it writes to stderr, as by `-X faulthandler`."""
    return "faulthandler" in sys._xoptions or sys.flags.dev_mode or bool(os.environ.get("PYTHONFAULTHANDLER"))
