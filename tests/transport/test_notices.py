"""Notices: what a rank has put down is found by others under its name; pure."""

from __future__ import annotations

from array import array

from mpdist.transport.notices import ENTRIES, Notices


def notices_of(ranks: list[int]) -> list[Notices]:
    tables = {rank: memoryview(array("q", [0] * 2 * ENTRIES)) for rank in ranks}
    return [Notices(tables, rank) for rank in ranks]


def test_others_find_what_a_rank_has_put_down_until_it_removes_it() -> None:
    first, second = notices_of([3, 5])
    assert second.find(3, "world") is None
    assert first.put("world", 4096)
    assert first.put("world/split1:0", 0)
    assert second.find(3, "world") == 4096
    assert second.find(3, "world/split1:0") == 0
    assert second.find(5, "world") is None
    first.remove("world")
    assert second.find(3, "world") is None
    assert second.find(3, "world/split1:0") == 0


def test_a_full_table_takes_no_more_until_there_is_room() -> None:
    (own,) = notices_of([0])
    assert all(own.put(f"comm{number}", number) for number in range(ENTRIES))
    assert not own.put("one more", 1)
    own.remove("comm7")
    assert own.put("one more", 1)
    assert (own.find(0, "one more"), own.find(0, "comm7"), own.find(0, "comm8")) == (1, None, 8)
