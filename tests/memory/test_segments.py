"""Segments and openings: what an owner shows, and what others keep open of it."""

from __future__ import annotations

import pytest

from mpdist.errors import DeviceFailed
from mpdist.memory.openings import Openings
from mpdist.memory.segments import ENTRIES, Segment, Segments

NBYTES = 1000
AT = 640


class Library:
    """Takes segments from a device whose handles say no more than the address, so that they come again."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}  # by start
        self._next = 0
        self.opened: list[bytes] = []
        self.log: list[str] = []
        self.can_open = True

    def take(self, start: int) -> None:
        self._next += 1
        self.numbers[start] = self._next

    def number_of(self, address: int) -> int:
        return self.numbers.get(address // NBYTES * NBYTES, 0)

    def segment(self, address: int) -> Segment | None:
        start = address // NBYTES * NBYTES
        self.log.append(f"segment {start}")
        return Segment(start, NBYTES, handle_of(start), self.numbers[start])

    def open(self, handle: bytes) -> int:
        self.log.append("open")
        if not self.can_open or handle in self.opened:
            raise DeviceFailed("already mapped")
        self.opened.append(handle)
        return 7_000_000 + int(handle)

    def close(self, address: int) -> None:
        self.log.append("close")
        self.opened.remove(handle_of(address - 7_000_000))


def handle_of(start: int) -> bytes:
    return str(start).encode()


@pytest.fixture
def library() -> Library:
    return Library()


def words() -> memoryview:
    return memoryview(bytearray(8 * ENTRIES)).cast("q")


def test_a_segment_is_asked_for_once_and_has_a_word(library: Library) -> None:
    seen = words()
    segments = Segments(library, seen, AT)  # type: ignore[arg-type]  # what it asks for
    library.take(3000)
    library.take(5000)
    for address, start, word in ((3010, 3000, 0), (3900, 3000, 0), (5000, 5000, 1), (3000, 3000, 0)):
        assert segments.find(address, 100) == (Segment(start, NBYTES, handle_of(start), 1 + word), AT + 8 * word)
    assert seen.tolist()[:3] == [1, 2, 0]
    assert library.log == ["segment 3000", "segment 5000"]


def test_what_reaches_out_of_it_or_has_no_number_is_not_shown(library: Library) -> None:
    segments = Segments(library, words(), AT)  # type: ignore[arg-type]
    library.take(3000)
    assert segments.find(4500, 10) is None
    for _ in range(2):
        assert segments.find(3950, 51) is None
        assert segments.find(3950, 50) is not None


def test_a_segment_that_is_gone_leaves_its_word_to_others(library: Library) -> None:
    seen = words()
    segments = Segments(library, seen, AT)  # type: ignore[arg-type]
    for start in (3000, 4000):
        library.take(start)
        segments.find(start, 1)
    del library.numbers[3000]
    segments.refresh()
    assert seen.tolist()[:2] == [0, 2]
    library.take(4000)  # another one at this address
    library.take(6000)
    segments.find(6000, 1)
    assert seen.tolist()[:3] == [4, 0, 0]


def test_when_all_words_are_taken_the_oldest_goes(library: Library) -> None:
    seen = words()
    segments = Segments(library, seen, AT)  # type: ignore[arg-type]
    for number in range(ENTRIES + 3):
        library.take(NBYTES * number)
        segments.find(NBYTES * number, 1)
    assert seen.tolist() == [17, 18, 19, *range(4, ENTRIES + 1)]


def test_a_segment_stays_open_as_long_as_it_is_shown(library: Library) -> None:
    openings, word = Openings(library), words()[:1]  # type: ignore[arg-type]
    word[0] = 1
    for _ in range(3):
        opening = openings.open(b"3000", 1, word)
        assert opening.address == 7_003_000
        openings.leave(opening)
    word[0] = 0
    openings.sweep()
    openings.sweep()
    assert library.log == ["open", "close"]


def test_the_next_segment_with_that_handle_is_opened_anew(library: Library) -> None:
    openings, word = Openings(library), words()[:1]  # type: ignore[arg-type]
    word[0] = 1
    openings.leave(openings.open(b"3000", 1, word))
    word[0] = 2
    openings.leave(openings.open(b"3000", 2, word))
    assert library.log == ["open", "close", "open"]


def test_it_is_not_closed_while_something_is_copied_from_it(library: Library) -> None:
    openings, word = Openings(library), words()[:1]  # type: ignore[arg-type]
    word[0] = 1
    first, second = openings.open(b"3000", 1, word), openings.open(b"3000", 1, word)
    word[0] = 0
    openings.leave(first)
    assert library.log == ["open"]
    openings.leave(second)
    assert library.log == ["open", "close"]


def test_what_cannot_be_opened_is_not_tried_again(library: Library) -> None:
    openings, word = Openings(library), words()[:1]  # type: ignore[arg-type]
    word[0] = 1
    library.can_open = False
    for _ in range(3):
        with pytest.raises(DeviceFailed):
            openings.open(b"3000", 1, word)
    assert library.log == ["open"]
    library.can_open = True
    word[0] = 2
    assert openings.open(b"3000", 2, word).address == 7_003_000
    openings.close()
    assert library.opened == []
