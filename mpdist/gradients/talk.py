"""Talk: a conversation with the other ranks, written once for code that awaits and for code that waits.

It is a generator that yields Works and gets their results back, or their errors
raised. Its Works are posted in order whoever waits, and an await that was
cancelled goes on where it stopped when somebody awaits again. Several may wait, also
in several threads: one of them takes each step.

What ends a generator from outside, as what a signal's handler raises, ends no
conversation: whoever asks next begins the talk again. So a talk keeps what it has
done elsewhere, as the Works that it has posted in `Posted`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mpdist.errors import MpdistError
from mpdist.progress.work import check_timeout

if TYPE_CHECKING:
    from mpdist.progress import Work

T = TypeVar("T")

Talk = Generator["Work[Any]", Any, T]
Post = Callable[..., "Work[Any]"]
"""Posts what it is given, a call and its arguments."""


def now(call: Callable[..., Work[Any]], *arguments: Any, **options: Any) -> Work[Any]:
    """Post by a call, for a talk that is held once."""
    return call(*arguments, **options)


class Posted:
    """What a talk has posted: one that begins again gets the same Works, in their order, and posts no others."""

    def __init__(self) -> None:
        self._works: list[Work[Any]] = []
        self._next = 0

    def again(self) -> Posted:
        """For a talk that begins."""
        self._next = 0
        return self

    def __call__(self, call: Callable[..., Work[Any]], *arguments: Any, **options: Any) -> Work[Any]:
        if self._next == len(self._works):
            # In one call: between two a signal's handler could raise, and the Work would be lost.
            self._works.extend(starmap(partial(call, **options), (arguments,)))
        self._next += 1
        return self._works[self._next - 1]


class Conversation(Generic[T]):
    """A talk that is being held."""

    def __init__(self, begin: Callable[[], Talk[T]]) -> None:
        """`begin` gives the talk; once more where it was interrupted."""
        self._begin: Callable[[], Talk[T]] | None = begin
        self._talk: Talk[T]
        self._lock = threading.RLock()  # held while a step is taken
        self._work: Work[Any] | None = None
        self._failures: list[BaseException] = []
        self._error: BaseException | None = None
        self._result: T

    @property
    def is_over(self) -> bool:
        """Whether it has a result."""
        return self._begin is None and self._error is None

    @property
    def is_broken_off(self) -> bool:
        """Whether it has ended with the failure of a Work."""
        return self._error in self._failures

    def __await__(self) -> Generator[Any, None, T]:
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
        while (work := self._current()) is not None:
            try:
                answer = work.wait(timeout)
            except MpdistError as error:
                self._failed(work, error)
            else:
                self._go_on(work, partial(self._talk.send, answer))
        return self._end()

    def _current(self) -> Work[Any] | None:
        """What is waited for; None when it is over."""
        with self._lock:
            if self._work is None and self._begin is not None:
                self._talk = self._begin()
                self._go_on(None, partial(next, self._talk))
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
        """Go on to the next Work, unless somebody else who awaits this one has; raises what is no end of the talk."""
        with self._lock:
            if self._work is not work:
                return
            self._work = None
            try:
                self._work = step()
            except StopIteration as stop:
                self._result = stop.value
                self._begin = None
            except MpdistError as error:  # whoever asks is told, and whoever asks again
                self._error = error
                self._begin = None
