"""What each operation of `mpdist bench` moves, must give, and how its bandwidth is counted."""

from __future__ import annotations

import numpy as np
import pytest

from mpdist.bench.operations import OPERATIONS, expected, given, length, partner
from mpdist.bench.sizes import parse_size, parse_sizes, size_text, time_text
from mpdist.errors import UsageError

# doc/PERFORMANCE.md of nccl-tests
BUS_OF_4_RANKS = {
    "all_reduce": 1.5, "reduce_scatter": 0.75, "all_gather": 0.75, "all_to_all": 0.75, "broadcast": 1, "reduce": 1,
    "gather": 0.75, "scatter": 0.75, "ping_pong": 1, "barrier": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_bus_bandwidth_is_that_of_nccl_tests(name: str) -> None:
    assert OPERATIONS[name].bus(4) == BUS_OF_4_RANKS[name]


@pytest.mark.parametrize("name", ["reduce_scatter", "all_gather", "all_to_all", "gather", "scatter"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_whole_is_a_multiple_of_the_ranks(name: str, ranks: int) -> None:
    op = OPERATIONS[name]
    assert op.elements(8, ranks) == max(2 // ranks, 1) * ranks
    assert op.elements(1000 * 4, ranks) % ranks == 0
    assert length("block", 12, ranks) == 12 // ranks


def test_inputs_differ_at_each_rank_and_place() -> None:
    assert given(0, 5).tolist() == [16, 17, 18, 19, 20]
    assert given(1, 30)[13:15].tolist() == [32, 33]
    assert len(given(0, 0)) == 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_expected_results_are_those_of_the_definition(ranks: int) -> None:
    n = 6 * ranks
    inputs = [given(rank, n) for rank in range(ranks)]
    blocks = [given(rank, 6) for rank in range(ranks)]
    for rank in range(ranks):
        part = slice(6 * rank, 6 * rank + 6)
        wanted = {
            "all_reduce": sum(inputs),
            "reduce_scatter": sum(inputs)[part],
            "all_gather": np.concatenate(blocks),
            "broadcast": inputs[0],
            "scatter": inputs[0][part],
            "all_to_all": np.concatenate([x[part] for x in inputs]),
            "reduce": sum(inputs) if rank == 0 else None,
            "gather": np.concatenate(blocks) if rank == 0 else None,
            "ping_pong": inputs[rank ^ 1] if rank ^ 1 < ranks else None,
            "barrier": None,
        }
        for name, value in wanted.items():
            np.testing.assert_equal(expected(OPERATIONS[name], rank, ranks, n), value)


def test_ping_pong_is_played_in_pairs() -> None:
    assert [partner(rank, 5) for rank in range(5)] == [1, 0, 3, 2, None]


def test_sizes_are_read_as_written() -> None:
    assert [parse_size(text) for text in ("8", "64K", "1MiB", "2gb")] == [8, 65536, 2**20, 2**31]
    assert parse_sizes("1M, 8,64K", 4) == [8, 65536, 2**20]
    assert parse_sizes("8..64M", 4) == [8, *(4**i for i in range(3, 14))]
    assert parse_sizes("8..8", 4) == [8]


@pytest.mark.parametrize("text", ["", "0", "8..", "64M..8", "1T", "-1", "8;9"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="size"):
        parse_sizes(text, 4)


def test_sizes_and_times_have_units() -> None:
    assert [size_text(n) for n in (8, 65536, 3 * 2**19)] == ["8 B", "64 KiB", "1.5 MiB"]
    assert [time_text(t) for t in (1.234e-6, 0.0123, 2)] == ["1.23 us", "12.3 ms", "2 s"]
    assert [size_text(n * 1024) for n in (999, 1000, 1023)] == ["999 KiB", "1000 KiB", "1023 KiB"]
    assert [time_text(t) for t in (999.4e-6, 999.9e-6, 0.9999, 1234)] == ["999 us", "1 ms", "1 s", "1234 s"]
