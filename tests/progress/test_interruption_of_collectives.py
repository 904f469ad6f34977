"""Interruption of collectives of several steps: wherever a wait is interrupted, they end, and none of them wrongly."""

from __future__ import annotations

import itertools
from collections.abc import Generator

import pytest
from progress import interruptions

import mpdist
from mpdist import Communicator

pytestmark = pytest.mark.ranks(1)

FILES = ("engine", "work", "collective", "channel")


class Later:
    """A request that is complete at the third look."""

    def __init__(self) -> None:
        self.looks = 0

    def Test(self) -> bool:
        self.looks += 1
        return self.looks > 2


def program(_: object, name: str) -> Generator[Later, None, str]:
    first = Later()
    yield first
    assert first.looks > 2
    second = Later()
    yield second
    assert second.looks > 2
    return name


@pytest.mark.limit(120)
def test_they_end_wherever_a_wait_is_interrupted(comm: Communicator) -> None:
    """One that was interrupted as it ended had the result None, or those after it waited for ever."""
    with interruptions.raising():
        for number in itertools.count():
            part = comm.dup().wait()
            works: list[mpdist.Work[str]] = [
                part._channel.post("program", program, str, name) for name in ("first", "second", "third")
            ]
            place = interruptions.Interruptions(number, "progress", FILES)
            try:
                with place:
                    works[0].wait()
            except interruptions.Interrupted:
                pass
            check(part, works, number)
            part._leave("this is enough of it")
            if place.left >= 0:
                break
    assert number > 20


def check(part: Communicator, works: list[mpdist.Work[str]], number: int) -> None:
    """Each has its result; or it was interrupted itself, and its communicator is given up."""
    for name, work in zip(("first", "second", "third"), works, strict=True):
        try:
            assert work.wait(5) == name, number
        except mpdist.CommunicationError:
            assert part._channel.broken, number


def test_one_that_was_interrupted_twice_fails(comm: Communicator) -> None:
    """The second time before it was noted that its program is over: that was taken for its end."""
    part = comm.dup().wait()
    work: mpdist.Work[str] = part._channel.post("program", program, str, "name")
    with pytest.raises(KeyboardInterrupt):
        work._steps.throw(KeyboardInterrupt)  # type: ignore[attr-defined]  # a Collective
    with pytest.raises(mpdist.CommunicationError, match="InterruptedError"):
        work.wait()
    with pytest.raises(mpdist.ClosedError, match="was interrupted"):
        part.barrier()
