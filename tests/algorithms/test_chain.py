"""Chain: how long its slices are, and where a tree is shorter; pure. What it moves: tests/comm."""

from __future__ import annotations

import pytest

from mpdist.algorithms.chain import LEAST_BYTES, MOST_BYTES, SLICES, is_shorter, slice_bytes

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("nbytes", "nodes", "wanted"),
    [
        (0, 2, LEAST_BYTES),
        (MIB, 3, LEAST_BYTES),
        (64 * MIB, 2, 4 * MIB),
        (64 * MIB, 3, 2 * MIB),
        (64 * MIB, 9, 512 * 1024),
        (4096 * MIB, 3, MOST_BYTES),
    ],
)
def test_slices_are_long_but_many_for_each_link(nbytes: int, nodes: int, wanted: int) -> None:
    assert slice_bytes(nbytes, nodes) == wanted
    assert wanted in (LEAST_BYTES, MOST_BYTES) or nbytes == wanted * SLICES * (nodes - 1)


@pytest.mark.parametrize(
    ("slices", "nodes", "wanted"),
    [
        (1, 2, False),
        (100, 2, False),
        (1, 3, False),
        (2, 3, True),
        (1, 4, False),
        (3, 4, True),
        (64, 64, True),
        (2, 64, False),
    ],
)
def test_a_chain_takes_the_place_of_a_tree_when_it_takes_fewer_steps(slices: int, nodes: int, wanted: bool) -> None:
    assert is_shorter(slices, nodes) is wanted
    rounds = next(rounds for rounds in range(10) if 2**rounds >= nodes)  # of a binomial tree, each of the whole
    assert wanted is (slices + nodes - 2 < slices * rounds)
