"""Leases: whose memory is whose."""

from __future__ import annotations

import numpy as np
import pytest

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


@pytest.mark.parametrize("dtype", ["f4", "c16", "?", "f2"])
def test_a_checksum_sees_any_byte(dtype: str) -> None:
    x = np.zeros(100, dtype)
    buffers = [as_buffer(x), as_buffer(np.empty(0, dtype))]
    before = checksum(buffers)
    assert checksum(buffers) == before
    x.view("u1")[57] = 1
    assert checksum(buffers) != before
