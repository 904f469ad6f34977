"""Waiting: where this process's Python is, and for which operations it waits.

Read from outside, by another thread, from the frames of all threads and the tasks
of the event loop. Nobody pays for it until it is asked.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any

from mpdist.debug.lines import describe, is_users, outward
from mpdist.progress.collective import Collective
from mpdist.progress.engine import Engine
from mpdist.runtime import finish
from mpdist.runtime.watch import snapshot

if TYPE_CHECKING:
    from mpdist.progress.work import Work

_WAIT = Engine.drive_while.__code__
_DRAINING = (finish.drain.__code__, finish.agree.__code__)
_PARK = f"{Engine.park.__qualname__}.<locals>.wake"

# asyncio's modules in which a task waits for other tasks only, but for the functions that wait for the clock.
_FOR_TASKS = ("asyncio/taskgroups.py", "asyncio/locks.py", "asyncio/queues.py", "asyncio/tasks.py")
_FOR_THE_CLOCK = ("sleep",)


@dataclass(frozen=True)
class Waiter:
    """Somebody who waits for an operation.

    Attributes:
        place: line at which it waits.
    """

    work: Work[Any]
    place: str


@dataclass
class Waits:
    """What this process waits for.

    Attributes:
        surely: waits that nothing but their operation ends: of the main task or thread, or in a collective.
        together: where no task waits for anything but operations and other tasks: all those operations.
    """

    surely: list[Waiter] = field(default_factory=list)
    together: list[Waiter] = field(default_factory=list)


def place(engine: Engine) -> str:
    """`train.py:36 in load_batch: time.sleep(60)`: where the main thread, or the main task, is."""
    loop = _running_loop(engine)
    frames = sys._current_frames()
    if loop is None:
        return _line_of_thread(frames.get(_main_thread()))
    current = frames.get(engine._loop_thread)
    if asyncio.current_task(loop) is None:
        task = _main_task(current)
        if task is not None:
            chain = list(_awaited(task))
            if chain:
                return describe(reversed(chain))
    return describe(outward(current))


def _line_of_thread(frame: FrameType | None) -> str:
    """Its line; the user's program may have come to its end."""
    frames = list(outward(frame))
    if not any(each.f_code in _DRAINING for each in frames):
        return describe(frames)
    return (
        f"{describe(frames)}, in the final drain" if is_users(frames) else "the end of its program, in the final drain"
    )


def awaited(engine: Engine) -> list[Work[Any]]:
    """For which operations this process waits: of the main thread or task, else of all tasks."""
    frames = sys._current_frames()
    waiter = _waiting_thread(frames.get(_main_thread()))
    if waiter is not None:
        return [waiter.work]
    loop = _running_loop(engine)
    if loop is None or asyncio.current_task(loop) is not None:
        return []
    tasks = _Tasks(engine, loop)
    main_task = _main_task(frames.get(engine._loop_thread))
    return [tasks.works[main_task]] if main_task in tasks.works else list(tasks.works.values())


def waits(engine: Engine) -> Waits:
    """For which operations this process waits, and what could end that."""
    found = Waits()
    frames = sys._current_frames()
    main = _main_thread()
    for thread, frame in frames.items():
        waiter = _waiting_thread(frame)
        if waiter is not None and (thread == main or isinstance(waiter.work, Collective)):
            found.surely.append(waiter)
    loop = _running_loop(engine)
    if loop is None or asyncio.current_task(loop) is not None:
        return found
    tasks = _Tasks(engine, loop)
    main_task = _main_task(frames.get(engine._loop_thread))
    if not tasks.works or (main_task is not None and tasks.has_deadline(main_task)):
        return found
    for task, work in tasks.works.items():
        if not tasks.has_deadline(task) and (task is main_task or isinstance(work, Collective)):
            found.surely.append(Waiter(work, _line(task)))
    if not any(tasks.may_go_on(task) for task in tasks.all):
        found.together = [Waiter(work, _line(task)) for task, work in tasks.works.items()]
    return found


def _main_thread() -> int:
    return threading.main_thread().ident or 0


def _running_loop(engine: Engine) -> asyncio.AbstractEventLoop | None:
    loop = engine._loop
    return loop if loop is not None and loop.is_running() else None


def _waiting_thread(frame: FrameType | None) -> Waiter | None:
    """The thread's endless wait for a Work."""
    for each in outward(frame):
        if each.f_code is _WAIT:
            work, timeout = each.f_locals.get("work"), each.f_locals.get("timeout")
            return None if work is None or timeout is not None else Waiter(work, _line_of_thread(each))
    return None


def _main_task(frame: FrameType | None) -> asyncio.Task[Any] | None:
    """The task that the loop runs until it is complete."""
    for each in outward(frame):
        name = each.f_code.co_name
        if name in ("run", "run_until_complete") and each.f_code.co_filename.endswith(
            ("asyncio/runners.py", "asyncio/base_events.py")
        ):
            task = each.f_locals.get("task", each.f_locals.get("future"))
            if isinstance(task, asyncio.Task):
                return task
    return None


def _awaited(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """Frames of the task's coroutine and of what it awaits, outermost first."""
    waiting: Any = task.get_coro()
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is not None:
            yield frame
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)


def _line(task: asyncio.Task[Any]) -> str:
    return describe(reversed(list(_awaited(task))))


class _Tasks:
    """The tasks of a loop, and for which operations they wait."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self.all = [task for task in asyncio.all_tasks(loop) if not task.done()]
        by_future = _parked(snapshot(engine))
        self.works: dict[asyncio.Task[Any], Work[Any]] = {}
        for task in self.all:
            work = by_future.get(_future_of(task))
            if work is not None:
                self.works[task] = work

    @cached_property
    def _limited(self) -> set[asyncio.Task[Any]]:
        return _limited_tasks(self.all)

    def has_deadline(self, task: asyncio.Task[Any]) -> bool:
        """Whether an asyncio timeout will end its wait."""
        return task in self._limited

    def may_go_on(self, task: asyncio.Task[Any]) -> bool:
        """Whether something else than operations and other tasks may wake it."""
        if self.has_deadline(task):
            return True
        if task in self.works:
            return False
        future = _future_of(task)
        if isinstance(future, asyncio.Task) or type(future).__name__ == "_GatheringFuture":
            return False
        chain = list(_awaited(task))
        code = chain[-1].f_code if chain else None
        return code is None or code.co_name in _FOR_THE_CLOCK or not code.co_filename.endswith(_FOR_TASKS)


def _future_of(task: asyncio.Task[Any]) -> object:
    return getattr(task, "_fut_waiter", None)


def _parked(works: Iterable[Work[Any]]) -> dict[object, Work[Any]]:
    """The futures that tasks wait on in Engine.park -> the operation that ends the wait."""
    found: dict[object, Work[Any]] = {}
    queue: list[Any] = list(works)
    while queue:
        work = queue.pop()
        for fn, _, _ in list(work._callbacks or ()):
            whole = getattr(fn, "__self__", None)  # a sendrecv, which waits for its parts
            if getattr(fn, "__qualname__", "") == _PARK:
                cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
                found[cells["waiter"].cell_contents] = work
            elif hasattr(whole, "_callbacks"):
                queue.append(whole)
    return found


def _limited_tasks(tasks: Iterable[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    """Tasks whose wait asyncio will end by itself."""
    limited = {
        getattr(each, "_task", None)
        for each in gc.get_objects()
        if type(each) is asyncio.Timeout and each.when() is not None and "[active]" in repr(each)
    }
    for task in tasks:
        for frame in _awaited(task):
            if frame.f_code.co_filename.endswith("asyncio/tasks.py") and frame.f_locals.get("timeout") is not None:
                inner = frame.f_locals.get("fut") or ()
                limited |= {task, *frame.f_locals.get("fs", ()), *((inner,) if isinstance(inner, asyncio.Task) else ())}
    return {task for task in limited if task is not None}
