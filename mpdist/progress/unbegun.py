"""Unbegun: Works that asyncio has wrapped in a task which has not begun yet.

`ensure_future`, `gather`, `wait_for` and the like wrap a Work in a task. A task
that is cancelled before its first step never comes to the Work's `__await__`, so
nobody tells the Work: a receive would stay posted and swallow a message. No
reference dies with the task either, its error's traceback holds the Work. But
asyncio asks `isfuture(work)` before it wraps: there the Work is marked, and one
turn of the loop after the task's first step whoever still bears the mark is given
up, as a cancelled await gives it up.

The mark is a class, so that an await that nobody has marked pays nothing.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Generator
from types import FrameType
from typing import Any

from mpdist.progress.work import T, Work

_WRAPPERS = {
    getattr(asyncio.tasks, name).__code__
    for name in ("ensure_future", "_ensure_future")  # Python 3.11 has both, later ones the first
    if hasattr(asyncio.tasks, name)
}


class Wrapped(Work[T]):
    """A Work that may be lost by a task that never begins."""

    _mark: object = None

    @property
    def _asyncio_future_blocking(self) -> None:
        """None: it is no Future. Asked by `asyncio.isfuture`, before a Work is wrapped."""
        loop = _wrapping_loop(sys._getframe(1))
        if loop is not None:
            self._watch(loop)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._mark = mark = object()
        if not issubclass(type(self), Unbegun):
            self.__class__ = _unbegun(type(self))  # type: ignore[arg-type]  # classes are hashable
        # Called before the task's first step is scheduled: so it comes before that, and what it schedules after it.
        loop.call_soon(loop.call_soon, self._check_begun, mark)

    def _check_begun(self, mark: object) -> None:
        if self._mark is mark and isinstance(self, Unbegun):
            self._begin()
            self._abandon()


class Unbegun(Wrapped[Any]):
    """The same, marked."""

    _unmarked: type[Wrapped[Any]]

    def __await__(self) -> Generator[Any, None, Any]:
        self._begin()
        return self.__await__()

    def _begin(self) -> None:
        self.__class__ = self._unmarked  # type: ignore[assignment]  # the class that it had


@functools.cache
def _unbegun(kind: type[Wrapped[Any]]) -> type[Wrapped[Any]]:
    return type(kind.__name__, (Unbegun, kind), {"_unmarked": kind})


def _wrapping_loop(isfuture: FrameType) -> asyncio.AbstractEventLoop | None:
    """The running loop, if `isfuture` was called to wrap a Work in a task of it; None else."""
    caller = isfuture.f_back
    loop = asyncio._get_running_loop()
    if caller is None or caller.f_code not in _WRAPPERS or loop is None:
        return None
    return loop if caller.f_locals.get("loop") in (None, loop) else None
