"""Futures: what a Work's `get_future` gives, and the order in which those of one backward complete.

Callbacks of Futures post collectives of their own, as PowerSGD's do. Outside of a backward a Future completes when its
operation is found done, at another moment on each rank. Those of one backward complete at its end, in the order in
which they were asked for, or where the program waits for one; so what their callbacks post is in one order on all
ranks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from mpdist.progress.callback import when_done
from mpdist.torch.devices import devices_of

if TYPE_CHECKING:
    from mpdist.progress.work import Work as Posted
    from mpdist.torch.work import Waiter, Work

# A wait at the end of a backward goes on as long as anything moves within this time.
STANDSTILL_SECONDS = 0.05


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
        backward = _running[id(waiter), task] = Backward(waiter, task)
        waiter.engine.awaited_in_cxx = awaited_in_cxx
        torch.autograd.Variable._execution_engine.queue_callback(backward)
    if at_end:  # where DDP with a static graph posts all, and waits in C++ at once
        backward.end()
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

    def end(self) -> None:
        """Complete its Futures from now on, each when its operation is done and those before it are complete."""
        self._is_over = True
        self._advance()

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
                self._waiter.wait(posted, STANDSTILL_SECONDS)
            self._advance()
            if not posted._done:
                self._waiter.progress.posted()
                return

    def __del__(self) -> None:
        self.end()  # of a backward that has failed, too, which calls nothing at its end

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
            if self._completes.acquire(blocking=False):
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
        while self._is_next_done():
            if not self._completes.acquire(blocking=False):
                return  # who has it looks again
            self._complete_done()

    def _complete_done(self, wanted: Work | None = None) -> None:
        """Complete what is next, and then the wanted one; this thread has `_completes`, and gives it back."""
        before, _completing.backward = _completing.backward, self
        try:
            while self._is_next_done():
                self._works.popleft().complete()
            if wanted is not None:
                wanted.complete()
        finally:
            _completing.backward = before
            self._completes.release()

    def _is_next_done(self) -> bool:
        work = self._next()
        return self._is_over and work is not None and work._posted._done

    def _next(self) -> Work | None:
        try:
            return self._works[0]
        except IndexError:  # another thread may have completed it since one looked
            return None


class _Failure:
    """The result of a Future that has failed, from which DDP, which waits in C++, hears of the error.

    A Future has an error for Python only: `torch.futures.Future.set_exception` makes it the result. DDP looks for
    tensors in a result by pickling it: of an exception that can be pickled it took the first of none, and crashed.
    With a hook it shows what the result is instead of a tensor.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> str:
        raise self._error

    def __repr__(self) -> str:
        return f"{type(self._error).__name__}: {self._error}"


class _MayFail(torch.futures.Future):  # type: ignore[type-arg]  # generic at run time only
    """A Future whose error DDP hears of, too."""

    _error: BaseException | None = None

    def __init__(self, devices: list[int | str | torch.device]) -> None:
        super().__init__(devices=devices)
        self._devices = devices

    def set_exception(self, result: BaseException) -> None:
        """Fail."""
        self._error = result
        self.set_result(_Failure(result))

    @staticmethod
    def mpdist_collect_all(futures: Sequence[torch.futures.Future[Any]]) -> All:
        """What torch.futures.collect_all does with several of which this is one."""
        return All(futures)

    def _complete(self) -> None:
        """Wait for what it waits for, as far as Python has to do something for it; raises nothing of that."""

    def wait(self) -> Any:
        """The result, or what went wrong; drives."""
        self._complete()
        result = super().wait()
        self._check()
        return result

    def value(self) -> Any:
        """The result, or what went wrong; it is done."""
        self._check()
        return super().value()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


class Future(_MayFail):
    """A Future whose `wait` drives: it may be called in a callback, on the thread that would drive otherwise."""

    def __init__(self, work: Work) -> None:
        super().__init__(devices_of(work._outputs))
        self._work: Work | None = work

    def let_go(self) -> None:
        """Leave the operation, which is done and has this Future: else the garbage collector is to free both."""
        self._work = None

    def done(self) -> bool:
        """Whether the result is there; looks once."""
        work = self._work
        if work is not None and work.is_completed():
            work.complete_in_turn(waits=False)
        return super().done()

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        """The Future of what the callback makes of this one."""
        work = self._work
        if work is None or not work.is_held or super().done():
            return super().then(callback)
        return _Then(self, callback)

    def _complete(self) -> None:
        """Wait for the operation, then be complete, also in a backward."""
        work = self._work
        if work is None:
            return
        if not work._posted._done:
            work._waiter.wait(work._posted)
        if work.is_held:
            work.complete_in_turn()


class _Then(_MayFail):
    """What a callback makes of a Future that completes after a backward, or when it is waited for in it."""

    def __init__(self, before: Future | _Then | All, callback: Callable[[Any], Any]) -> None:
        super().__init__(before._devices)
        self._before = before

        def go_on(done: torch.futures.Future[Any]) -> None:
            try:
                result = callback(done)
            except Exception as error:
                self.set_exception(error)
            else:
                self.set_result(result)

        before.add_done_callback(go_on)

    def _complete(self) -> None:
        self._before._complete()

    def done(self) -> bool:
        """Whether the result is there; looks once."""
        return super().done() or (self._before.done() and super().done())

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        """The Future of what the callback makes of this one."""
        return super().then(callback) if super().done() else _Then(self, callback)


class All(_MayFail):
    """Several Futures as one, which fails with the first that does, as in torch."""

    def __init__(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        super().__init__([])  # the result is not tensors
        self._devices = list({device: None for each in futures for device in getattr(each, "_devices", ())})
        self._futures = list(futures)
        self._left = len(futures)
        self._counting = threading.Lock()
        for each in futures:
            each.add_done_callback(self._count)
        if not futures:
            self.set_result([])

    def _count(self, done: torch.futures.Future[Any]) -> None:
        error = _error_of(done)
        with self._counting:
            if self._left == 0:  # it has failed
                return
            self._left = self._left - 1 if error is None else 0
            if self._left:
                return
        if error is not None:
            self.set_exception(error)
            return
        if self._devices:
            for each in self._futures:
                each.wait()  # done; this thread's stream comes after it
        self.set_result(self._futures)

    def _complete(self) -> None:
        for each in self._futures:
            if isinstance(each, _MayFail):
                each._complete()

    def done(self) -> bool:
        """Whether all results are there; looks once."""
        return super().done() or (all(each.done() for each in self._futures) and super().done())

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        """The Future of what the callback makes of all."""
        return super().then(callback) if super().done() else _Then(self, callback)


def _error_of(done: torch.futures.Future[Any]) -> Exception | None:
    try:
        done.value()
    except Exception as error:
        return error
    return None
