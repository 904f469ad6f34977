"""Talk: a conversation with the other ranks, written once for code that awaits and for code that waits.

It is a generator that yields Works and gets their results back, or their errors
raised. Its Works are posted in order whoever waits, and an await that was
cancelled goes on where it stopped when somebody awaits again. Several may wait, also
in several threads: one of them takes each step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mpdist.errors import MpdistError
from mpdist.progress.work import check_timeout

if TYPE_CHECKING:
    from mpdist.progress import Work

T = TypeVar("T")

Talk = Generator["Work[Any]", Any, T]


class Conversation(Generic[T]):
    """A talk that is being held."""

    def __init__(self, talk: Talk[T]) -> None:
        self._talk = talk
        self._lock = threading.RLock()  # held while a step is taken
        self._work: Work[Any] | None = None
        self._is_over = False
        self._failures: list[BaseException] = []
        self._error: BaseException | None = None
        self._result: T

    @property
    def is_broken_off(self) -> bool:
        """Whether it has ended with the failure of a Work."""
        return self._error in self._failures

    def __await__(self) -> Generator[Any, None, T]:
        self._begin()
        while (work := self._current()) is not None:
            try:
                answer = yield from work.__await__()
            except MpdistError as error:
                self._failed(work, error)
            else:
                self._go_on(work, partial(self._talk.send, answer))
        return self._end()

    def wait(self, timeout: float | None = None) -> T:
        """The same where no event loop runs; `timeout` in seconds is for each message."""
        check_timeout(timeout)
        self._begin()
        while (work := self._current()) is not None:
            try:
                answer = work.wait(timeout)
            except MpdistError as error:
                self._failed(work, error)
            else:
                self._go_on(work, partial(self._talk.send, answer))
        return self._end()

    def _begin(self) -> None:
        with self._lock:
            if self._error is None and self._work is None and not self._is_over:
                self._go_on(None, partial(next, self._talk))

    def _current(self) -> Work[Any] | None:
        """What is waited for; None when it is over."""
        with self._lock:
            return self._work

    def _end(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result

    def _failed(self, work: Work[Any], error: MpdistError) -> None:
        """Raise what ended the wait only; tell the talk of what ended the Work."""
        if not work._done or work.exception() is not error:
            raise error
        self._failures.append(error)
        self._go_on(work, partial(self._talk.throw, error))

    def _go_on(self, work: Work[Any] | None, step: Callable[[], Work[Any]]) -> None:
        """Go on to the next Work, unless somebody else who awaits this one has."""
        with self._lock:
            if self._work is not work:
                return
            self._work = None
            try:
                self._work = step()
            except StopIteration as stop:
                self._result = stop.value
                self._is_over = True
            except BaseException as error:
                self._error = error  # a generator ends with it: whoever asks is told, and whoever asks again
