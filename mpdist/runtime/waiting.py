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
from typing import Any

from mpdist.debug.lines import describe, distance, is_users, outward
from mpdist.debug.uncollected import uncollected
from mpdist.progress.collective import Collective
from mpdist.progress.engine import Engine
from mpdist.progress.mailbox import ANY
from mpdist.progress.receive import Receive
from mpdist.progress.sendrecv import SendReceive
from mpdist.progress.ticking import Ticking
from mpdist.progress.work import Work
from mpdist.runtime import finish
from mpdist.runtime.outside import has_events, has_threads, has_timers
from mpdist.runtime.watch import snapshot

_WAIT = Engine.drive_while.__code__
_DRAINING = (finish.drain.__code__, finish.agree.__code__)
_JOIN = getattr(getattr(threading, "_shutdown", None), "__code__", None)  # private
_PARK = f"{Ticking.park.__qualname__}.<locals>.wake"
_FORGET = f"{Work.forget.__qualname__}.<locals>.<lambda>"

# The Python frame from which torch's C++ runs a backward, at whose end DDP waits.
_BACKWARD = "torch/autograd/graph.py"

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
        surely: waits that nothing but their operation ends: in the main thread, or in what can't be withdrawn.
        together: where nothing but operations can set a task going: all of them for which anybody waits.
        perhaps: a receive of the main task, where another task may withdraw it.
    """

    surely: list[Waiter] = field(default_factory=list)
    together: list[Waiter] = field(default_factory=list)
    perhaps: list[Waiter] = field(default_factory=list)


@uncollected
def place(engine: Engine) -> str:
    """`train.py:36 in load_batch: time.sleep(60)`: where the main thread, or the main task, is."""
    frames = sys._current_frames()
    loop, current = _running_loop(engine), frames.get(engine.ticking.thread)
    if loop is None:  # of this Engine's; before its first operation it knows none
        current = frames.get(_main_thread())
        loop = _loop_of(current)
    if loop is None:
        return _line_of_thread(current)
    if asyncio.current_task(loop) is None:
        task = _main_task(current) or _foremost_task(loop)
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


@uncollected
def place_of(work: Work[Any]) -> str:
    """The line of the thread that waits for this operation for ever; empty if none does."""
    waiters = (_waiting_thread(frame) for frame in sys._current_frames().values())
    return next((waiter.place for waiter in waiters if waiter is not None and waiter.work is work), "")


@uncollected
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
    main_task = _main_task(frames.get(engine.ticking.thread))
    return [tasks.works[main_task]] if main_task in tasks.works else list(tasks.works.values())


@uncollected
def daemons() -> list[str]:
    """Names of the daemon threads of the user's own program."""
    frames = sys._current_frames()
    threads = [thread for thread in threading.enumerate() if thread.daemon]
    return [thread.name for thread in threads if distance(outward(frames.get(thread.ident or 0))) == 0]


@uncollected
def waits(engine: Engine) -> Waits:
    """For which operations this process waits, and what could end that."""
    frames = sys._current_frames()
    seen = {thread: _waiting_thread(frame) for thread, frame in frames.items()}
    waiters = {thread: waiter for thread, waiter in seen.items() if waiter is not None}
    found = Waits([waiter for thread, waiter in waiters.items() if _is_endless_in(thread, waiter.work)])
    main = frames.get(_main_thread())
    if _is_joining(main) and not has_threads(_main_thread(), *waiters):
        found.together = list(waiters.values())
    if engine.awaited_in_cxx is not None and main is not None and main.f_code.co_filename.endswith(_BACKWARD):
        found.surely += [Waiter(work, _line_of_thread(main)) for work in engine.awaited_in_cxx()]
    loop = _running_loop(engine)
    if loop is None or asyncio.current_task(loop) is not None:
        return found
    tasks = _Tasks(engine, loop)
    main_task = _main_task(frames.get(engine.ticking.thread))
    if not tasks.listened or (main_task is not None and tasks.has_deadline(main_task)) or has_timers(loop):
        return found
    for task, work in tasks.works.items():
        if not tasks.has_deadline(task) and (isinstance(work, Collective) or (task is main_task and _is_owed(work))):
            found.surely.append(Waiter(work, _line(task)))
    if not tasks.may_be_set_going(has_threads(engine.ticking.thread)):
        found.together = tasks.waiters(main_task)
    elif main_task in tasks.works and not _may_come_from_here(tasks.works[main_task]):
        found.perhaps = [Waiter(tasks.works[main_task], _line(main_task))]
    return found


def _is_endless_in(thread: int, work: Work[Any]) -> bool:
    """Whether nothing but the operation ends the thread's wait for it."""
    if isinstance(work, Collective):
        return True
    return thread == _main_thread() and not (_may_come_from_here(work) and has_threads(thread))


def _is_joining(main: FrameType | None) -> bool:
    """Whether the main thread has come to its end, and Python waits for the others."""
    return any(frame.f_code is _JOIN for frame in outward(main))


def _receive_of(work: Work[Any]) -> Receive | None:
    """What it still has to receive."""
    part = work._receive if isinstance(work, SendReceive) else work
    return part if isinstance(part, Receive) and not part._done else None


def _is_owed(work: Work[Any]) -> bool:
    """Whether the job can't end without it, even if nobody waits for it any more."""
    return _receive_of(work) is None


def _may_come_from_here(work: Work[Any]) -> bool:
    """Whether it is a receive of any rank's message, this one's too."""
    receive = _receive_of(work)
    return receive is not None and receive.src == ANY


def _main_thread() -> int:
    return threading.main_thread().ident or 0


def _running_loop(engine: Engine) -> asyncio.AbstractEventLoop | None:
    loop = engine.ticking.loop
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


def _loop_of(frame: FrameType | None) -> asyncio.AbstractEventLoop | None:
    """The loop that the thread runs, if that can be seen."""
    task = _main_task(frame)
    if task is not None:
        return task.get_loop()
    for each in outward(frame):
        if each.f_code is asyncio.BaseEventLoop.run_forever.__code__:
            loop = each.f_locals.get("self")
            return loop if isinstance(loop, asyncio.AbstractEventLoop) else None
    return None


def _foremost_task(loop: asyncio.AbstractEventLoop) -> asyncio.Task[Any] | None:
    """In a loop that runs for ever: of the tasks nearest to the user's program the oldest."""
    tasks = [task for task in asyncio.all_tasks(loop) if not task.done()]
    return min(tasks, key=lambda task: (distance(_awaited(task)), _number(task)), default=None)


def _number(task: asyncio.Task[Any]) -> int:
    """Which one it is, by the name that asyncio gives; 0 where it was given another."""
    kind, _, number = task.get_name().partition("-")
    return int(number) if kind == "Task" and number.isdecimal() else 0


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
        by_future, self.listened = _parked(snapshot(engine))
        self.works: dict[asyncio.Task[Any], Work[Any]] = {}
        for task in self.all:
            work = by_future.get(_future_of(task))
            if work is not None:
                self.works[task] = work
        self._engine = engine
        self._loop = loop

    @cached_property
    def _limited(self) -> set[asyncio.Task[Any]]:
        return _limited_tasks(self.all)

    def has_deadline(self, task: asyncio.Task[Any]) -> bool:
        """Whether an asyncio timeout will end its wait."""
        return task in self._limited

    def waiters(self, first: asyncio.Task[Any] | None) -> list[Waiter]:
        """Who waits for the operations that anybody waits for, this task first; callbacks have no line."""
        lines = {work: _line(task) for task, work in self.works.items()}
        head = self.works.get(first) if first is not None else None
        ordered = sorted(self.listened, key=lambda work: work is not head)
        return [Waiter(work, lines.get(work, "")) for work in ordered]

    def may_be_set_going(self, has_threads: bool) -> bool:
        """Whether something else than operations may wake a task, or bring what one receives."""
        if has_threads and any(_may_come_from_here(work) for work in self.listened):
            return True
        is_open = has_threads or has_events(self._engine, self._loop)
        return any(self._may_go_on(task, is_open) for task in self.all)

    def _may_go_on(self, task: asyncio.Task[Any], is_open: bool) -> bool:
        """Whether something else than operations and other tasks may wake it.

        Args:
            is_open: something may touch the lock, queue or event that it waits for, if it does.
        """
        if self.has_deadline(task):
            return True
        future = _future_of(task)
        if task in self.works or isinstance(future, asyncio.Task):
            return False
        chain = list(_awaited(task))
        parts = getattr(future, "_children", None) or (chain[-1].f_locals.get("fs") if chain else None)
        if parts:  # of gather, or of asyncio.wait
            return is_open and not all(isinstance(part, asyncio.Task | Work) for part in parts)
        code = chain[-1].f_code if chain else None
        if code is None or code.co_name in _FOR_THE_CLOCK or not code.co_filename.endswith(_FOR_TASKS):
            return True
        return is_open and not code.co_filename.endswith("asyncio/taskgroups.py")


def _future_of(task: asyncio.Task[Any]) -> object:
    return getattr(task, "_fut_waiter", None)


def _parked(works: Iterable[Work[Any]]) -> tuple[dict[object, Work[Any]], list[Work[Any]]]:
    """The futures that tasks wait on in Ticking.park -> the operation that ends the wait; all that call anybody."""
    found: dict[object, Work[Any]] = {}
    listened: dict[Work[Any], None] = {}
    queue = list(works)
    while queue:
        work = queue.pop()
        for fn, _, _ in list(work._callbacks or ()):
            whole = getattr(fn, "__self__", None)
            name = getattr(fn, "__qualname__", "")
            if isinstance(whole, Work):  # a sendrecv, which waits for its parts
                queue.append(whole)
            elif name != _FORGET:
                listened[work] = None
            if name == _PARK:
                cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
                found[cells["waiter"].cell_contents] = work
    return found, list(listened)


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
