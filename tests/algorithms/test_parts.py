"""Slices of arrays, and ranks by node: pure."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpdist.algorithms.cluster import by_node
from mpdist.algorithms.shared.reduction import cuts
from mpdist.algorithms.shared.team import RESULT_BYTES, ROUND_BYTES


@given(st.integers(0, 10**7), st.integers(1, 16), st.integers(0, 16))
def test_slices_cover_everything_once_and_begin_on_lines(count: int, parts: int, more: int) -> None:
    at = cuts(count, parts, parts + more)
    assert len(at) == parts + more + 1
    assert (at[0], at[-1]) == (0, count)
    assert all(low <= high for low, high in pairwise(at))
    assert all(low % 64 == 0 or low == count for low in at)
    assert at[parts:] == (count,) * (more + 1)


@given(st.integers(0, 10**7), st.integers(1, 16))
def test_slices_differ_by_less_than_two_lines_but_for_the_last_ones(count: int, parts: int) -> None:
    widths = [high - low for low, high in pairwise(cuts(count, parts, parts))]
    assert max(widths) - count / parts < 64
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
@given(parts=st.integers(1, 128))
def test_a_slice_of_a_round_fits_a_result_slot(itemsize: int, parts: int) -> None:
    width = min(ROUND_BYTES, parts * RESULT_BYTES) // itemsize
    widths = [high - low for low, high in pairwise(cuts(width, parts, parts))]
    assert max(widths) * itemsize <= RESULT_BYTES


def test_ranks_by_node_in_the_order_of_their_lowest() -> None:
    assert by_node([0, 0, 2, 2]) == [[0, 1], [2, 3]]
    assert by_node([5, 1, 5, 1, 9]) == [[0, 2], [1, 3], [4]]
    assert by_node(["b", "b", "a"]) == [[0, 1], [2]]
    assert by_node([3]) == [[0]]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_every_rank_is_on_one_node(nodes: list[int]) -> None:
    groups = by_node(nodes)
    assert sorted(rank for group in groups for rank in group) == list(range(len(nodes)))
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for group in groups:
        assert len({nodes[rank] for rank in group}) == 1
        assert group == sorted(group)
