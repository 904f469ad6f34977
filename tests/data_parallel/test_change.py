"""Parameters that are frozen or thawed: by all ranks, or it is said which one did not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from data_parallel.pairs import assert_equal, inputs, mlp, wrapped
from torch import Tensor, nn

from mpdist import CollectiveMismatch, Communicator, UsageError


def averaged(comm: Communicator, net: nn.Module, loss: Tensor) -> list[Tensor]:
    """The means of this loss's gradients over the ranks, by hand."""
    gradients = torch.autograd.grad(loss, [p for p in net.parameters() if p.requires_grad])
    for gradient in gradients:
        comm.all_reduce(gradient, op="avg").wait()
    return list(gradients)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("bucket_cap_mb", [1e-4, 25])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}], ids=str)
def test_all_ranks_freeze_and_thaw(comm: Communicator, bucket_cap_mb: float, options: dict[str, Any]) -> None:
    net = mlp(6, 10, 3)
    with wrapped(net, comm, bucket_cap_mb=bucket_cap_mb, **options) as model:
        for number in range(6):
            net[0].requires_grad_(number not in (2, 3))
            x = inputs(comm, number, (4, 6), torch.float64)
            model.zero_grad()
            with model.no_sync():  # gradients of this rank are there when the buckets are made anew
                model(x).sum().backward()
            model(2 * x).square().mean().backward()
            expected = averaged(comm, net, net(x).sum() + net(2 * x).square().mean())
            assert_equal([p.grad for p in net.parameters() if p.requires_grad], expected)


class Gradual(nn.Module):
    """The first layer is trained from the third forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(6, 10, 3)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.layers[0].requires_grad_(self.forwards >= 2)
        self.forwards += 1
        return self.layers(x)


@pytest.mark.ranks(1, 2)
def test_a_forward_may_thaw_parameters(comm: Communicator) -> None:
    net = Gradual()
    with wrapped(net, comm) as model:
        for number in range(4):
            x = inputs(comm, number, (4, 6), torch.float64)
            model.zero_grad()
            model(x).square().mean().backward()
            trained = [p for p in net.parameters() if p.requires_grad]
            assert len(trained) == (4 if number >= 2 else 2)
            assert_equal([p.grad for p in trained], averaged(comm, net, net.layers(x).square().mean()))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("without", [None, 0], ids=["", "rank 0 has none"])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": True}], ids=str)
def test_gradients_of_no_sync_are_averaged_though_they_were_frozen_since(
    comm: Communicator, options: dict[str, Any], without: int | None, steps: int
) -> None:
    net = nn.Sequential(nn.Embedding(5, 6, sparse=True), nn.Flatten(), *mlp(12, 10, 3)).double()
    frozen = [*net[0].parameters(), *net[2].parameters()]
    with wrapped(net, comm, **options) as model:
        for number in range(steps):
            model(torch.tensor([[number, comm.rank]])).sum().backward()
        model.zero_grad()
        with model.no_sync():
            model(torch.tensor([[4, comm.rank]])).square().sum().backward()
        for parameter in frozen:
            if comm.rank == without:
                parameter.grad = None
            parameter.requires_grad_(False)
        expected = []
        for parameter in frozen:
            mean = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense().clone()
            comm.all_reduce(mean, op="avg").wait()
            expected.append(mean)
        for _ in range(2):
            model(torch.tensor([[2, comm.rank]])).sum().backward()
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in frozen]
            assert_equal(gradients, expected)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("bucket_cap_mb", [1e-4, 25])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_change_on_one_rank_is_named(comm: Communicator, steps: int, bucket_cap_mb: float, dtype: torch.dtype) -> None:
    net = mlp(6, 10, 3, dtype=dtype)
    with wrapped(net, comm, bucket_cap_mb=bucket_cap_mb) as model:
        for _ in range(steps):
            model(torch.ones(4, 6, dtype=dtype)).sum().backward()
        if comm.rank == 1:
            net[0].requires_grad_(False)
        with pytest.raises(CollectiveMismatch, match=r"0\.weight \S+ \(10, 6\) on rank.*frozen on rank 1"):
            model(torch.ones(4, 6, dtype=dtype)).sum().backward()


@pytest.mark.ranks(2)
def test_change_and_back_on_one_rank_is_named(comm: Communicator) -> None:
    net = mlp(6, 10, 3)
    with wrapped(net, comm) as model:
        model(torch.ones(4, 6).double()).sum().backward()
        if comm.rank == 1:
            net[0].requires_grad_(False)
            model.reducer.look_at_parameters()
            net[0].requires_grad_(True)
        with pytest.raises(UsageError, match="frozen or thawed on 1 of 2 ranks"):
            model(torch.ones(4, 6).double()).sum().backward()
