"""Uneven blocks: how they land, and what does not fit, without MPI."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from mpdist.algorithms.header import Header
from mpdist.algorithms.uneven import Landing, Parcel
from mpdist.errors import SizeMismatch, UnsupportedBuffer
from mpdist.memory import as_buffer

BLOCKS = [np.arange(3.0), np.zeros((0, 2)), np.arange(4.0).reshape(2, 2), np.array(9.0)]
HEADS = [Header.of(as_buffer(block)) for block in BLOCKS]


def arrive(landing: Landing) -> None:
    """What MPI does: the bytes of all blocks, to where they belong."""
    octets = landing.memory.array().view(np.uint8)
    starts = landing.starts or (np.cumsum(landing.counts) - landing.counts).tolist()
    for start, block in zip(starts, BLOCKS, strict=True):
        at = start * landing.unit
        octets[at : at + block.nbytes] = block.reshape(-1).view(np.uint8)


def test_blocks_land_in_one_allocation_with_their_shapes() -> None:
    landing = Landing(HEADS, None, BLOCKS[0])
    arrive(landing)
    results = landing.results()
    for result, block in zip(results, BLOCKS, strict=True):
        assert result.shape == block.shape
        assert (result == block).all()
    assert landing.counts == [3, 0, 4, 1]
    assert landing.unit == 8


def outs_that_fit() -> Iterator[tuple[str, list[np.ndarray]]]:
    yield "arrays of their own", [np.full(block.size, -1.0) for block in BLOCKS]
    whole = np.full(20, -1.0)
    yield "one behind the other", np.split(whole[:8], [3, 3, 7])
    yield "with gaps, in another order", [whole[9:12], whole[2:2], whole[4:8], whole[0:1]]


@pytest.mark.parametrize("most", [None, 0], ids=["where they lie", "through memory of its own"])
@pytest.mark.parametrize(("name", "outs"), list(outs_that_fit()))
def test_blocks_land_in_the_given_arrays(name: str, outs: list[np.ndarray], most: int | None) -> None:
    landing = Landing(HEADS, [as_buffer(out, writable=True) for out in outs], BLOCKS[0], most)
    assert (landing.starts is None) == (most == 0)
    arrive(landing)
    results = landing.results()
    for result, out, block in zip(results, outs, BLOCKS, strict=True):
        assert result is out
        assert out.tolist() == block.reshape(-1).tolist()


@pytest.mark.parametrize(
    ("place", "out", "error"), [(0, np.zeros(2), SizeMismatch), (2, np.zeros(4, np.int64), UnsupportedBuffer)]
)
def test_blocks_that_do_not_fit_land_elsewhere_and_are_refused_afterwards(
    place: int, out: np.ndarray, error: type[Exception]
) -> None:
    outs = [np.full(block.size, -1.0) for block in BLOCKS]
    outs[place] = out
    landing = Landing(HEADS, [as_buffer(each, writable=True) for each in outs], BLOCKS[0])
    assert sum(landing.counts) * landing.unit == sum(head.nbytes for head in HEADS)
    arrive(landing)
    with pytest.raises(error, match=rf"out\[{place}\]"):
        landing.results()
    assert all((each == -1).all() for number, each in enumerate(outs) if number != place)


def test_blocks_of_different_types_are_refused_afterwards() -> None:
    heads = [*HEADS, Header.of(as_buffer(np.zeros(3, np.float32)))]
    landing = Landing(heads, None, BLOCKS[0])
    assert landing.counts == [head.nbytes for head in heads]
    with pytest.raises(UnsupportedBuffer, match=r"rank 0: float64.*rank 4: float32"):
        landing.results()


def test_rows_are_parcelled_without_a_copy() -> None:
    x = np.arange(12.0).reshape(6, 2)
    parcel = Parcel.of_rows(as_buffer(x), 3, (2, 2))
    assert [(head.shape, head.nbytes) for head in parcel.heads] == [([2, 2], 32)] * 3
    assert np.shares_memory(parcel.blocks[0].array(), x)


def test_blocks_are_parcelled_without_a_copy_unless_they_overlap() -> None:
    x = np.arange(6.0)
    parcel = Parcel.of_blocks([as_buffer(x[:2]), as_buffer(x[3:])])
    assert all(np.shares_memory(block.array(), x) for block in parcel.blocks)
    parcel = Parcel.of_blocks([as_buffer(x[:4]), as_buffer(x[3:])])
    assert not any(np.shares_memory(block.array(), x) for block in parcel.blocks)
    assert [block.array().tolist() for block in parcel.blocks] == [[0, 1, 2, 3], [3, 4, 5]]
