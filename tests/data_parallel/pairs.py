"""Pairs: the same training with our wrapper and with torch's over gloo, and what must be equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel
from torch_support import values

import mpdist
from mpdist.torch import DistributedDataParallel

# What brings our module to where it is; tests of a device set it, and `values.placed`.
placed: Callable[[nn.Module], nn.Module] = lambda module: module  # noqa: E731

Step = Callable[[Any, torch.optim.Optimizer, Tensor, int], None]


def plain_step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, number: int) -> None:
    """One ordinary step."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def inputs(comm: mpdist.Communicator, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """This rank's batch of a step; other values on each rank."""
    generator = torch.Generator().manual_seed(1000 * number + comm.rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype)


def train(
    comm: mpdist.Communicator,
    model: Any,
    step: Step = plain_step,
    *,
    steps: int = 5,
    shape: tuple[int, ...] = (4, 6),
    dtype: torch.dtype = torch.float64,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
) -> list[Tensor]:
    """Train, and return the parameters and buffers."""
    make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    made = make([parameter for parameter in model.parameters() if parameter.requires_grad])
    for number in range(steps):
        x = inputs(comm, number, shape, dtype)
        step(model, made, values.placed(x) if isinstance(model, DistributedDataParallel) else x, number)
    return [tensor.detach().clone() for tensor in [*model.parameters(), *model.buffers()]]


def both(
    comm: mpdist.Communicator,
    build: Callable[[], nn.Module],
    step: Step = plain_step,
    *,
    options: dict[str, Any] | None = None,
    torch_options: dict[str, Any] | None = None,
    rtol: float = 1e-12,
    **training: Any,
) -> None:
    """Train with each wrapper from the same values; parameters, buffers and gradients must be equal."""
    options = options or {}
    torch.manual_seed(7)
    module = build()
    theirs = TorchDataParallel(copy.deepcopy(module), **(options if torch_options is None else torch_options))
    with wrapped(module, comm, **options) as ours:
        expected = train(comm, theirs, step, **training)
        got = train(comm, ours, step, **training)
        assert_equal(got, expected, rtol)
        gradients = [(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)]
        assert [a is None for a, _ in gradients] == [b is None for _, b in gradients]
        assert_equal([a for a, _ in gradients if a is not None], [b for _, b in gradients if b is not None], rtol)


def assert_equal(got: list[Tensor], expected: list[Tensor], rtol: float = 1e-12) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=rtol, atol=rtol)


@contextmanager
def wrapped(module: nn.Module, comm: mpdist.Communicator, **options: Any) -> Iterator[DistributedDataParallel]:
    """Our wrapper, closed at the end."""
    module = placed(module)
    if not next(module.parameters()).is_cpu:
        options = {"device_ids": [0], **options}  # forward moves its inputs there
    model = DistributedDataParallel(module, comm, **options)
    try:
        yield model
    finally:
        model.close()


def mlp(*widths: int, dtype: torch.dtype = torch.float64, normed: bool = False) -> nn.Sequential:
    """Linear layers with activations, and batch norm on demand."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
        if normed:
            layers.append(nn.BatchNorm1d(b))
    return nn.Sequential(*layers).to(dtype)


class Breaks(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("broken")
