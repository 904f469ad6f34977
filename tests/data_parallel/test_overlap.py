"""Overlap: who drives while backward computes, and that it makes no difference to the result."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from data_parallel.pairs import assert_equal, mlp, train, wrapped

from mpdist import Communicator
from mpdist.memory import as_buffer
from mpdist.torch.data_parallel.plan import sizes_of_buckets
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


MIB = 1024**2


@pytest.mark.parametrize(
    ("is_on_cpu", "asked", "is_hidden", "expected"),
    [
        (True, None, True, (8 * MIB, MIB, MIB)),
        (True, 25 * MIB, True, (25 * MIB, MIB, MIB)),
        (True, None, False, (256 * MIB, 256 * MIB, None)),
        (True, 25 * MIB, False, (25 * MIB, 25 * MIB, None)),
        (True, 100, False, (100, 100, None)),
        (False, None, False, (32 * MIB, 16 * MIB, None)),
        (False, 1, True, (1, 16 * MIB, None)),
    ],
)
def test_several_buckets_are_for_what_is_hidden(
    is_on_cpu: bool, asked: int | None, is_hidden: bool, expected: tuple[int, int, int | None]
) -> None:
    assert sizes_of_buckets(is_on_cpu, asked, is_hidden) == expected


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("ranks_with_thread", [0, 1])
def test_ranks_make_the_same_buckets_where_only_some_have_a_thread(comm: Communicator, ranks_with_thread: int) -> None:
    results = []
    for threads in (ranks_with_thread, comm.size):
        torch.manual_seed(5)
        with wrapped(mlp(6, 1000, 700, 3), comm) as model:  # 5 MiB
            model.reducer.overlap.has_thread = comm.rank >= comm.size - threads
            results.append(train(comm, model, steps=3))
            buckets = model.reducer.buckets
            assert buckets is not None
            assert len(buckets) == (1 if threads == 0 else 2)
            assert len({bucket.flat.untyped_storage().data_ptr() for bucket in buckets}) == 1
    assert_equal(*results, rtol=0)


@pytest.mark.ranks(2)
def test_buckets_of_each_type_lie_together(comm: Communicator) -> None:
    """Each in the shared memory of this rank, none over another."""
    torch.manual_seed(5)
    mixed = torch.nn.Sequential(*(torch.nn.Linear(9, 9, dtype=dtype) for dtype in 3 * [torch.float32, torch.float64]))
    for layer in mixed[1::2]:
        layer.register_forward_pre_hook(lambda _, inputs: inputs[0].double())
    for layer in mixed[::2]:
        layer.register_forward_pre_hook(lambda _, inputs: inputs[0].float())
    with wrapped(mixed, comm, bucket_cap_mb=1e-4) as model:
        for step in range(3):
            model(torch.ones(2, 9) * (comm.rank + step)).sum().backward()
        buckets = model.reducer.buckets
        assert buckets is not None
        assert len(buckets) > 2
        assert {bucket.dtype for bucket in buckets} == {torch.float32, torch.float64}
        for dtype in (torch.float32, torch.float64):
            flats = [bucket.flat for bucket in buckets if bucket.dtype is dtype]
            assert len({flat.untyped_storage().data_ptr() for flat in flats}) == 1
            spans = sorted((flat.data_ptr(), flat.data_ptr() + flat.nbytes) for flat in flats)
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))
            assert all(start % 64 == 0 for start, _ in spans)
        shared = comm._channel.engine.shared
        assert shared is not None
        assert all(shared.offset_of(as_buffer(bucket.flat)) is not None for bucket in buckets)
