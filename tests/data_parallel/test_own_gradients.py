"""gradient_as_bucket_view=False: gradients are the tensors that they would be without the wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from data_parallel.pairs import assert_equal, both, inputs, mlp, wrapped
from data_parallel.test_unused import FIND, Branches, steps_using
from torch import Tensor

from mpdist import Communicator

pytestmark = [pytest.mark.ranks(1, 2), pytest.mark.usefixtures("gloo")]

OWN = {"gradient_as_bucket_view": False}


def accumulating_step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, number: int) -> None:
    optimizer.zero_grad(set_to_none=number % 2 == 0)
    with model.no_sync():
        model(x).square().mean().backward()
    for _ in range(2):
        model(2 * x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("bucket_cap_mb", [1e-4, 25])
def test_training_is_that_of_torch(comm: Communicator, bucket_cap_mb: float) -> None:
    options = {**OWN, "bucket_cap_mb": bucket_cap_mb}
    both(comm, lambda: mlp(200, 200, 3), accumulating_step, options=options, shape=(4, 200), rtol=1e-11)


def test_unused_parameters(comm: Communicator) -> None:
    step = steps_using(comm, [["ab", "cd"], ["abc"], ["d", "d"]])
    both(comm, Branches, step, options={**OWN, **FIND}, steps=6)


def test_gradients_that_are_kept_do_not_change(comm: Communicator) -> None:
    net = mlp(200, 200)  # a large gradient and a small one
    kept = []
    with wrapped(net, comm, **OWN) as model:
        for number in range(3):
            model.zero_grad()
            model(inputs(comm, number, (4, 200), torch.float64)).sum().backward()
            kept += [(parameter.grad, parameter.grad.clone()) for parameter in net.parameters()]
    assert_equal([gradient for gradient, _ in kept], [copy for _, copy in kept])


def test_gradients_of_the_user_hold_the_mean(comm: Communicator) -> None:
    net = mlp(200, 200)
    with wrapped(net, comm, **OWN) as model:
        own = [torch.zeros_like(parameter) for parameter in net.parameters()]
        for number in range(3):
            for gradient, parameter in zip(own, net.parameters(), strict=True):
                parameter.grad = gradient.zero_()
            x = inputs(comm, number, (4, 200), torch.float64)
            expected = torch.autograd.grad(net(x).sum(), list(net.parameters()))
            for gradient in expected:
                comm.all_reduce(gradient, op="avg").wait()
            model(x).sum().backward()
            assert all(p.grad is gradient for p, gradient in zip(net.parameters(), own, strict=True))
            assert_equal(own, list(expected), rtol=1e-11)
