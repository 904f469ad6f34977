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


@pytest.fixture
def every_linear_layer_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also small ones compute their weights' gradients in their places, as large ones do."""
    monkeypatch.setattr("mpdist.torch.data_parallel.linear.PLACED_COUNT", 1)
    monkeypatch.setattr("mpdist.torch.data_parallel.linear.EARLY_COUNT", 1)
    monkeypatch.setattr("mpdist.torch.data_parallel.bucket.LARGE_COUNT", 1)


@pytest.fixture(autouse=True)
def small_layers_too(request: pytest.FixtureRequest) -> None:
    """On 2 ranks all tests here take small layers for large ones; on other numbers of ranks they are as they are."""
    if "comm" in request.fixturenames and request.getfixturevalue("comm").size == 2:
        request.getfixturevalue("every_linear_layer_is_large")
