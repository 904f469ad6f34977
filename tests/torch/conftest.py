"""Fixtures: the default group of the backend "mpdist"."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import mpdist
import mpdist.torch


@pytest.fixture(scope="module")
def group(world: mpdist.Communicator) -> Iterator[dist.ProcessGroup]:
    """The default group, of all ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("mpdist", timeout=timedelta(seconds=50))
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()
