"""Statistics: where the time of a step goes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from data_parallel.pairs import mlp, train, wrapped
from torch import Tensor

from mpdist import Communicator
from mpdist.torch.data_parallel.statistics import covered

pytestmark = pytest.mark.ranks(1, 2, 3)


def test_covered_is_the_length_of_the_union() -> None:
    assert covered([]) == 0
    assert covered([(1, 3), (2, 4), (6, 7), (6.5, 6.6)]) == 4


def test_steps_add_up(comm: Communicator) -> None:
    with wrapped(mlp(6, 50, 3), comm, bucket_cap_mb=1e-3) as model:
        assert str(model.statistics()) == "no steps yet"
        train(comm, model, steps=6)
        told = model.statistics()
        assert [step.step for step in told.steps] == [2, 3, 4, 5, 6]  # the first made the buckets
        for step in told.steps:
            assert step.total == pytest.approx(step.compute + step.exposed)
            assert 0 <= step.hidden <= step.communication <= step.total
            assert 0 <= step.waiting <= step.exposed
            assert step.nbytes >= 8 * sum(p.numel() for p in model.parameters())
            assert step.buckets == 2
        assert sum(told.slowest.values()) == 5
        assert len(model.statistics(2).steps) == 2
        assert "5 steps" in str(told)


def test_an_end_that_is_told_in_the_next_step_does_not_count_there(comm: Communicator) -> None:
    """Another thread may have found it, and be held up."""
    with wrapped(mlp(6, 5, 3), comm) as model:
        train(comm, model, steps=2)
        (bucket,) = model.reducer.buckets
        before = bucket.work
        train(comm, model, steps=1)
        done_at = bucket.done_at
        bucket.note_end(before)
        assert bucket.done_at == done_at
        bucket.note_end(bucket.work)
        assert bucket.done_at > done_at


def test_slowest_rank_is_named(comm: Communicator) -> None:
    late = comm.size - 1

    def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, number: int) -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if comm.rank == late:
            time.sleep(0.4)  # longer than what holds another rank up
        loss.backward()
        optimizer.step()

    with wrapped(mlp(6, 5, 3), comm) as model:
        train(comm, model, step, steps=4)
        told = model.statistics()
        assert told.slowest == {late: 3}
        if comm.rank != late:
            assert told.waiting > 0.02
