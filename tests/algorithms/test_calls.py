"""Calls of several ranks as words: pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpdist.algorithms.shared.calls import OPERATIONS, are_in_step, begin_alike, call_word, kind_of, misfit
from mpdist.errors import CollectiveMismatch, SizeMismatch
from mpdist.memory import as_op
from mpdist.memory.elements import BY_NAME, ELEMENTS
from mpdist.memory.ops import OP_NAMES, ReduceOp, premul_sum

WHERE = "'world' (rank 0 of 2)"
OPS = (*(as_op(name) for name in OP_NAMES), premul_sum(2), as_op(lambda a, b: a))
KINDS = {kind_of(element, op): (element, op) for element in ELEMENTS for op in (None, *OPS)}
BYTE = kind_of(BY_NAME["uint8"])
FLOAT = BY_NAME["float32"]


def test_each_op_of_each_type_has_a_kind_of_its_own() -> None:
    assert len(KINDS) == len(ELEMENTS) * (len(OPS) + 1)


@given(
    st.sampled_from(OPERATIONS),
    st.integers(0, 2**41 - 1),
    st.sampled_from(sorted(KINDS)),
    st.integers(0, 2**40),
    st.booleans(),
    st.booleans(),
)
def test_equal_calls_go_together_whatever_their_size_and_a_word_holds_them(
    op: str, count: int, kind: int, number: int, is_one_round: bool, is_request: bool
) -> None:
    nbytes = count * KINDS[kind][0].itemsize
    word = call_word(op, nbytes, kind, number, is_one_round, is_request)
    assert 0 <= word < 2**63
    assert misfit(WHERE, {0: word, 1: word}, word) is None


@given(st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(KINDS)), st.integers(1, 2**30))
def test_as_many_bytes_of_another_op_or_type_do_not_go_together(first: int, second: int, times: int) -> None:
    nbytes = 16 * times
    calls = {0: call_word("reduce", nbytes, first, 5, True), 1: call_word("reduce", nbytes, second, 5, True)}
    why = misfit(WHERE, calls, calls[0])
    if first == second:
        assert why is None
        return
    assert isinstance(why, CollectiveMismatch)
    assert are_in_step(calls.values())
    for rank, kind in enumerate((first, second)):
        element, op = KINDS[kind]
        assert f"rank {rank}: {named(op)}{element.name}" in str(why)
        assert why.calls[rank] == named(op) + element.name


def named(op: ReduceOp | None) -> str:
    if op is None:
        return ""
    return f"{'a function' if op.function else op.name} of "


def test_sizes_that_differ_are_told_by_rank() -> None:
    calls = {1: call_word("gather", 8, BYTE, 5, True), 0: call_word("gather", 1000, BYTE, 5, True)}
    why = misfit(WHERE, calls, calls[0])
    assert isinstance(why, SizeMismatch)
    assert "gather on 'world' (rank 0 of 2): " in str(why)
    assert "(rank 0: 1000, rank 1: 8)" in str(why)
    assert are_in_step(calls.values())


def test_operations_that_differ_are_told_by_rank() -> None:
    calls = {0: call_word("reduce", 8, BYTE, 5, True), 1: call_word("broadcast", 8, BYTE, 5, True)}
    why = misfit(WHERE, calls, calls[1])
    assert isinstance(why, CollectiveMismatch)
    assert "(rank 0: reduce, rank 1: broadcast)" in str(why)
    assert why.calls == {0: "reduce", 1: "broadcast"}


@pytest.mark.parametrize("op", ["reduce", "broadcast"])
def test_a_word_of_another_round_tells_nothing(op: str) -> None:
    calls = {0: call_word("reduce", 8, BYTE, 5, True), 1: call_word(op, 8, BYTE, 3, True)}
    why = misfit(WHERE, calls, calls[0])
    assert isinstance(why, SizeMismatch)
    assert "(rank 0: 8, rank 1: another operation, or fewer)" in str(why)
    assert not are_in_step(calls.values())


def test_ranks_of_which_one_has_more_rounds_are_not_in_step() -> None:
    calls = [call_word("reduce", 8, BYTE, 5, is_one_round) for is_one_round in (True, False)]
    assert not are_in_step(calls)
    assert begin_alike(calls)
    why = misfit(WHERE, {0: call_word("gather", 9, BYTE, 5, True), 1: calls[1]}, calls[1])
    assert isinstance(why, CollectiveMismatch)


def test_a_request_and_a_program_of_one_size_are_told_from_each_other() -> None:
    calls = {
        0: call_word("all_reduce", 8, kind_of(FLOAT, as_op("sum")), 5, True, is_request=True),
        1: call_word("all_reduce", 8, kind_of(FLOAT, premul_sum(2.0)), 5, True),
    }
    why = misfit(WHERE, calls, calls[0])
    assert isinstance(why, CollectiveMismatch)
    assert "ops or element types differ (rank 0: sum of float32, rank 1: premul_sum of float32)" in str(why)
    assert are_in_step(calls.values())
