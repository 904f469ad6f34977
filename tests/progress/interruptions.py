"""Interruptions: a signal whose handler raises, sent at each place in turn at which CPython calls handlers.

These are where a function begins, where a loop jumps back, and after each call of
what is not Python, in some files of mpdist and where NumPy has functions of Python.
"""

from __future__ import annotations

import _thread
import dis
import signal
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache, partial
from operator import methodcaller
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

CALLS = ("CALL", "CALL_KW", "CALL_FUNCTION_EX")
JUMPS_BACK = ("JUMP_BACKWARD", "POP_JUMP_BACKWARD")

# Those of NumPy which look for one of their arguments' type begin in Python, before they do anything.
NUMPY_FUNCTIONS = ("numpy", "_core", "multiarray.py")

# A wait looks again and again whether others have come: who is interrupted there for the fifth time learns nothing new.
VISITS = 4


class Interrupted(Exception):
    """By the handler."""


class Places:
    """Of one function, where CPython calls handlers.

    Attributes:
        calls: offsets of the instructions after which it does so, if they call what is not Python.
        jumps: offsets of those before which it does so.
        visits: how often each place was reached.
    """

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.calls, self.jumps = _offsets(code)
        self.visits: Counter[int] = Counter()


@cache
def _offsets(code: CodeType) -> tuple[set[int], set[int]]:
    names = {found.offset: found.opname for found in dis.get_instructions(code)}
    calls = {offset for offset, name in names.items() if name in CALLS}
    return calls, {offset for offset, name in names.items() if name.startswith(JUMPS_BACK)}


class Interruptions:
    """Within `with`, the signal is sent at the place of this number, counted from where it starts.

    Attributes:
        left: so many places come before; less than 0: it was sent.
    """

    def __init__(self, number: int, folder: str, files: Collection[str]) -> None:
        """Count places in these files of a folder of the package, and in NumPy."""
        self.left = number
        self._folder = folder
        self._files = files
        self._before = sys.gettrace()
        # By the addresses of their code, which they keep: its hash takes long.
        self._places: dict[int, Places] = {}
        self._others: dict[int, CodeType] = {}
        # Frames that have called something, and where; what that is is not known yet.
        self._calling: dict[FrameType, int] = {}

    def __enter__(self) -> None:
        if self.left >= 0:
            sys.settrace(self._begins)

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        sys.settrace(self._before)

    def _begins(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_back is not None:
            self._calling.pop(frame.f_back, None)  # what was called is Python
        places = self._places_of(frame.f_code)
        if places is None:
            return None
        frame.f_trace = self._goes_on  # from Python 3.12 on f_trace_opcodes has an effect only where there is one
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        self._reached(places, -1)
        return self._goes_on

    def _goes_on(self, frame: FrameType, event: str, argument: object) -> Any:
        called_at = self._calling.pop(frame, None) if self._calling else None
        if event != "opcode":
            return self._goes_on
        places = self._places[id(frame.f_code)]
        if called_at is not None:
            self._reached(places, called_at)
        offset = frame.f_lasti
        if offset in places.calls:
            self._calling[frame] = offset
        elif offset in places.jumps:
            self._reached(places, offset)
        return self._goes_on

    def _places_of(self, code: CodeType) -> Places | None:
        """None of a function that is not counted."""
        known = self._places.get(id(code))
        if known is not None or id(code) in self._others:
            return known
        path = Path(code.co_filename)
        is_own = path.parent.name == self._folder and "mpdist" in path.parts and path.stem in self._files
        if is_own or path.parts[-3:] == NUMPY_FUNCTIONS:
            known = self._places[id(code)] = Places(code)
        else:
            self._others[id(code)] = code
        return known

    def _reached(self, places: Places, offset: int) -> None:
        places.visits[offset] += 1
        if places.visits[offset] > VISITS:
            return
        if self.left == 0:
            sys.settrace(None)
            self.left = -1
            signal.raise_signal(signal.SIGUSR2)
        elif self.left > 0:
            self.left -= 1


class Pending:
    """`come` makes the signal pending; its handler runs at the next place, for no Python is called by this."""

    send = staticmethod(partial(_thread.interrupt_main, signal.SIGUSR2))
    come = property(methodcaller("send"))


@contextmanager
def raising() -> Iterator[None]:
    """Within, the signal's handler raises Interrupted."""

    def raises(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR2, raises)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, before)
