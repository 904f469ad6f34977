"""Few: what one member writes and reads of the lines, in which order; pure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from mpdist.algorithms.reduction import Reduction
from mpdist.algorithms.shared.few import BLOCK_BYTES, LINES, READ_AT, Few
from mpdist.algorithms.shared.members import Place
from mpdist.memory import as_buffer, as_op

WORDS = 8


class Line:
    """A member's lines as numbers of a format, which tell what is done with them."""

    def __init__(self, memory: bytearray, form: str, name: str, log: list[tuple[str, int | str]]) -> None:
        self.view: memoryview[Any] = memoryview(memory).cast(form)  # type: ignore[call-overload]  # a format
        self.name = f"{name} {form}"
        self.log = log

    def __getitem__(self, at: int) -> Any:
        self.log.append((f"read {self.name}", at))
        return self.view[at]

    def __setitem__(self, at: int, value: Any) -> None:
        self.log.append((f"write {self.name}", at))
        self.view[at] = value


def member() -> tuple[Any, list[tuple[str, int | str]], memoryview[Any]]:
    """What rank 0 of two whose memory needs fences has of them, what it does, and the words of rank 1."""
    log: list[tuple[str, int | str]] = []
    memories = [bytearray(BLOCK_BYTES) for _ in range(2)]

    def line(rank: int, form: str) -> Line:
        return Line(memories[rank], form, ("my", "its")[rank], log)

    shared = SimpleNamespace(
        words=lambda rank, offset, count: line(rank, "q"),
        numbers=lambda rank, offset, nbytes, form: line(rank, form),
        fence=lambda: log.append(("fence", "")),
    )
    backoff, doorbell = SimpleNamespace(yields=False), SimpleNamespace(flags=bytes(2), has_rung=False)
    engine = SimpleNamespace(shared=shared, doorbell=doorbell, backoff=backoff)
    channel: Any = SimpleNamespace(engine=engine, rank=0, world_ranks=(0, 1), team=None, few=None)
    block: Any = None
    few = Few(channel, block, [Place(0, 0), Place(1, 0)])
    log.clear()
    return few, log, memoryview(memories[1]).cast("q")


def test_numbers_are_behind_fences_from_the_words_that_tell_of_them() -> None:
    few, log, its = member()
    x = np.array([3], np.float64)
    buffer = as_buffer(x, writable=True)
    plan = few.plan(Reduction.of(as_op("sum"), buffer.element, 2), 8)
    work = plan.request(few, plan, buffer, buffer)
    assert log == [("write my d", WORDS + 1), ("fence", ""), ("write my q", WORDS)]
    assert not work.Test()
    its[WORDS], memory = few.mine.view[WORDS], memoryview(its.obj).cast("d")
    memory[WORDS + 1] = 4
    log.clear()
    assert work.Test()
    assert x == 7
    told = [event for event in log if event[0] not in ("read my q",)]
    assert told == [
        ("read its q", WORDS), ("fence", ""), ("read my d", WORDS + 1), ("read its d", WORDS + 1),
        ("fence", ""), ("write my q", READ_AT),
    ]  # fmt: skip


def test_a_line_is_written_again_when_both_have_read_it() -> None:
    few, log, its = member()
    xs = [np.array([number], np.float64) for number in range(LINES + 1)]
    buffers = [as_buffer(x, writable=True) for x in xs]
    plan = few.plan(Reduction.of(as_op("sum"), buffers[0].element, 2), 8)
    works = [plan.request(few, plan, buffer, buffer) for buffer in buffers]
    last, memory = works[-1], memoryview(its.obj).cast("d")
    assert [work._is_shown for work in works] == [True] * LINES + [False]
    for number in range(1, LINES + 1):  # the other has come to these
        at = number % LINES * WORDS
        its[at], memory[at + 1] = few.mine.view[at], 10
    its[READ_AT] = 1  # and has read the first, which this one has not
    assert not few.may_write(LINES + 1)
    assert not last.Test()  # it reads all before it
    assert [float(x[0]) for x in xs] == [*range(10, 10 + LINES), LINES]
    assert last._is_shown
    at = (LINES + 1) % LINES * WORDS
    its[at], memory[at + 1] = few.mine.view[at], 20
    log.clear()
    assert last.Test()
    assert xs[-1] == LINES + 20
    assert not few.pending
