"""Calls of several ranks as words: pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpdist.algorithms.shared.calls import OPERATIONS, are_in_step, begin_alike, call_word, misfit
from mpdist.errors import CollectiveMismatch, SizeMismatch

WHERE = "'world' (rank 0 of 2)"


@given(st.sampled_from(OPERATIONS), st.integers(0, 2**41 - 1), st.integers(0, 2**40), st.booleans(), st.booleans())
def test_equal_calls_go_together_whatever_their_size_and_a_word_holds_them(
    op: str, nbytes: int, number: int, is_one_round: bool, is_request: bool
) -> None:
    word = call_word(op, nbytes, number, is_one_round, is_request)
    assert 0 <= word < 2**63
    assert misfit(WHERE, {0: word, 1: word}, word) is None


def test_sizes_that_differ_are_told_by_rank() -> None:
    calls = {1: call_word("gather", 8, 5, True), 0: call_word("gather", 1000, 5, True)}
    why = misfit(WHERE, calls, calls[0])
    assert isinstance(why, SizeMismatch)
    assert "gather on 'world' (rank 0 of 2): " in str(why)
    assert "(rank 0: 1000, rank 1: 8)" in str(why)
    assert are_in_step(calls.values())


def test_operations_that_differ_are_told_by_rank() -> None:
    calls = {0: call_word("reduce", 8, 5, True), 1: call_word("broadcast", 8, 5, True)}
    why = misfit(WHERE, calls, calls[1])
    assert isinstance(why, CollectiveMismatch)
    assert "(rank 0: reduce, rank 1: broadcast)" in str(why)
    assert why.calls == {0: "reduce", 1: "broadcast"}


@pytest.mark.parametrize("op", ["reduce", "broadcast"])
def test_a_word_of_another_round_tells_nothing(op: str) -> None:
    calls = {0: call_word("reduce", 8, 5, True), 1: call_word(op, 8, 3, True)}
    why = misfit(WHERE, calls, calls[0])
    assert isinstance(why, SizeMismatch)
    assert "(rank 0: 8, rank 1: another operation, or fewer)" in str(why)
    assert not are_in_step(calls.values())


def test_ranks_of_which_one_has_more_rounds_are_not_in_step() -> None:
    calls = [call_word("reduce", 8, 5, is_one_round) for is_one_round in (True, False)]
    assert not are_in_step(calls)
    assert begin_alike(calls)
    why = misfit(WHERE, {0: call_word("gather", 9, 5, True), 1: calls[1]}, calls[1])
    assert isinstance(why, CollectiveMismatch)


def test_as_many_bytes_of_another_op_or_type_are_told_from_each_other_where_one_is_a_request() -> None:
    calls = {rank: call_word("all_reduce", 8, 5, True, is_request=rank == 0) for rank in range(2)}
    why = misfit(WHERE, calls, calls[0])
    assert isinstance(why, CollectiveMismatch)
    assert "the ranks' ops or element types differ" in str(why)
    assert are_in_step(calls.values())
