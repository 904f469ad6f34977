"""Inquiries: questions to other ranks' control threads, until all have answered or time is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mpdist.runtime.answers import answer
from mpdist.runtime.diagnosis import MOST_OPERATIONS
from mpdist.runtime.mail import Mail
from mpdist.runtime.records import Answer, Answers, Operation

if TYPE_CHECKING:
    from mpdist.progress.engine import Engine

# A rank that has not answered by then is told of as mute. Others look for letters every 0.05 s.
ANSWER_SECONDS = 1.0


@dataclass(eq=False)
class Inquiry:
    """One of them."""

    number: int
    operations: list[Operation]
    missing: set[int]
    end: float
    then: Callable[[Inquiry], None]
    answers: dict[int, Answer] = field(default_factory=dict)


class Inquiries:
    """Those of one rank, and its answers to others'.

    Args:
        mail: None where nobody can be asked.

    Attributes:
        is_finished: this rank's main program has ended; to be told to others.
    """

    def __init__(self, engine: Engine, mail: Mail | None) -> None:
        self.is_finished = False
        self._engine = engine
        self._mail = mail
        self._rank = engine.meeting.rank
        self._open: list[Inquiry] = []
        self._number = 0

    def __len__(self) -> int:
        """How many wait for answers."""
        return len(self._open)

    def ask(
        self,
        operations: list[Operation],
        ranks: Iterable[int],
        then: Callable[[Inquiry], None],
        seconds: float = ANSWER_SECONDS,
        known: Answers = MappingProxyType({}),
    ) -> None:
        """Ask the ranks about the operations; `then` is called with the answers, besides those already known."""
        self._number += 1
        wanted: dict[str, list[int]] = {}
        for operation in operations[:MOST_OPERATIONS]:
            wanted.setdefault(operation.key, []).append(operation.sequence)
        asked = set(ranks) - {self._rank} if self._mail is not None else set()
        inquiry = Inquiry(self._number, operations, asked, monotonic() + seconds, then)
        inquiry.answers.update(known)
        inquiry.answers[self._rank] = answer(self._engine, self._rank, wanted, is_finished=self.is_finished)
        self._open.append(inquiry)
        if self._mail is not None:
            for rank in asked:
                self._mail.send(rank, {"ask": inquiry.number, "wanted": wanted})

    def read(self, mail: Mail, sender: int, letter: dict[str, Any]) -> bool:
        """Answer a question, or take an answer; False where the letter is neither."""
        if "ask" in letter:
            told = answer(self._engine, sender, letter["wanted"], is_finished=self.is_finished)
            mail.send(sender, {"tell": letter["ask"], "answer": told.as_json()})
            return True
        if "tell" not in letter:
            return False
        for inquiry in self._open:
            if inquiry.number == letter["tell"]:
                inquiry.answers[sender] = Answer.of_json(letter["answer"])
                inquiry.missing.discard(sender)
        return True

    def conclude(self) -> None:
        """Act on those that are over: on all, also where one fails.

        Raises:
            ExceptionGroup: of those that have failed.
        """
        now = monotonic()
        over = [inquiry for inquiry in self._open if not inquiry.missing or now >= inquiry.end]
        self._open = [inquiry for inquiry in self._open if inquiry not in over]
        errors = []
        for inquiry in over:
            try:
                inquiry.then(inquiry)
            except Exception as error:  # raised below
                errors.append(error)
        if errors:
            raise ExceptionGroup("inquiries have failed", errors)
