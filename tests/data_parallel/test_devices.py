"""DistributedDataParallel on a device: the tests of its training once more, and what only a device has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from data_parallel import pairs
from data_parallel.pairs import mlp, wrapped
from torch import nn
from torch_support import again, devices, simulated_torch, values

from mpdist import Communicator, UsageError
from mpdist.torch import DistributedDataParallel

pytestmark = [
    pytest.mark.ranks(1, 2), pytest.mark.limit(120), pytest.mark.apart, pytest.mark.usefixtures("gloo", "device")
]  # fmt: skip

HERE = Path(__file__).parent
# What these compute beside the wrapped module is on the CPU.
ON_CPU = {
    "equality": ("test_mixed_precision", "test_two_ranks_are_one_rank_with_the_double_batch"),
    "unused": ("test_one_rank_uses_no_parameter_at_all",),
    "own_gradients": ("test_gradients_of_the_user_hold_the_mean",),
    "join": (),
}
for module, others in ON_CPU.items():
    globals().update(again.tests_in(HERE / f"test_{module}.py", without=others))

# torch ends the process where a hook of a device that is written in Python raises; and there are no convolutions.
NOT_SIMULATED = (
    "test_static_graph_that_is_not_static_is_named",
    "test_backward_that_broke_off_before_any_bucket_can_be_repeated",
    "test_channels_last_gradients_have_the_strides_of_their_parameters",
)


@pytest.fixture(scope="module", autouse=True)
def _simulated() -> None:
    simulated_torch.install()


@pytest.fixture(params=devices.DEVICES)
def device(request: pytest.FixtureRequest, comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == simulated_torch.NAME and request.node.originalname in NOT_SIMULATED:
        pytest.skip("not to be had on a simulated GPU")
    with devices.opened(request.param, comm, is_default=False) as name:
        moved = simulated_torch.moved_module if name == simulated_torch.NAME else torch.nn.Module.cuda
        monkeypatch.setattr(pairs, "placed", moved)
        yield name
