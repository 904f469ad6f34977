"""Talk: a conversation with the other ranks, written once for code that awaits and for code that waits.

It is a generator that yields Works and gets their results back. Its Works are
posted in order whoever waits, and an await that was cancelled goes on where it
stopped when somebody awaits again.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from mpdist.progress import Work

T = TypeVar("T")

Talk = Generator["Work[Any]", Any, T]


class Conversation(Generic[T]):
    """A talk that is being held."""

    def __init__(self, talk: Talk[T]) -> None:
        self._talk = talk
        self._work: Work[Any] | None = None
        self._is_over = False
        self._error: BaseException | None = None
        self._result: T

    def __await__(self) -> Generator[Any, None, T]:
        self._begin()
        while (work := self._work) is not None:
            self._answer(work, (yield from work.__await__()))
        return self._end()

    def wait(self, timeout: float | None = None) -> T:
        """The same where no event loop runs; `timeout` in seconds is for each message."""
        self._begin()
        while (work := self._work) is not None:
            self._answer(work, work.wait(timeout))
        return self._end()

    def _begin(self) -> None:
        if self._error is not None:
            raise self._error
        if self._work is None and not self._is_over:
            self._answer(None, None)

    def _end(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result

    def _answer(self, work: Work[Any] | None, answer: Any) -> None:
        """Go on to the next Work, unless somebody else who awaits it has."""
        if self._work is not work:
            return
        self._work = None
        try:
            self._work = self._talk.send(answer)
        except StopIteration as stop:
            self._result = stop.value
            self._is_over = True
        except BaseException as error:
            self._error = error  # a generator ends with it: whoever asks again is told again
            raise
