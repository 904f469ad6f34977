"""Buckets: which arrays travel together; pure functions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpdist.gradients.buckets import agreed_order, assign_buckets, positions_of


def test_bucket_is_closed_when_it_holds_enough() -> None:
    assert assign_buckets([4, 4, 4, 4], ["f"] * 4, [3, 2, 1, 0], 8) == [[3, 2], [1, 0]]


def test_array_is_never_cut() -> None:
    assert assign_buckets([4, 100, 4], ["f"] * 3, [0, 1, 2], 8) == [[0, 1], [2]]


def test_buckets_get_smaller_towards_the_end() -> None:
    mib = 1024**2
    buckets = assign_buckets([mib // 4] * 48, ["f"] * 48, range(48), 8 * mib)
    assert [len(bucket) / 4 for bucket in buckets] == [3, 2.25, 1.75, 1.25, 1, 1, 1, 0.75]
    assert [len(bucket) for bucket in assign_buckets([mib] * 48, ["f"] * 48, range(48), 8 * mib)][:3] == [8, 8, 8]


def test_first_bucket_may_be_smaller() -> None:
    assert assign_buckets([4] * 6, ["f"] * 6, range(6), 12, 12, first_bytes=5) == [[0, 1], [2, 3, 4], [5]]
    assert assign_buckets([4] * 4, ["f"] * 4, range(4), 8, 8, first_bytes=100) == [[0, 1], [2, 3]]
    assert assign_buckets([4] * 4, ["f", "d", "f", "d"], range(4), 8, 8, first_bytes=4) == [[0], [2], [1, 3]]


def test_types_are_not_mixed_and_buckets_start_in_the_order_in_which_they_become_full() -> None:
    assert assign_buckets([4, 4, 4, 4], ["f", "d", "f", "d"], [0, 1, 2, 3], 100) == [[0, 2], [1, 3]]
    assert assign_buckets([4, 4, 4, 4], ["f", "d", "d", "f"], [0, 1, 2, 3], 100) == [[1, 2], [0, 3]]


def test_order_of_all_ranks_is_that_of_the_mean_place() -> None:
    first, second = positions_of([2, 0, 1], 3), positions_of([2, 1, 0], 3)
    assert agreed_order([a + b for a, b in zip(first, second, strict=True)]) == [2, 0, 1]


def test_arrays_that_were_not_seen_come_last_from_high_to_low() -> None:
    assert positions_of([1], 4) == [3, 0, 2, 1]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from("fd")), max_size=30),
    st.integers(1, 100),
    st.randoms(use_true_random=False),
)
def test_each_array_is_in_one_bucket_in_order(arrays: list[tuple[int, str]], limit: int, random: object) -> None:
    nbytes, kinds = [size for size, _ in arrays], [kind for _, kind in arrays]
    order = list(range(len(arrays)))
    random.shuffle(order)  # type: ignore[attr-defined]
    buckets = assign_buckets(nbytes, kinds, order, limit)
    assert sorted(index for bucket in buckets for index in bucket) == sorted(order)
    place = {index: position for position, index in enumerate(order)}
    lasts = [place[bucket[-1]] for bucket in buckets]
    assert lasts == sorted(lasts)
    for bucket in buckets:
        assert [place[index] for index in bucket] == sorted(place[index] for index in bucket)
        assert len({kinds[index] for index in bucket}) == 1
        assert sum(nbytes[index] for index in bucket[:-1]) < limit
