"""Interruptions: a signal whose handler raises, sent at each place in turn at which CPython calls handlers.

These are where a function begins, where a loop jumps back, and after each call of
what is not Python.
"""

from __future__ import annotations

import dis
import signal
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

CALLS = ("CALL", "CALL_KW", "CALL_FUNCTION_EX")


class Interrupted(Exception):
    """By the handler."""


class Interruptions:
    """Within `with`, the signal is sent at the place of this number, counted from where it starts.

    Attributes:
        left: so many places come before; less than 0: it was sent.
    """

    def __init__(self, number: int, folder: str, files: Collection[str]) -> None:
        """Count places in these files of a folder of the package."""
        self.left = number
        self._folder = folder
        self._files = files
        self._before = sys.gettrace()
        self._calls: dict[FrameType, bool] = {}

    def __enter__(self) -> None:
        sys.settrace(self._begins)

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        sys.settrace(self._before)

    def _begins(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_back in self._calls:
            self._calls[frame.f_back] = False  # what was called is Python
        path = Path(frame.f_code.co_filename)
        if path.parent.name != self._folder or "mpdist" not in path.parts or path.stem not in self._files:
            return None
        frame.f_trace = self._goes_on  # from Python 3.12 on f_trace_opcodes has an effect only where there is one
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        self._reached()
        return self._goes_on

    def _goes_on(self, frame: FrameType, event: str, argument: object) -> Any:
        if event != "opcode":
            self._calls.pop(frame, None)
            return self._goes_on
        if self._calls.pop(frame, False):
            self._reached()
        name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if name in CALLS:
            self._calls[frame] = True
        elif name.startswith(("JUMP_BACKWARD", "POP_JUMP_BACKWARD")):
            self._reached()
        return self._goes_on

    def _reached(self) -> None:
        if self.left == 0:
            sys.settrace(None)
            self.left = -1
            signal.raise_signal(signal.SIGUSR2)
        elif self.left > 0:
            self.left -= 1


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
