"""Exits: which exit status this process is about to have.

Python does not tell: when atexit handlers run, the SystemExit is gone. So
`sys.exit`, `exit` and `quit` raise a SystemExit of our own, which looks around when
it dies. With no Python code beneath it in the main thread the interpreter has taken it,
and ends; else the program has caught it, and goes on. Later, in atexit handlers and while
modules are torn down, a SystemExit changes nothing any more.

`raise SystemExit(n)`, spelled out, is of Python's own class. But before the
interpreter takes what has left a script it flushes stderr: there we look for an
exception that nobody else holds. It does not do so for a program started by `-m` or
`-c`: there such a rank takes part in the final agreement like one that has finished,
unless the exception passes `mpdist.run`.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import gc
import sys
import threading
import weakref
from types import FrameType, GeneratorType, TracebackType
from typing import NamedTuple, NoReturn, Protocol


class Left(NamedTuple):
    """What has left the program; not the exception itself, whose death tells something."""

    name: str
    code: object


_left: Left | None = None
_latest: weakref.ref[Exit] | None = None
_replaced: list[tuple[object, str, object]] = []


class Exit(SystemExit):
    """A SystemExit that tells when the interpreter takes it."""

    def __init__(self, code: object = None) -> None:
        global _latest
        super().__init__(code)
        if threading.main_thread().is_alive():
            _latest = weakref.ref(self)

    def __del__(self) -> None:
        global _left
        if sys is None or sys.is_finalizing():  # all globals may be None by now
            return
        if sys._getframe().f_back is None and _is_in_program():
            _left = _described(self)


def leave(code: object = None) -> NoReturn:
    """Exit the interpreter by raising SystemExit(code); `exit` and `quit` take it by this name, too."""
    raise Exit(code)


class _Stream(Protocol):
    def flush(self) -> None: ...


class Flush:
    """In the place of a stream's method: looks around when the interpreter itself calls it."""

    def __init__(self, stream: _Stream) -> None:
        self._flush = stream.flush

    def __call__(self) -> None:
        global _left
        if sys._getframe().f_back is None and _is_in_program():
            error = _held_by_the_interpreter()
            _left = _left if error is None else _described(error)
        self._flush()


def install() -> None:
    """Let `sys.exit`, `exit`, `quit` and stderr's `flush` be ours."""
    _replace(sys, "exit", leave)
    for name in ("exit", "quit"):
        if type(getattr(builtins, name, None)).__name__ == "Quitter":  # IPython has its own
            _replace(builtins, name, leave)
    if sys.stderr is not None:
        with contextlib.suppress(AttributeError):  # a stream of a kind that takes no attributes
            _replace(sys.stderr, "flush", Flush(sys.stderr))


def remove() -> None:
    """Let them be as they were."""
    while _replaced:
        home, name, original = _replaced.pop()
        if isinstance(getattr(home, name, None), Flush):
            delattr(home, name)
        elif getattr(home, name, None) is leave:
            setattr(home, name, original)


def _replace(home: object, name: str, ours: object) -> None:
    original = getattr(home, name)
    if original is not leave and not isinstance(original, Flush):
        setattr(home, name, ours)
        _replaced.append((home, name, original))


def status() -> object:
    """What the running exit was called with, for atexit handlers; None for a normal end, or if unknown."""
    left = _ending()
    return None if left is None else left.code


def words() -> str:
    """`sys.exit(3)`, or `SystemExit(3)` where it was raised without it."""
    left = _ending()
    return "" if left is None else f"{left.name}({left.code!r})"


def uncaught() -> BaseException | None:
    """The exception that has left the program, whatever hook has been told of it."""
    error = getattr(sys, "last_value", None)  # also after one in a console, or in a callback of C code
    trace = getattr(error, "__traceback__", None)
    if trace is None or not _was_left_behind(trace):
        return None
    code = trace.tb_frame.f_code
    is_typed = code.co_filename.startswith(("<console", "<input", "<python-input"))
    is_programs = code.co_name == "<module>" and not is_typed
    return error if is_programs or code.co_name == "_run_module_as_main" else None


def _ending() -> Left | None:
    if _left is not None:
        return _left
    # It may still be alive where its traceback refers to itself, as after `asyncio.run`.
    latest = None if _latest is None else _latest()
    return _described(latest) if latest is not None and _was_left_behind(latest.__traceback__) else None


def _described(error: SystemExit) -> Left:
    return Left("sys.exit" if isinstance(error, Exit) else "SystemExit", error.code)


def _is_in_program() -> bool:
    """Whether the program's main thread runs this: atexit handlers come after it has ended, in the same thread."""
    main = threading.main_thread()
    return main.is_alive() and main.ident == threading.get_ident()


def _was_left_behind(trace: TracebackType | None) -> bool:
    """Whether the last function that could have caught an exception did not.

    A traceback begins with that function; if it went on, it has left the instruction since.
    """
    return trace is not None and trace.tb_frame.f_lasti == trace.tb_lasti


def _held_by_the_interpreter() -> SystemExit | None:
    """The SystemExit that is on its way out: beside the functions that it left, no Python object refers to it."""
    if not _exceptions():
        return None
    gc.collect()  # those that were caught earlier may live on in cycles
    found = _exceptions()
    for error in found:
        holders = gc.get_referrers(error)
        if all(each is found or isinstance(each, FrameType) or _is_left_task(each, holders) for each in holders):
            return error
    return None


def _is_left_task(holder: object, but: object) -> bool:
    """Whether it is a task that nobody refers to, `but` apart, beside functions that were left, and asyncio.

    Newer versions of Python keep in it what `asyncio.run` raises.
    """
    if not isinstance(holder, asyncio.Task):
        return False
    for each in gc.get_referrers(holder):
        is_asyncios = (
            type(each).__name__ == "TaskStepMethWrapper"
            or getattr(each, "__self__", None) is holder  # what a future of C is to call
            or (isinstance(each, dict) and each.keys() == {"main_task"})  # of the handler of SIGINT
        )
        if not is_asyncios and each is not but and not isinstance(each, FrameType | GeneratorType):
            return False
    return True


def _exceptions() -> list[SystemExit]:
    return [each for each in gc.get_objects() if issubclass(type(each), SystemExit)]
