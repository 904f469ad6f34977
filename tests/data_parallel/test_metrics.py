"""Metrics: a rank without samples does not count."""

from __future__ import annotations

from typing import Any

import pytest

import mpdist.torch
from mpdist import Communicator, UsageError


@pytest.mark.ranks(1, 2)
def test_mean_of_no_samples_is_left_out(comm: Communicator) -> None:
    metrics = mpdist.torch.Metrics(comm, "loss")
    metrics.add(2, loss=3.0)
    metrics.add(0, loss=float("nan"))
    assert metrics.means() == {"loss": 3.0}


def test_forgotten_communicator_is_told() -> None:
    name: Any = "loss"
    with pytest.raises(UsageError, match=r"takes a communicator first, Metrics\(world, \"loss\"\), got 'loss'"):
        mpdist.torch.Metrics(name)
