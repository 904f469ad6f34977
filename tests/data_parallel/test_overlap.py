"""Overlap: who drives while backward computes, and that it makes no difference to the result."""

from __future__ import annotations

import pytest
import torch
from data_parallel.pairs import assert_equal, mlp, train, wrapped

from mpdist import Communicator
from mpdist.torch.progress import is_thread_worth


@pytest.mark.parametrize(
    ("nodes", "ranks", "cores", "threads", "expected"),
    [(1, 2, 2, 1, False), (1, 2, 4, 1, True), (1, 4, 16, 4, False), (2, 1, 1, 1, True), (1, 1, 1, 1, False)],
)
def test_thread_is_for_a_free_core_or_a_network(
    nodes: int, ranks: int, cores: int, threads: int, expected: bool
) -> None:
    assert is_thread_worth(nodes, ranks, cores, threads) is expected


@pytest.mark.ranks(1, 2, 3)
def test_result_is_the_same_with_and_without_a_thread(comm: Communicator) -> None:
    results = []
    for has_thread in (True, False):
        torch.manual_seed(5)
        with wrapped(mlp(6, 200, 150, 3), comm, bucket_cap_mb=0.05) as model:
            model.reducer.overlap.has_thread = has_thread
            results.append(train(comm, model, steps=8))
    assert_equal(*results, rtol=0)
