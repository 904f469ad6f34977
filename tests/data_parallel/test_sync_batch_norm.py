"""SyncBatchNorm: over whose batches it normalises, when, and how often it can be differentiated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_parallel.pairs import wrapped
from torch import Tensor, nn

import mpdist.torch
from mpdist import Communicator, UsageError
from mpdist.torch import SyncBatchNorm, convert_sync_batchnorm

pytestmark = pytest.mark.ranks(1, 2, 3)


@pytest.fixture
def no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has no process group; other tests of this job have one."""
    monkeypatch.setattr(dist, "is_initialized", lambda: False)


def batches(size: int) -> Tensor:
    """Those of all ranks, four rows each."""
    return torch.randn((4 * size, 6), generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 3 + 5


def own(comm: Communicator, whole: Tensor) -> Tensor:
    return whole[4 * comm.rank : 4 * comm.rank + 4]


@pytest.mark.parametrize("is_named", [False, True], ids=["the world", "a communicator"])
def test_it_needs_no_process_group(comm: Communicator, no_group: None, is_named: bool) -> None:
    alone = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape).cos())
    synced = convert_sync_batchnorm(copy.deepcopy(alone), comm if is_named else None)
    whole = batches(comm.size)
    with wrapped(synced, comm) as model:
        got = model(own(comm, whole))
        got.pow(3).sum().backward()
        assert not mpdist.torch.check(model, own(comm, whole), comm=comm).problems
    wanted = alone(whole)
    (wanted.pow(3).sum() / comm.size).backward()
    torch.testing.assert_close(got, own(comm, wanted))
    for a, b in zip([*synced.parameters(), *synced.buffers()], [*alone.parameters(), *alone.buffers()], strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.ranks(2, 3)
def test_halves_are_rounded_once(comm: Communicator) -> None:
    alone = nn.BatchNorm1d(6).double()
    with torch.no_grad():
        alone.weight.fill_(3)
        alone.bias.fill_(1)
    synced = convert_sync_batchnorm(copy.deepcopy(alone).bfloat16(), comm)
    x = batches(comm.size).bfloat16()
    mine = own(comm, x).clone().requires_grad_()
    got = synced(mine)
    (gradient,) = torch.autograd.grad(got.square().sum(), mine)
    assert got.dtype is gradient.dtype is torch.bfloat16
    torch.testing.assert_close(got.double(), own(comm, alone(x.double())), rtol=2**-8 * 1.01, atol=1e-5)


@pytest.mark.ranks(3)
def test_a_communicator_of_some_ranks(comm: Communicator) -> None:
    part = comm.split(color=comm.rank // 2).wait()
    norm = SyncBatchNorm(6, process_group=part).double()
    whole = batches(comm.size)
    rows = whole[:8] if comm.rank < 2 else whole[8:]
    torch.testing.assert_close(norm(own(comm, whole)), own(part, nn.BatchNorm1d(6).double()(rows)))
    part.close().wait()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("power", [1, 3])
@pytest.mark.parametrize("affine", [True, False])
def test_second_derivatives_are_an_error(comm: Communicator, power: int, affine: bool) -> None:
    """At power 1 without weights, what comes into its backward is a constant, but the gradient is none."""
    norm = SyncBatchNorm(6, affine=affine, process_group=comm).double()
    x = own(comm, batches(comm.size)).requires_grad_()
    (plain,) = torch.autograd.grad(norm(x).pow(power).sum(), x)
    (gradient,) = torch.autograd.grad(norm(x).pow(power).sum(), x, create_graph=True)
    assert torch.equal(gradient, plain)
    with pytest.raises(UsageError, match="no second derivatives"):
        (x.sum() + gradient.square().sum()).backward()


@pytest.mark.parametrize("tracks", [True, False])
def test_evaluation_is_this_ranks_own(comm: Communicator, tracks: bool) -> None:
    norm = SyncBatchNorm(6, track_running_stats=tracks, process_group=comm).double().eval()
    if comm.rank == 0:
        x = own(comm, batches(comm.size))
        alone = nn.BatchNorm1d(6, track_running_stats=tracks).double().eval()
        assert torch.equal(norm(x), alone(x))


@pytest.mark.ranks(1)
def test_all_names_of_one_batch_norm_are_replaced(comm: Communicator) -> None:
    norm = nn.BatchNorm1d(6)
    inner = nn.ModuleDict({"norm": norm, "none": nn.Identity()})
    inner.register_module("empty", None)
    net: Any = convert_sync_batchnorm(nn.ModuleList([norm, norm, inner, inner]))
    assert isinstance(net[0], SyncBatchNorm)
    assert net[0] is net[1] is net[2]["norm"]
    assert net[2] is net[3] is inner
    assert net[0].weight is norm.weight
