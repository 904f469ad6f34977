"""How long a receive looks into a fastbox before it is posted."""

from __future__ import annotations

from mpdist.progress.fastbox import PAGE_BYTES
from mpdist.progress.fastbox_reader import ONCE, PAUSE_AT_MOST, WORTH, FastboxReader

LONG = range(200)


def looked_in_vain(reader: FastboxReader, came: int) -> int:
    """So many have come since it was last; how many must come late before it looks long again."""
    reader.looks = LONG
    reader.number += came
    reader.look_less()
    assert reader.looks is ONCE
    return reader.rest


def test_the_less_comes_between_two_looks_in_vain_the_longer_it_rests() -> None:
    reader = FastboxReader(0, memoryview(bytes(PAGE_BYTES)).cast("q"), 0)
    rests = [looked_in_vain(reader, 1) for _ in range(8)]
    assert rests == sorted(rests)
    assert rests[-1] == PAUSE_AT_MOST
    assert looked_in_vain(reader, WORTH + 1) == 1


def test_one_look_in_vain_changes_nothing_more() -> None:
    reader = FastboxReader(0, memoryview(bytes(PAGE_BYTES)).cast("q"), 0)
    rest = looked_in_vain(reader, 1)
    reader.look_less()
    assert (reader.looks, reader.rest) == (ONCE, rest)
