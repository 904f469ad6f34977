"""Pace: the faster way is found, kept, tried against the other now and then, and left when it gets slow."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mpdist.algorithms.shared import pace as paces
from mpdist.algorithms.shared.pace import COLD, PAUSE_SECONDS, SAMPLES, TRIED_EVERY, Pace

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


class Clock:
    """Of a pace, so that pauses are made up, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1.0
        monkeypatch.setattr(paces, "perf_counter", lambda: self.now)

    def bursts(self, pace: Pace, count: int, length: int, seconds: Callable[[bool, int], float]) -> list[bool]:
        """By which way so many times so many collectives in a row go, with pauses between."""
        taken = []
        for _ in range(count):
            self.now += 2 * PAUSE_SECONDS
            for place in range(length):
                told, way = pace.word, pace.is_through_slots(NBYTES)
                took = seconds(way, place)
                self.now += took
                pace.took(NBYTES, way, took)
                pace.hear(told)
                taken.append(way)
        return taken


def test_the_first_after_a_pause_do_not_count_where_more_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are twice as fast, but not for the first after a pause, which are most of what is measured at last."""
    clock, pace = Clock(monkeypatch), Pace()

    def seconds(through_slots: bool, place: int) -> float:
        return (5e-4 if place < COLD else 1e-4) if through_slots else 2e-4

    clock.bursts(pace, 1, 40, seconds)
    taken = clock.bursts(pace, 100, COLD + 1, seconds)
    assert taken.count(True) > 0.9 * len(taken)


def test_where_all_come_after_a_pause_they_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    taken = clock.bursts(Pace(), 100, 1, lambda through_slots, place: 1e-4 if through_slots else 3e-4)
    assert taken.count(True) > 0.9 * len(taken)
    taken = clock.bursts(Pace(), 100, 1, lambda through_slots, place: 3e-4 if through_slots else 1e-4)
    assert taken.count(False) > 0.9 * len(taken)
