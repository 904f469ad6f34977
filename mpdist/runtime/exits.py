"""Exits: which exit status this process is about to have.

Python does not tell: when atexit handlers run, the SystemExit is gone. So
`sys.exit`, `exit` and `quit` raise a SystemExit of our own, which looks around when
it dies. With no Python code beneath it the interpreter has taken it, and ends; else
the program has caught it, and goes on.

`raise SystemExit(n)`, spelled out, is seen only where it leaves `mpdist.run`.
Elsewhere its rank takes part in the final agreement like one that has finished.
"""

from __future__ import annotations

import builtins
import sys
import weakref
from types import ModuleType, TracebackType
from typing import NoReturn

_left: object = None
_latest: weakref.ref[Exit] | None = None
_replaced: list[tuple[ModuleType, str, object]] = []


class Exit(SystemExit):
    """A SystemExit that tells when the interpreter takes it."""

    def __init__(self, code: object = None) -> None:
        global _latest
        super().__init__(code)
        _latest = weakref.ref(self)

    def __del__(self) -> None:
        global _left
        if sys._getframe().f_back is None:
            _left = self.code


def leave(status: object = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status)."""
    raise Exit(status)


def install() -> None:
    """Let `sys.exit`, `exit` and `quit` be ours."""
    _replace(sys, "exit")
    for name in ("exit", "quit"):
        if type(getattr(builtins, name, None)).__name__ == "Quitter":  # IPython has its own
            _replace(builtins, name)


def remove() -> None:
    """Let them be as they were."""
    while _replaced:
        module, name, original = _replaced.pop()
        if getattr(module, name, None) is leave:
            setattr(module, name, original)


def _replace(module: ModuleType, name: str) -> None:
    original = getattr(module, name)
    if original is not leave:
        _replaced.append((module, name, original))
        setattr(module, name, leave)


def status() -> object:
    """What the running exit was called with, for atexit handlers; None for a normal end, or if unknown."""
    if _left is not None:
        return _left
    # It may still be alive where its traceback refers to itself, as after `asyncio.run`.
    latest = None if _latest is None else _latest()
    if latest is not None and _was_left_behind(latest.__traceback__):
        return latest.code
    return None


def _was_left_behind(trace: TracebackType | None) -> bool:
    """Whether the last function that could have caught an exception did not.

    A traceback begins with that function; if it went on, it has left the instruction since.
    """
    return trace is not None and trace.tb_frame.f_lasti == trace.tb_lasti
