"""Blocks where they lie: what MPI is told of them, and when they are copied."""

from __future__ import annotations

import numpy as np
import pytest

from mpdist.algorithms.blocks import Placed, are_apart, concatenated, joined, placed, readable
from mpdist.comm.operation import host_buffer
from mpdist.memory import Buffer, as_buffer

X = np.arange(10.0)
ONE_BEHIND_THE_OTHER = np.split(X, [3, 3, 7])

LAYOUTS = {
    "one behind the other, one of them empty": ONE_BEHIND_THE_OTHER,
    "gaps between them": [X[1:3], X[4:5], X[7:]],
    "another order": [X[6:], X[:2], X[2:6]],
    "the same twice": [X[2:5], X[2:5]],
    "overlapping": [X[:5], X[3:]],
    "arrays of their own": [np.arange(3.0), np.arange(4.0), np.zeros(0)],
    "rows": list(X.reshape(5, 2)),
}


def buffers(blocks: list[np.ndarray]) -> list[Buffer]:
    return [as_buffer(block) for block in blocks]


def read(there: Placed, blocks: list[np.ndarray], unit: int = 8) -> list[list[float]]:
    """The blocks as MPI finds them."""
    octets = there.memory.array().view(np.uint8)
    starts = there.starts
    assert starts is not None
    cut = [octets[start * unit : start * unit + block.nbytes] for start, block in zip(starts, blocks, strict=True)]
    return [each.view(np.float64).tolist() for each in cut]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("unit", [1, 8])
def test_blocks_are_found_where_they_lie(name: str, unit: int) -> None:
    blocks = LAYOUTS[name]
    there = placed(buffers(blocks), unit, None)
    assert there is not None
    assert there.memory.address == min(as_buffer(block).address for block in blocks if block.size)
    assert read(there, blocks, unit) == [block.reshape(-1).tolist() for block in blocks]


def test_blocks_too_far_from_each_other_are_copied() -> None:
    blocks = buffers([X[:1], X[5:6]])
    assert placed(blocks, 8, 5) is not None
    assert placed(blocks, 8, 4) is None
    memory, starts = readable(blocks, 8, 4)
    assert starts is None
    assert memory.array().tolist() == [0.0, 5.0]


def test_blocks_between_elements_are_copied() -> None:
    octets = np.zeros(21, np.uint8)
    blocks = buffers([octets[:8].view(np.float64), octets[9:17].view(np.float64)])
    assert placed(blocks, 8, None) is None
    assert placed(blocks, 1, None) is not None


def test_empty_blocks_are_nowhere() -> None:
    assert placed(buffers([X[:0], X[4:4]]), 8, None) is None
    assert readable(buffers([X[:0], X[4:4]]), 8, None).memory.count == 0
    assert joined(buffers([X[:0], X[4:4]])).count == 0


def test_views_one_behind_the_other_are_joined_without_a_copy() -> None:
    whole = joined(buffers(ONE_BEHIND_THE_OTHER))
    assert np.shares_memory(whole.array(), X)
    assert whole.array().tolist() == X.tolist()


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in ("rows",) and "behind" not in name])
def test_others_are_joined_in_a_copy(name: str) -> None:
    blocks = LAYOUTS[name]
    whole = joined(buffers(blocks))
    assert not np.shares_memory(whole.array(), X)
    assert whole.array().tolist() == np.concatenate(blocks).tolist()
    assert whole.array().tolist() == concatenated(buffers(blocks)).array().tolist()


def test_blocks_are_apart_unless_they_share_memory() -> None:
    assert are_apart(buffers([X[6:], X[:2], X[2:6], X[3:3]]))
    assert not are_apart(buffers([X[6:], X[:3], X[2:6]]))
    assert not are_apart(buffers([X[:3], X[:3]]))


def test_what_is_read_only_stays_so() -> None:
    frozen = X.copy()
    frozen.flags.writeable = False
    there = placed(buffers([frozen[:2], frozen[2:]]), 8, None)
    assert there is not None
    assert there.memory.readonly


def test_memory_is_not_resized_under_mpi() -> None:
    x = bytearray(8)
    there = placed([host_buffer(x), host_buffer(np.zeros(3, np.uint8))], 1, None)
    with pytest.raises(BufferError):
        x.append(1)
    del there
    x.append(1)
