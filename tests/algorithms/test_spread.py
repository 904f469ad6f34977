"""Spread: where a member's rounds begin, told by how long it takes to write them; the clock is made up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpdist.algorithms.shared import spread
from mpdist.algorithms.shared.spread import CYCLE, LINE_BYTES, SAMPLES, Spread

MIB = 2**20
SLOT_BYTES, LARGE_BYTES = MIB, 4 * MIB
SLOTS, LARGE = (0, SLOT_BYTES), (16 * MIB, 16 * MIB + LARGE_BYTES)


def made(has_room: bool = True) -> Spread:
    return Spread(SLOTS, lambda: LARGE if has_room else None, LARGE_BYTES, lambda at, nbytes: None)


def is_wide(start: int) -> bool:
    return start >= LARGE[0]


class Machine:
    """Writes into slots and has a clock: a place that one of the last `kept` bytes lies in takes longer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kept: int, factor: float) -> None:
        self.now, self.kept, self.factor = 1.0, kept, factor
        self.written: list[tuple[int, int]] = []
        self.number = 0
        monkeypatch.setattr(spread, "perf_counter", lambda: self.now)

    def write(self, place: Spread, nbytes: int) -> int:
        """One round, in the next slot; returns where."""
        side = self.number % 2
        self.number += 1
        start = place.begin(side, nbytes)
        recent = self.written[-(self.kept // nbytes) :]
        self.now += nbytes * 1e-10 * (self.factor if (side, start) in recent else 1)
        self.written.append((side, start))
        place.end(nbytes)
        return start


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, SLOT_BYTES)), max_size=3 * CYCLE), st.booleans())
def test_a_round_lies_in_its_slot_on_lines_of_its_own(rounds: list[tuple[int, int]], has_room: bool) -> None:
    place = made(has_room)
    for side, nbytes in rounds:
        start = place.begin(side, nbytes)
        place.end(nbytes)
        assert start % LINE_BYTES == 0
        if is_wide(start):
            assert LARGE[side] <= start <= LARGE[side] + LARGE_BYTES - nbytes
        else:
            assert start == SLOTS[side]
        assert has_room or not is_wide(start)


@pytest.mark.parametrize("nbytes", [16384, 65536, 524288, MIB])
def test_all_of_a_slot_is_used_where_what_others_have_is_slow_to_write(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, place = Machine(monkeypatch, 4 * MIB, 4), made()
    for _ in range(2 * SAMPLES):
        machine.write(place, nbytes)
    usual = {machine.write(place, nbytes) for _ in range(CYCLE - 2 * SAMPLES)}
    assert all(map(is_wide, usual))
    assert len(usual) == min(2 * LARGE_BYTES // nbytes, CYCLE - 2 * SAMPLES)
    machine.factor = 1.2  # moved to cores that share a cache
    for _ in range(2 * SAMPLES):
        machine.write(place, nbytes)
    assert not any(is_wide(machine.write(place, nbytes)) for _ in range(CYCLE - 2 * SAMPLES))


def test_where_others_keep_it_a_place_is_not_taken_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, place = Machine(monkeypatch, 4 * MIB, 4), made()
    starts = [machine.write(place, 65536) for _ in range(CYCLE)][2 * SAMPLES :]
    assert all(len(set(starts[first : first + 60 : 2])) == 30 for first in range(len(starts) - 60))


def test_larger_slots_are_asked_for_when_enough_rounds_have_come_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    machine, place = (
        Machine(monkeypatch, 4 * MIB, 4),
        Spread(SLOTS, lambda: asked.append(1), LARGE_BYTES, lambda at, nbytes: None),
    )
    for _ in range(SAMPLES):
        machine.write(place, 262144)
    assert not asked
    starts = {machine.write(place, 262144) for _ in range(3 * CYCLE)}
    assert asked == [1]
    assert starts == set(SLOTS)


def test_a_round_whose_writing_was_interrupted_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, place = Machine(monkeypatch, 4 * MIB, 4), made()
    machine.written += [(0, SLOTS[0]), (1, SLOTS[1])]
    for number in range(2 * SAMPLES):
        if number % 3 == 0 and number != 2 * SAMPLES - 1:
            place.begin(number % 2, 65536)
            machine.now += 1000
        else:
            machine.write(place, 65536)
    assert is_wide(machine.write(place, 65536))


def test_writing_that_takes_longer_for_other_reasons_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are met for the first time, and caches that a pause has filled with other things."""
    machine, place = Machine(monkeypatch, 4 * MIB, 1), made()
    for number in range(2 * SAMPLES):
        place.begin(number % 2, MIB)
        machine.now += 0.0006 if number < 2 else 0.0001 if number in (5, 6, 7) else 0.00003
        place.end(MIB)
    assert not is_wide(machine.write(place, MIB))


def test_it_tells_when_it_tries_places(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, place = Machine(monkeypatch, 4 * MIB, 4), made()
    tried = []
    for _ in range(2 * CYCLE):
        machine.write(place, 65536)
        tried.append(place.is_trying)
    assert tried == 2 * ([True] * 2 * SAMPLES + [False] * (CYCLE - 2 * SAMPLES))


@pytest.mark.parametrize("nbytes", [16384, 100_000, MIB])
def test_each_place_of_a_large_slot_is_mapped_once_before_it_is_written(nbytes: int) -> None:
    mapped: set[int] = set()

    def map_now(at: int, count: int) -> None:
        assert any(start <= at and at + count <= start + LARGE_BYTES for start in LARGE)
        pages = set(range(at, at + count, 4096))
        assert not mapped & pages
        mapped.update(pages)

    place = Spread(SLOTS, lambda: LARGE, LARGE_BYTES, map_now)
    for number in range(2 * SAMPLES):
        start = place.begin(number % 2, nbytes)
        assert not is_wide(start) or mapped >= set(range(start // 4096 * 4096, start + nbytes, 4096))
        place.end(nbytes)
    assert mapped
