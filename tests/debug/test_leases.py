"""Leases: whose memory is whose."""

from __future__ import annotations

import sys
import threading
import weakref
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpdist.debug.leases import Leases, Span, checksum
from mpdist.errors import UsageError
from mpdist.memory import as_buffer


@pytest.mark.parametrize(
    ("other", "clashes"),
    [
        (Span(0, 10, True), True),
        (Span(9, 1, True), True),
        (Span(10, 5, True), False),
        (Span(3, 2, False), True),
        (Span(3, 0, True), False),
    ],
)
def test_a_written_span_clashes_with_what_it_overlaps(other: Span, clashes: bool) -> None:
    mine = Span(0, 10, True)
    assert mine.clashes(other) is clashes
    assert other.clashes(mine) is clashes


def test_reading_the_same_memory_twice_is_allowed() -> None:
    assert not Span(0, 10, False).clashes(Span(5, 10, False))


def test_a_lease_ends_with_its_operation() -> None:
    leases = Leases()
    is_over = False
    leases.take("recv from 1", [Span(0, 10, True)], lambda: is_over)
    with pytest.raises(
        UsageError, match=r"send: its buffer overlaps in memory with that of recv from 1, which is pend"
    ):
        leases.check("send", [Span(4, 1, False)])
    is_over = True
    leases.check("send", [Span(4, 1, False)])


SPANS = st.builds(Span, st.integers(0, 300), st.sampled_from([0, 1, 3, 8, 60, 200]), st.booleans())


@given(st.lists(st.tuples(st.lists(SPANS, max_size=2), st.booleans()), max_size=60))
def test_a_look_at_one_place_finds_what_a_look_at_all_finds(calls: list[tuple[list[Span], bool]]) -> None:
    """Each call checks its spans, and takes them where they are free; some end the oldest lease before."""
    leases = Leases()
    pending: list[tuple[list[Span], list[bool]]] = []
    for spans, ends in calls:
        if ends and pending:
            pending.pop(0)[1].append(True)
        if any(mine.clashes(other) for mine in spans for others, _ in pending for other in others):
            with pytest.raises(UsageError):
                leases.check("recv", spans)
            continue
        leases.check("recv", spans)
        is_over: list[bool] = []
        leases.take("recv", spans, partial(bool, is_over))
        pending.append((spans, is_over))


def test_what_is_over_is_let_go_of_though_thousands_are_pending() -> None:
    """A look at each of them for each call took a minute for ten thousand."""
    leases = Leases()
    asked = 0

    def never() -> bool:
        nonlocal asked
        asked += 1
        return False

    for number in range(10_000):
        span = Span(100 * number, 100, True)
        leases.check("recv", [span])
        leases.take("recv", [span], never)
    assert asked < 200_000
    is_over = np.ones(1).all  # of an array of its own, as a Work holds its buffer
    array = weakref.ref(is_over.__self__)
    leases.take("recv", [Span(0, 1, False)], is_over)
    del is_over
    for _ in range(1000):
        leases.check("send", [Span(2_000_000, 10, False)])
    assert array() is None
    assert len(leases._held) == 10_000
    assert not any(leases._read._sorted.values())


@pytest.mark.parametrize("dtype", ["f4", "c16", "?", "f2"])
def test_a_checksum_sees_any_byte(dtype: str) -> None:
    x = np.zeros(100, dtype)
    buffers = [as_buffer(x), as_buffer(np.empty(0, dtype))]
    before = checksum(buffers)
    assert checksum(buffers) == before
    x.view("u1")[57] = 1
    assert checksum(buffers) != before


def test_threads_take_leases_at_the_same_time() -> None:
    """One let go of a lease while another looked at it: IndexError, and mistakes that were not seen."""
    leases = Leases()
    failures: list[BaseException] = []

    def work(start: int) -> None:
        try:
            for number in range(1500):
                span, is_over = Span(start + number % 50 * 1000, 1000, True), []
                leases.check("recv", [span])
                leases.take("recv", [span], partial(bool, is_over))
                with pytest.raises(UsageError):
                    leases.check("send", [span])
                is_over.append(True)
        except BaseException as error:
            failures.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(number * 1_000_000,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert failures == []
