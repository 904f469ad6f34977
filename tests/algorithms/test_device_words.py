"""Words: all members decide alike, whenever they look, and whoever runs ahead; pure."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

import pytest

from mpdist.algorithms.devices.words import (
    FACTS,
    GIVEN_UP,
    SINCE,
    STATE,
    Calls,
    State,
    handle_in,
    handle_of,
    joint_start,
    pack_handle,
    words_needed,
    words_of_handle,
)

HANDLE = bytes(range(200, 256)) + bytes(8)


def lines_of(size: int) -> list[memoryview]:
    return [memoryview(array("q", [0] * words_needed(5))) for _ in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(30))
def test_all_that_come_with_a_device_learn_the_same(size: int, seed: int) -> None:
    chance = random.Random(seed)
    lines = lines_of(size)
    calls = [Calls(lines, rank) for rank in range(size)]
    comes = [[chance.random() < 0.8 for _ in range(60)] for _ in range(size)]
    learnt: list[dict[int, object]] = [{} for _ in range(size)]

    def member(rank: int) -> Iterator[None]:
        for number in range(1, 60):
            yield
            if not comes[rank][number]:
                calls[rank].tell_host(number)
                continue
            calls[rank].tell_device(number, [1000 * number + rank] * FACTS)
            while not calls[rank].have_come(number):
                yield
            found = calls[rank].facts(number)
            learnt[rank][number] = None if found is None else [facts[0] for facts in found]

    runs = {rank: member(rank) for rank in range(size)}
    while runs:
        rank = chance.choice(list(runs))
        for _ in range(chance.choice([1, 1, 50])):  # who comes as a host runs far ahead
            if next(runs[rank], runs) is runs:
                del runs[rank]
                break
    for number in range(1, 60):
        everyone = all(comes[rank][number] for rank in range(size))
        wanted = [1000 * number + rank for rank in range(size)] if everyone else None
        for rank in range(size):
            if comes[rank][number]:
                assert learnt[rank][number] == wanted


class Watched:
    """A line that looks at itself after each store."""

    def __init__(self, line: memoryview) -> None:
        self.line = line
        self.number = 0
        self.looks = 0
        self.reader = Calls([line, line], 1)

    def __getitem__(self, at: int) -> int:
        word: int = self.line[at]
        return word

    def __setitem__(self, at: int, word: int) -> None:
        self.line[at] = word
        self.looks += 1
        if self.number > 1:
            found = self.reader.facts(self.number - 1)
            assert found is not None
            assert found[0][0] == self.number - 1


def test_while_a_member_tells_of_the_next_collective_the_last_one_is_found() -> None:
    line, other = lines_of(2)
    watched = Watched(line)
    writer = Calls([watched, other], 0)  # type: ignore[list-item]  # read and written like one
    for number in range(1, 8):
        watched.number = number
        writer.tell_device(number, [number] * FACTS)
    assert watched.looks == 7 * (FACTS + 2)


def test_all_are_joint_from_the_last_ones_start_on() -> None:
    lines = lines_of(3)
    for number, line in enumerate(lines):
        assert joint_start(lines) is None
        line[SINCE], line[STATE] = 5 + number % 2, State.PROVEN
    assert joint_start(lines) == 6
    lines[1][STATE] = State.REFUSED
    assert joint_start(lines) is None


def test_handles_are_kept_as_words() -> None:
    (line,) = lines_of(1)
    for index in range(5):
        pack_handle(line, index, HANDLE[index:] + HANDLE[:index])
    assert [handle_of(line, index) for index in range(5)] == [HANDLE[i:] + HANDLE[:i] for i in range(5)]
    assert (line[STATE], line[GIVEN_UP]) == (0, 0)
    assert handle_in([1, 2, *words_of_handle(HANDLE), 3], 2) == HANDLE
