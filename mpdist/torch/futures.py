"""Futures: what a Work's `get_future` gives, and what becomes of that.

Callbacks of Futures post collectives of their own, as PowerSGD's do. Outside of a backward a Future completes when its
operation is found done, at another moment on each rank; for those of a backward see `backward`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpdist.torch.devices import devices_of

if TYPE_CHECKING:
    from mpdist.torch.work import Work


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
