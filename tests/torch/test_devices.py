"""The backend on tensors of a device: the tests of its values once more, and what only a device has."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_support import devices, simulated_torch, values

import mpdist
from mpdist.comm import straight
from mpdist.progress.shown import showing

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.limit(120), pytest.mark.apart]

# What these ask of a process has nothing to do with devices.
OTHERS = ("test_barrier_holds_until_the_last_rank_has_come", "test_objects")


def _tests_of(name: str) -> dict[str, Any]:
    """The tests of another module here."""
    spec = importlib.util.spec_from_file_location(f"on_device_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {key: value for key, value in vars(module).items() if key.startswith("test_") and key not in OTHERS}


globals().update(_tests_of("test_reductions") | _tests_of("test_moving"))


@pytest.fixture(scope="module", autouse=True)
def _simulated() -> None:
    simulated_torch.install()


@pytest.fixture(params=devices.DEVICES, autouse=True)
def device(request: pytest.FixtureRequest, group: dist.ProcessGroup, world: mpdist.Communicator) -> Iterator[str]:
    with devices.opened(request.param, world) as name:
        yield name


@pytest.mark.ranks(2, 3)
def test_blocks_of_different_sizes_never_go_straight(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one size do, when the ranks have found out that they can."""
    for op in straight.IPC_FROM:
        monkeypatch.setitem(straight.IPC_FROM, op, 0)
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(4):
        even = values.placed(torch.ones(5, device="cpu"))
        dist.all_reduce(even)
        assert even.tolist() == [size] * 5
        blocks = [torch.empty(other + 1) for other in range(size)]
        dist.all_gather(blocks, values.placed(torch.full((rank + 1,), float(rank), device="cpu")))
        assert [block.tolist() for block in blocks] == [[other] * (other + 1) for other in range(size)]


@pytest.mark.ranks(2, 3)
def test_messages_stay_on_the_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the ranks have found out that they can."""
    monkeypatch.setattr(showing, "SHOWN_FROM", 0)
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    for turn in range(4):
        room = torch.zeros(300)
        sent = dist.isend(values.placed(torch.full((300,), float(rank + turn), device="cpu")), after)
        received = dist.irecv(room, before)
        assert received is not None
        received.wait()
        assert room.tolist() == [before + turn] * 300
        assert sent is not None
        sent.wait()
    room = torch.zeros(size)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.full((size,), float(rank)), after), dist.P2POp(dist.irecv, room, before)]
    )
    for work in works:
        work.wait()
    assert room.tolist() == [before] * size
