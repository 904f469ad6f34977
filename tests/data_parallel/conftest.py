"""Fixtures: torch's own DDP runs beside ours, over gloo, on the same ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpdist

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402  # only where torch is


@pytest.fixture(scope="session")
def gloo(world: mpdist.Communicator) -> Iterator[dist.ProcessGroup]:
    """torch's default group, of backend gloo, over the same ranks."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        path = world.broadcast_object(path, src=0).wait()
        store = dist.FileStore(str(path), world.size)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
        yield dist.group.WORLD
        world.barrier().wait()
        dist.destroy_process_group()
