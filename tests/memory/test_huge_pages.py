"""Huge pages: shared memory lies on them where the system has some, and nothing else changes where it has none."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from mpdist import Communicator
from mpdist.memory import address_of, huge_pages
from mpdist.memory.arena import LARGE_BYTES, PAGE_BYTES, Arena
from mpdist.memory.huge_pages import gather, huge_page_bytes, map_aligned
from mpdist.transport.neighbours import MIN_ARENA_BYTES
from mpdist.transport.sharing import nameless_file

# As large as arenas are at least: a small one finds its place anywhere.
NBYTES = MIN_ARENA_BYTES

MADV_COLLAPSE = 25
"""Of Linux' uapi/asm-generic/mman-common.h."""

UNIT = huge_page_bytes()
needs_huge_pages = pytest.mark.skipif(not UNIT, reason="the system has no huge pages of use")


def on_huge_pages(memory: mmap.mmap) -> int:
    """Bytes of a mapping that this process finds by huge pages."""
    first = f"{address_of(memory):x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(first):
            return next(int(each.split()[1]) << 10 for each in lines if each.startswith("ShmemPmdMapped"))
    raise AssertionError(f"no mapping begins at {first}")


def can_gather(nbytes: int) -> bool:
    """Whether the system gives that many now, asked without what is tested here."""
    descriptor, _ = nameless_file(NBYTES)
    with map_aligned(descriptor, NBYTES) as memory:
        os.posix_fallocate(descriptor, 0, nbytes)
        try:
            memory.madvise(MADV_COLLAPSE, 0, nbytes)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return on_huge_pages(memory) == nbytes


def check_huge(found: int, wanted: int) -> None:
    """A system that has none left now is no reason to fail."""
    if found != wanted and not can_gather(wanted):
        pytest.skip("the system gives no huge pages to shared memory")
    assert found == wanted


@pytest.fixture
def descriptor() -> Iterator[int]:
    made, path = nameless_file(NBYTES)
    assert path == ""
    yield made
    os.close(made)


@needs_huge_pages
@pytest.mark.parametrize("before", [1, 2, 7])
def test_mappings_begin_where_huge_pages_do(descriptor: int, before: int) -> None:
    with mmap.mmap(-1, PAGE_BYTES * before), map_aligned(descriptor, NBYTES) as memory:
        assert address_of(memory) % UNIT == 0
        assert len(memory) == NBYTES


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of its mappings")
def test_where_no_address_fits_any_does(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "huge_page_bytes", lambda: 2 << 20)
    monkeypatch.setattr(huge_pages, "address_of", lambda memory: 3 * PAGE_BYTES)
    before = len(Path("/proc/self/maps").read_text().splitlines())
    with map_aligned(descriptor, NBYTES) as memory:
        memory[5] = 1
        assert len(Path("/proc/self/maps").read_text().splitlines()) <= before + 1


def test_no_room_for_a_pad_is_no_reason_to_fail(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "huge_page_bytes", lambda: 2 << 20)
    monkeypatch.setattr(huge_pages, "address_of", lambda memory: 3 * PAGE_BYTES)
    monkeypatch.setattr(huge_pages, "_PAD_BYTES", 1 << 60)
    with map_aligned(descriptor, NBYTES) as memory:
        assert len(memory) == NBYTES


def test_no_huge_pages_no_other_mapping(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "huge_page_bytes", lambda: 0)
    with map_aligned(descriptor, NBYTES) as memory:
        gather(memory, 0, NBYTES)
        assert len(memory) == NBYTES


@needs_huge_pages
def test_what_fills_huge_pages_is_put_on_them_and_keeps_its_values(descriptor: int) -> None:
    with map_aligned(descriptor, NBYTES) as memory:
        os.posix_fallocate(descriptor, 0, 4 * UNIT)
        start, end = UNIT // 2, 3 * UNIT + UNIT // 2
        memory[start:end] = bytes(range(251)) * ((end - start) // 251) + bytes((end - start) % 251)
        kept = memory[: 4 * UNIT]
        gather(memory, start, end)
        found = on_huge_pages(memory)
        assert memory[: 4 * UNIT] == kept
    check_huge(found, 2 * UNIT)


class Refusing:
    """Memory of a system that gives so many huge pages and no more."""

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces
        self.asked: list[tuple[int, int]] = []

    def madvise(self, _: int, start: int, nbytes: int) -> None:
        self.asked.append((start, nbytes))
        if len(self.asked) > self.pieces:
            raise OSError(12, "Cannot allocate memory")


@pytest.mark.skipif(sys.platform != "linux", reason="asked of Linux only")
@pytest.mark.parametrize("pieces", [0, 1, 9])
def test_after_a_refusal_no_more_are_asked_for(monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    monkeypatch.setattr(huge_pages, "huge_page_bytes", lambda: 2 << 20)
    memory = Refusing(pieces)
    gather(cast(Any, memory), 1, 40 << 20)
    wanted = [(2 << 20, 16 << 20), (18 << 20, 16 << 20), (34 << 20, 6 << 20)]
    assert memory.asked == wanted[: pieces + 1]


@pytest.mark.skipif(sys.platform != "linux", reason="asked of Linux only")
def test_where_it_takes_long_no_more_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.01, 1.0, 1.2])
    monkeypatch.setattr(huge_pages, "huge_page_bytes", lambda: 2 << 20)
    monkeypatch.setattr(huge_pages, "perf_counter", lambda: next(times))
    memory = Refusing(9)
    gather(cast(Any, memory), 0, 64 << 20)
    assert memory.asked == [(0, 16 << 20), (16 << 20, 16 << 20)]


def test_less_than_a_huge_page_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "huge_page_bytes", lambda: 2 << 20)
    memory = Refusing(9)
    gather(cast(Any, memory), 1, (4 << 20) - 1)
    assert memory.asked == []


@needs_huge_pages
def test_large_arrays_begin_on_huge_pages_and_all_goes_back(descriptor: int) -> None:
    arena = Arena(descriptor, map_aligned(descriptor, NBYTES))
    small = [arena.empty(nbytes, np.uint8) for nbytes in (1, PAGE_BYTES, LARGE_BYTES - PAGE_BYTES)]
    large = [arena.empty(nbytes, np.uint8) for nbytes in (LARGE_BYTES, LARGE_BYTES + PAGE_BYTES + 1, 4 * UNIT)]
    places = []
    for number, array in enumerate([*small, *large]):
        assert array is not None
        array[:] = number
        places.append(array.ctypes.data)
    assert [place % UNIT for place in places[len(small) :]] == [0, 0, 0]
    assert places[1] % UNIT != 0
    assert places[2] % UNIT != 0
    found = on_huge_pages(arena.memory)
    assert [int(array[0]) for array in [*small, *large] if array is not None] == list(range(6))
    assert all((array == array[0]).all() for array in [*small, *large] if array is not None)
    del array
    small.clear()
    large.clear()
    assert arena.used_bytes == 0
    assert os.fstat(descriptor).st_blocks == 0
    check_huge(found, 2 * LARGE_BYTES + 4 * UNIT)


def test_blocks_of_collectives_are_made_in_no_time(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made in the midst of one, which is not to hold an event loop for long."""
    monkeypatch.setattr("mpdist.memory.arena.gather", lambda *_: pytest.fail("asked for huge pages"))
    arena = Arena(descriptor, mmap.mmap(descriptor, NBYTES))
    assert arena.allocate(4 * LARGE_BYTES) is not None


@needs_huge_pages
@pytest.mark.ranks(2, 3)
async def test_other_ranks_find_them_by_huge_pages_too(comm: Communicator) -> None:
    x = comm.empty(3 * LARGE_BYTES, np.uint8)
    x[:] = 1
    shared = comm._channel.engine.shared
    assert shared is not None
    before = [on_huge_pages(memory) for memory in shared._maps.values()]
    await comm.all_reduce(x)
    after = [on_huge_pages(memory) for memory in shared._maps.values()]
    assert (x == comm.size).all()
    mine = list(shared._maps).index(comm.ranks[comm.rank])
    found = before[mine] >= x.nbytes and all(
        now - then > 0 for rank, (now, then) in enumerate(zip(after, before, strict=True)) if rank != mine
    )
    are_huge = await comm.all_gather(np.array([found, can_gather(x.nbytes)]))
    if not are_huge[:, 1].all():
        pytest.skip("the system gives no huge pages to shared memory")
    assert are_huge[:, 0].all()
