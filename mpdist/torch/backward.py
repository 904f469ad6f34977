"""Backward: the order in which the Futures of one backward complete, the same on all ranks.

Their callbacks post collectives of their own, as PowerSGD's do. They complete when the backward is over, in the order
in which they were asked for, or where the program waits for one.

What runs at the end of a backward may post more, as DDP with a static graph does: all buckets, and waits for them in
C++ at once. Nothing tells us when it has posted all, so the Futures wait until its thread has fallen asleep.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from mpdist.progress.callback import when_done
from mpdist.torch import standstill

if TYPE_CHECKING:
    from mpdist.progress.work import Work as Posted
    from mpdist.torch.work import Waiter, Work

# A wait at the end of a backward goes on as long as anything moves within this time.
UNMOVED_SECONDS = 0.05


class _Completing(threading.local):
    """Of each thread: the Backward whose callbacks it runs."""

    backward: Backward | None = None


_completing = _Completing()

# By group and graph task; torch owns a Backward, and drops it when its graph task ends or fails.
_running: WeakValueDictionary[tuple[int, int], Backward] = WeakValueDictionary()


def running_backward(waiter: Waiter) -> Backward | None:
    """Of a group, the backward that runs on this thread, or whose callbacks do; None outside."""
    at_end = torch._C._current_autograd_node() is None
    if at_end and _completing.backward is not None:
        return _completing.backward
    task = torch._C._current_graph_task_id()
    if task == -1:
        return None
    backward = _running.get((id(waiter), task))
    if backward is None:
        standstill.start()
        backward = _running[id(waiter), task] = Backward(waiter, task)
        waiter.engine.awaited_in_cxx = awaited_in_cxx
        torch.autograd.Variable._execution_engine.queue_callback(backward)
    if at_end:
        backward.goes_on()
    return backward


def awaited_in_cxx() -> list[Posted[Any]]:
    """The operations for whose Futures C++ waits, where it does: of each backward that is over the next."""
    backwards = [reference() for reference in _running.valuerefs()]
    works = [backward._next() for backward in backwards if backward is not None and backward._is_over]
    return [work._posted for work in works if work is not None]


def end_backward() -> None:
    """Let the Futures of the backward on this thread, which is at its end, complete from now on."""
    task = torch._C._current_graph_task_id()
    for reference in _running.valuerefs():
        backward = reference()
        if backward is not None and backward.task == task:
            backward.end()


class Backward:
    """The works of one backward that have Futures, in the order in which these were asked for.

    Attributes:
        task: which backward, as torch counts them.
    """

    def __init__(self, waiter: Waiter, task: int) -> None:
        self.task = task
        self._waiter = waiter
        self._works: deque[Work] = deque()
        self._is_over = False
        self._completes = threading.Lock()

    def hold(self, work: Work) -> None:
        """Complete its Future when the backward ends, and those before it have been completed."""
        self._works.append(work)
        when_done(work._posted, lambda _: self._advance())

    def goes_on(self) -> None:
        """At its end this thread has posted something, and may post more: so long its Futures are held again."""
        if self._is_over:
            self._is_over = False
            torch.autograd.Variable._execution_engine.queue_callback(self)
        standstill.once_asleep(self)

    def end(self) -> None:
        """Complete its Futures from now on, each when its operation is done and those before it are complete."""
        self._is_over = True
        self._advance()

    def resume(self) -> None:
        """The same in another thread: the one that posted waits, or the backward has failed."""
        self._is_over = True
        self._waiter.progress.later(self._advance)

    def __call__(self) -> None:
        """The backward is over: drive, for DDP waits in C++ next, where nobody could."""
        engine = self._waiter.engine
        self.end()
        while (work := self._next()) is not None:
            posted = work._posted
            moves = -1
            # Another rank may need what this one does after its backward: without progress the wait ends.
            while not posted._done and moves != engine.moves:
                moves = engine.moves
                self._waiter.wait(posted, UNMOVED_SECONDS)
            self._advance()
            if not posted._done:
                self._waiter.progress.posted()
                return

    def __del__(self) -> None:
        if self._works:  # of a backward that has failed, which calls nothing at its end
            standstill.elsewhere(self)  # Python may collect it as garbage wherever it is

    def complete(self, work: Work, *, waits: bool) -> None:
        """Complete the Future of one of them, whose operation is done: at once within the backward, else in its turn.

        A callback gets what it waits for at once, too. Collectives before it other ranks have called as well, and are
        waited for; messages may need what this rank does next, and are not.

        Args:
            waits: False: leave it to others if it is not its turn.
        """
        if not self._is_over or _completing.backward is not None:
            work.complete()
            return
        for posted in self._pending_before(work):
            if not waits:
                return
            self._waiter.wait(posted)
        while not work.is_complete:
            if not self._completes.locked():
                self._complete_done(work)
            elif waits:
                self._waiter.engine.drive_while(lambda: self._completes.locked() and not work.is_complete)
            else:
                return
        self._advance()

    def _pending_before(self, work: Work) -> Iterator[Posted[Any]]:
        for each in list(self._works):
            if each is work:
                return
            if each._posted.sequence and not each._posted._done:
                yield each._posted

    def _advance(self) -> None:
        """Complete what is next, as far as operations are done; one thread at a time."""
        while self._is_next_done() and not self._completes.locked():  # who has it looks again
            self._complete_done()

    def _complete_done(self, wanted: Work | None = None) -> None:
        """Complete what is next, and then the wanted one."""
        with self._completes:
            before, _completing.backward = _completing.backward, self
            try:
                self._complete_next()
                if wanted is not None:
                    wanted.complete()
            finally:
                _completing.backward = before

    def _complete_next(self) -> None:
        while self._is_next_done():
            self._works.popleft().complete()

    def _is_next_done(self) -> bool:
        work = self._next()
        return self._is_over and work is not None and work._posted._done

    def _next(self) -> Work | None:
        try:
            return self._works[0]
        except IndexError:  # another thread may have completed it since one looked
            return None
