"""Hooks: exceptions that nobody catches end the job.

In the main thread, in any other thread, in a task of `mpdist.run` that nobody
awaits, and in a callback of its event loop.

asyncio reports a task that has failed when it is collected, so never while the program
refers to it. Whoever does may still look at it: at the end of the job, nobody will.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from types import TracebackType
from typing import Any

from mpdist.runtime.failure import Ender, describe_error

INTERRUPT = ("KeyboardInterrupt (SIGINT)", 130)
"""Reason and status."""


class Hooks:
    """Python's hooks for uncaught exceptions, while installed."""

    def __init__(self, ender: Ender) -> None:
        self._ender = ender
        self._before = sys.excepthook
        self._before_in_threads = threading.excepthook
        self._loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()

    def install(self) -> None:
        """Put ours in front of those that are there."""
        sys.excepthook = self._on_error
        threading.excepthook = self._on_thread_error

    def remove(self) -> None:
        """Put those before back, unless others have come since; then ours pass everything on."""
        if sys.excepthook == self._on_error:
            sys.excepthook = self._before
        if threading.excepthook == self._on_thread_error:
            threading.excepthook = self._before_in_threads

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let what fails in this loop end the job."""
        self._loops.add(loop)
        loop.set_exception_handler(self.on_loop_error)

    def report_forgotten_tasks(self) -> None:
        """The job is about to end well: a task whose error nobody has looked at prevents that."""
        for task in _forgotten_tasks():
            loop = task.get_loop()
            if loop in self._loops:
                what = "Task exception was never retrieved"  # asyncio's words for the same
                self.on_loop_error(loop, {"message": what, "exception": task.exception(), "task": task})

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Exception handler of the event loop.

        Errors of transports and of bare futures are logged, as asyncio does: libraries handle them otherwise.
        """
        error = context.get("exception")
        task = context.get("task") or context.get("future")
        is_ours = isinstance(task, asyncio.Task) or "handle" in context
        if error is None or not is_ours or self._ender.is_disarmed:
            loop.default_exception_handler(context)
            return
        where = f"in task {task.get_name()!r}" if isinstance(task, asyncio.Task) else "in a callback"
        self._ender.end(f"{describe_error(error)} ({where})", 1, lambda: loop.default_exception_handler(context))

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, /) -> None:
        if self._ender.is_disarmed:
            self._before(kind, error, trace)
        elif isinstance(error, KeyboardInterrupt):
            self._ender.end(*INTERRUPT, patient=True)
        else:
            self._ender.end(describe_error(error), 1, lambda: self._before(kind, error, trace))

    def _on_thread_error(self, args: threading.ExceptHookArgs, /) -> None:
        error = args.exc_value
        if isinstance(error, SystemExit):  # ends the thread; Python's own hook knows only the class itself
            return
        if self._ender.is_disarmed or error is None:
            self._before_in_threads(args)
            return
        name = "" if args.thread is None else f" {args.thread.name!r}"
        self._ender.end(f"{describe_error(error)} (in thread{name})", 1, lambda: self._before_in_threads(args))


def _forgotten_tasks() -> list[asyncio.Task[Any]]:
    """Tasks that have failed, and that the program refers to without having asked for the error."""
    tasks = [each for each in gc.get_objects() if issubclass(type(each), asyncio.Task)]
    return [task for task in tasks if task.done() and getattr(task, "_log_traceback", False)]
