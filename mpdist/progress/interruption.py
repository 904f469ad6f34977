"""Interruption: an exception from a signal's handler, in the midst of a look at what is pending.

Python calls handlers between two bytecodes of the main thread, whatever that does: a
KeyboardInterrupt, or the TimeoutError of an alarm, comes out of a look at some operation that has
nothing to do with it. Whoever drives gets it, and the operation goes on: MPI still has its memory.

From Python 3.12 on a handler that comes where a loop jumps back under a condition (`while x:`, `for ...: if x: ...`)
raises outside of the `try` or `with` around that loop: a lock would stay taken. Such loops are functions of their own,
or end each turn with a plain statement.
"""

from __future__ import annotations

import functools
import inspect
import signal
from collections.abc import Generator
from types import CodeType
from typing import Any

# What a look runs by itself: mpdist's own code, mpi4py's, whose frames Cython adds, and NumPy's where that is Python.
_OURS = ("mpdist", "mpi4py", "numpy")


def is_interruption(error: BaseException) -> bool:
    """Whether what came out of a request's `Test` was raised by a handler, not by the request."""
    return not isinstance(error, Exception) or _innermost_package(error) not in _OURS


def is_of_handler(error: BaseException) -> bool:
    """Whether a handler of a signal has raised it, wherever that was: in code of the user's too, as unpickling runs."""
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code(handler: object) -> CodeType | None:
    """Of a function, a method, an object that can be called."""
    if isinstance(handler, functools.partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    return getattr(function, "__code__", None) or getattr(getattr(type(handler), "__call__", None), "__code__", None)  # noqa: B004  # its code is asked for


def is_over(steps: Generator[Any, Any, Any]) -> bool:
    """Whether a program cannot go on: the exception went through it, not through a look at its request."""
    return inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED


def _innermost_package(error: BaseException) -> str:
    trace = error.__traceback__
    assert trace is not None  # it was caught
    while trace.tb_next is not None:
        trace = trace.tb_next
    return str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
