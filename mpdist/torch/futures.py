"""Futures: what a Work's `get_future` gives, and the order in which those of one backward complete.

Callbacks of Futures post collectives of their own, as PowerSGD's do. Outside of a backward a Future completes when its
operation is found done, at another moment on each rank. Those of one backward complete after it, in the order in which
they were asked for; so what their callbacks post is in one order on all ranks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from mpdist.progress.callback import when_done
from mpdist.torch.devices import devices_of

if TYPE_CHECKING:
    from mpdist.torch.work import Waiter, Work

# A wait at the end of a backward goes on as long as anything moves within this time.
STANDSTILL_SECONDS = 0.05


class _Completing(threading.local):
    """Of each thread: the Backward whose callbacks it runs."""

    backward: Backward | None = None


_completing = _Completing()


class Backwards:
    """Of a group, the backwards that have asked for Futures: torch owns them, and drops one that ends or fails."""

    def __init__(self, waiter: Waiter) -> None:
        self._waiter = waiter
        self._running: WeakValueDictionary[int, Backward] = WeakValueDictionary()

    def current(self) -> Backward | None:
        """The one that runs on this thread, or whose callbacks do; None outside."""
        # None at the end of a backward as well, where DDP with a static graph posts all, and waits in C++ at once.
        if torch._C._current_autograd_node() is None:
            return _completing.backward
        task = torch._C._current_graph_task_id()
        backward = self._running.get(task)
        if backward is None:
            backward = self._running[task] = Backward(self._waiter)
            torch.autograd.Variable._execution_engine.queue_callback(backward)
        return backward


class Backward:
    """The works of one backward that have Futures, in the order in which these were asked for."""

    def __init__(self, waiter: Waiter) -> None:
        self._waiter = waiter
        self._works: deque[Work] = deque()
        self._is_over = False
        self._completes = threading.Lock()

    def hold(self, work: Work) -> None:
        """Complete its Future when the backward is over, and those before it have been completed."""
        self._works.append(work)
        when_done(work._posted, lambda _: self._advance())

    def __call__(self) -> None:
        """The backward ends: drive, for DDP waits in C++ next, where nobody could."""
        self._is_over = True
        engine = self._waiter.engine
        self._advance()
        while self._works:
            posted = self._works[0]._posted
            moves = -1
            # Another rank may need what this one does after its backward: without progress the wait ends.
            while not posted._done and moves != engine.moves:
                moves = engine.moves
                self._waiter.wait(posted, STANDSTILL_SECONDS)
            self._advance()
            if not posted._done:
                return

    def __del__(self) -> None:
        # Also of a backward that has failed, which calls nothing at its end.
        self._is_over = True
        self._advance()

    def _advance(self) -> None:
        """Complete what is next, as far as operations are done; one thread at a time."""
        while self._is_over and self._works and self._works[0]._posted._done:
            if not self._completes.acquire(blocking=False):
                return  # who has it looks again
            before, _completing.backward = _completing.backward, self
            try:
                while self._works and self._works[0]._posted._done:
                    self._works.popleft().complete()
            finally:
                _completing.backward = before
                self._completes.release()


class Future(torch.futures.Future):  # type: ignore[type-arg]  # generic at run time only
    """A Future whose `wait` drives: it may be called in a callback, on the thread that would drive otherwise."""

    def __init__(self, work: Work) -> None:
        super().__init__(devices=devices_of(work._outputs))
        self._work: Work = work

    def wait(self) -> Any:
        """The result, or what went wrong."""
        self._complete()
        return super().wait()

    def done(self) -> bool:
        """Whether the result is there; looks once."""
        if self._work.is_completed():
            self._work.complete()
        return super().done()

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        """The Future of what the callback makes of this one."""
        if not self._work._is_held or super().done():
            return super().then(callback)
        return _Then(self, callback)

    def _complete(self) -> None:
        """Wait for the operation, then be complete, in this thread, also in a backward."""
        work = self._work
        if not work._posted._done:
            work._waiter.wait(work._posted)
        if work._is_held:
            work.complete()


class _Then(torch.futures.Future):  # type: ignore[type-arg]  # generic at run time only
    """What a callback makes of a Future that completes after a backward, or when it is waited for in it."""

    def __init__(self, before: Future | _Then, callback: Callable[[Any], Any]) -> None:
        self._work: Work = before._work
        super().__init__(devices=devices_of(self._work._outputs))
        self._complete: Callable[[], None] = before._complete

        def go_on(done: torch.futures.Future[Any]) -> None:
            try:
                result = callback(done)
            except Exception as error:
                self.set_exception(error)
            else:
                self.set_result(result)

        before.add_done_callback(go_on)

    def wait(self) -> Any:
        """The result, or what went wrong."""
        self._complete()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        """The Future of what the callback makes of this one."""
        return super().then(callback) if super().done() else _Then(self, callback)
