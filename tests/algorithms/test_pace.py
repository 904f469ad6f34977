"""Pace: the faster way is found, kept, tried against the other now and then, and left when it gets slow."""

from __future__ import annotations

from collections.abc import Callable

from mpdist.algorithms.shared.pace import SAMPLES, TRIED_EVERY, Pace

NBYTES = 1 << 20


def ways(pace: Pace, seconds: Callable[[bool], float], count: int, nbytes: int = NBYTES) -> list[bool]:
    """By which way so many collectives go; what the first member tells with one is heard before the next."""
    taken = []
    for _ in range(count):
        told, way = pace.word, pace.is_through_slots(nbytes)
        pace.took(nbytes, way, seconds(way))
        pace.hear(told)
        taken.append(way)
    return taken


def slots_fast(through_slots: bool) -> float:
    return 1.0 if through_slots else 2.0


def slots_slow(through_slots: bool) -> float:
    return 4.0 if through_slots else 2.0


def test_nobody_goes_through_slots_before_all_have_heard_of_it() -> None:
    pace = Pace()
    assert not pace.is_through_slots(NBYTES)
    for _ in range(SAMPLES):
        pace.took(NBYTES, False, 1.0)
    assert pace.word
    assert not pace.is_through_slots(NBYTES)
    pace.hear(pace.word)
    assert pace.is_through_slots(NBYTES)


def test_the_faster_way_is_kept_and_the_other_tried_now_and_then() -> None:
    for seconds, faster in ((slots_fast, True), (slots_slow, False)):
        taken = ways(Pace(), seconds, 10 * TRIED_EVERY)
        assert taken.count(faster) / len(taken) > 0.95
        late = taken[3 * SAMPLES :]
        assert late.count(not faster) in range(SAMPLES, 6 * SAMPLES)


def test_a_way_that_gets_slow_is_left_at_once() -> None:
    pace = Pace()
    ways(pace, slots_fast, 50)
    assert not any(ways(pace, slots_slow, 50)[2 * SAMPLES :])


def test_a_way_that_gets_fast_is_found() -> None:
    pace = Pace()
    ways(pace, slots_slow, 50)
    assert all(ways(pace, slots_fast, 5 * TRIED_EVERY)[-TRIED_EVERY:])


def test_a_time_that_something_else_has_lengthened_changes_nothing() -> None:
    pace = Pace()
    ways(pace, slots_fast, 50)
    times = iter([1.0, 90.0, 90.0, 1.0] * 10)
    assert all(ways(pace, lambda _: next(times), 40))


def test_each_size_has_its_own_way() -> None:
    pace = Pace()
    ways(pace, slots_fast, 50)
    ways(pace, slots_slow, 50, 64 * NBYTES)
    assert pace.is_through_slots(NBYTES + 8)
    assert not pace.is_through_slots(64 * NBYTES)
    assert not pace.is_through_slots(0)


def test_a_way_that_is_fast_only_after_a_pause_is_left() -> None:
    """As slots are that a core finds in no cache for once."""
    pace = Pace()
    count = 0

    def seconds(through_slots: bool) -> float:
        nonlocal count
        count += 1
        return 2.0 if not through_slots else 1.0 if count % 5 == 0 else 4.0

    assert ways(pace, seconds, 10 * TRIED_EVERY).count(False) > 9 * TRIED_EVERY
