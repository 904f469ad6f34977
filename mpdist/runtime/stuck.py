"""Stuck: this rank waits for what only ranks could give whose main program has ended."""

from __future__ import annotations

from collections.abc import Callable, Collection
from time import monotonic
from typing import TYPE_CHECKING, Any

from mpdist.runtime import diagnosis
from mpdist.runtime.answers import operation_of
from mpdist.runtime.diagnosis import MOST_OPERATIONS
from mpdist.runtime.inquiries import Inquiries, Inquiry
from mpdist.runtime.last_words import write_error
from mpdist.runtime.waiting import Waits, waits

if TYPE_CHECKING:
    from mpdist.progress.engine import Engine
    from mpdist.progress.work import Work

# So long nothing must move before a wait is looked into, and until it is looked into again.
STUCK_SECONDS = 1.0


class Stuck:
    """Whether this rank is.

    Args:
        finished: world ranks whose main program has ended.
        on_stuck: called once with the reason.
    """

    def __init__(
        self, engine: Engine, inquiries: Inquiries, finished: Collection[int], on_stuck: Callable[[str], None]
    ) -> None:
        self._finished = finished
        self._engine = engine
        self._inquiries = inquiries
        self._on_stuck = on_stuck
        self._moves = -1
        self._quiet_since = 0.0
        self._is_told = False
        self._is_hinted = False

    def look(self) -> None:
        """After a second without progress: ask the finished ranks that this one waits for."""
        if not self._finished or self._is_told:
            return
        now = monotonic()
        if self._engine.moves != self._moves:
            self._moves = self._engine.moves
            self._quiet_since = now
        if now - self._quiet_since < STUCK_SECONDS:
            return
        self._quiet_since = now
        seen = waits(self._engine)
        waiters = [*seen.surely, *seen.together, *seen.perhaps]
        operations = [operation_of(waiter.work, waiter.place) for waiter in waiters if waiter.work.limit is None]
        asked = {peer for operation in operations for peer in operation.peers} & set(self._finished)
        if asked:
            self._inquiries.ask(operations[:MOST_OPERATIONS], asked, lambda inquiry: self._judge(inquiry, seen))

    def _judge(self, inquiry: Inquiry, seen: Waits) -> None:
        if self._engine.moves != self._moves or self._is_told:
            return
        rank = self._engine.meeting.rank
        finished = {other: told for other, told in inquiry.answers.items() if told.is_finished}
        any_of = [operation_of(each.work, each.place) for each in seen.surely if _is_endless(each.work)]
        all_of = [operation_of(each.work, each.place) for each in seen.together]
        if not all(_is_endless(each.work) for each in seen.together):
            all_of = []
        found = diagnosis.stuck(any_of, all_of, finished)
        if found is not None:
            self._is_told = True
            self._on_stuck(diagnosis.stuck_text(rank, *found, finished))
            return
        perhaps = [operation_of(each.work, each.place) for each in seen.perhaps if _is_endless(each.work)]
        found = diagnosis.stuck(perhaps, [], finished)
        if found is not None and not self._is_hinted:
            self._is_hinted = True
            write_error(f"mpdist: {diagnosis.hint_text(rank, *found, finished)}")


def _is_endless(work: Work[Any]) -> bool:
    """Whether it still waits, and no limit of its own will end that."""
    return not work._done and work.limit is None
