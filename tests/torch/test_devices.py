"""The backend on tensors of a device: the tests of its values once more, and what only a device has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch_support import again, devices, simulated_torch
from torch_support.simulated_torch import late
from torch_support.values import assert_same, numbers

import mpdist

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.limit(120), pytest.mark.apart]

# What these ask of a process has nothing to do with devices.
OTHERS = ("test_barrier_holds_until_the_last_rank_has_come", "test_objects")

HERE = Path(__file__).parent
globals().update(again.tests_in(HERE / "test_reductions.py"))
globals().update(again.tests_in(HERE / "test_moving.py", without=OTHERS))


@pytest.fixture(scope="module", autouse=True)
def _simulated() -> None:
    simulated_torch.install()


@pytest.fixture(params=devices.DEVICES, autouse=True)
def device(request: pytest.FixtureRequest, group: dist.ProcessGroup, world: mpdist.Communicator) -> Iterator[str]:
    with devices.opened(request.param, world) as name:
        yield name
