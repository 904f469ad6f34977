"""Fingerprints: what differs is found, what may differ is not."""

from __future__ import annotations

import pytest

from mpdist.debug.fingerprint import NBYTES, Call, describe_mismatch, is_mismatch, ranks_text


@pytest.mark.parametrize(
    "call",
    [
        Call("all_reduce", "float32 x 1024 sum", "train.py:88"),
        Call("barrier"),
        Call("split", "color None", "/päth/with spaces/train.py:1"),
    ],
)
def test_a_call_survives_its_record(call: Call) -> None:
    assert len(call.pack()) == NBYTES
    assert Call.unpack(call.pack()) == call


def test_long_details_that_differ_at_their_end_still_differ() -> None:
    one, other = (Call("reduce_scatter", f"float32 x {[7] * 500 + [last]} sum", "x" * 2000) for last in (1, 2))
    records = [Call.unpack(call.pack()) for call in (one, other)]
    assert all(len(call.pack()) == NBYTES for call in (one, other))
    assert is_mismatch(dict(enumerate(records)))
    assert not is_mismatch({0: records[0], 1: Call.unpack(one.pack())})


@pytest.mark.parametrize(
    "other",
    [
        Call("broadcast", "float32 x 10 sum"),
        Call("all_reduce", "float64 x 10 sum"),
        Call("all_reduce", "float32 x 11 sum"),
        Call("all_reduce", "float32 x 10 max"),
    ],
)
def test_a_difference_in_what_must_be_equal_is_a_mismatch(other: Call) -> None:
    call = Call("all_reduce", "float32 x 10 sum", "a.py:1")
    assert is_mismatch({0: call, 1: call, 2: other})


def test_lines_colors_addresses_and_forgotten_details_may_differ() -> None:
    assert not is_mismatch({0: Call("barrier", "", "a.py:1"), 1: Call("barrier", "", "b.py:2")})
    assert not is_mismatch({0: Call("split", "color 0"), 1: Call("split", "color 1")})
    partial = "int32 x 4 functools.partial(<function f at 0x{}>)"
    assert not is_mismatch({0: Call("scan", partial.format("7f00")), 1: Call("scan", partial.format("7fab"))})
    assert not is_mismatch({0: Call("all_reduce", None), 1: Call("all_reduce", "float32 x 4 sum")})
    assert is_mismatch({0: Call("scan", "a"), 1: Call("scan", None), 2: Call("scan", "b")})


def test_the_text_groups_ranks_of_one_call() -> None:
    ours, theirs = (
        Call("all_reduce", "float32 x 1024 sum", "train.py:88"),
        Call("broadcast", "float32 x 8 from 0", "t.py:9"),
    )
    text = describe_mismatch("world", 41, {0: ours, 1: ours, 2: ours, 3: theirs})
    assert text.splitlines() == [
        "call 41 on 'world' differs between ranks:",
        "    ranks 0-2: all_reduce float32 x 1024 sum  (train.py:88)",
        "    rank 3:    broadcast  float32 x 8 from 0  (t.py:9)",
    ]


def test_ranks_are_listed_in_runs() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([5, 0, 2, 1]) == "ranks 0-2, 5"
