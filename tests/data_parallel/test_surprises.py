"""Surprises: what a program does to its module between two steps, and gradients that come by unusual ways."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from data_parallel.pairs import assert_equal, both, inputs, mlp, wrapped
from torch import Tensor, nn

import mpdist
from mpdist import ClosedError, Communicator, UsageError
from mpdist.torch import DistributedDataParallel

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.usefixtures("gloo")]

Change = Callable[[nn.Module], object]


def halve_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data * 0.5


CHANGES: dict[str, Change] = {
    "grad.data": halve_data,
    "float and back": lambda model: model.float().double(),
    "channels last": lambda model: model.to(memory_format=torch.channels_last),  # type: ignore[call-overload]  # torch
}


def means(comm: Communicator, model: nn.Module, net: nn.Module, number: int) -> list[Tensor]:
    """The gradients that a step is to give: the mean of those of all ranks."""
    x = inputs(comm, number, (4, 2, 6, 6), torch.float64)
    expected = torch.autograd.grad(net(x).square().mean(), [*net.parameters()])
    mine = torch.cat([gradient.reshape(-1) for gradient in expected])
    comm.all_reduce(mine, "avg").wait()
    parts = mine.split([gradient.numel() for gradient in expected])
    return [part.view(gradient.shape) for part, gradient in zip(parts, expected, strict=True)]


@pytest.mark.parametrize("is_view", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_that_are_moved_to_other_memory(comm: Communicator, change: str, is_view: bool) -> None:
    """The module is changed while it has gradients; the means go on to be those of all ranks."""
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 200), nn.Linear(200, 200)).double()
    with wrapped(net, comm, gradient_as_bucket_view=is_view) as model:
        for number in range(4):
            expected = means(comm, model, net, number)
            model.zero_grad()
            model(inputs(comm, number, (4, 2, 6, 6), torch.float64)).square().mean().backward()
            assert_equal([parameter.grad for parameter in net.parameters()], expected, 1e-12)
            if number:
                CHANGES[change](model)


@pytest.mark.parametrize("has_unused", [False, True])
@pytest.mark.parametrize("order", ["EF", "FE"])
def test_a_second_backward_of_derivatives_is_averaged(comm: Communicator, order: str, has_unused: bool) -> None:
    """Energies and forces: the loss of the forces goes back to the parameters by no output of the module."""
    net = mlp(3, 16, 1)
    with wrapped(net, comm, find_unused_parameters=has_unused) as model:
        for number in range(3):
            model.zero_grad()
            x = inputs(comm, number, (5, 3), torch.float64).requires_grad_()
            energy = model(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
            losses = {"E": energy.square().mean(), "F": (force - 1).square().mean()}
            losses[order[0]].backward(retain_graph=True)
            losses[order[1]].backward()
        x = x.detach().requires_grad_()
        energy = net(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        loss = energy.square().mean() + (force - 1).square().mean()
        expected = torch.autograd.grad(loss, [*net.parameters()], allow_unused=True)
        for parameter, gradient in zip(net.parameters(), expected, strict=True):
            mean = torch.zeros_like(parameter) if gradient is None else gradient.clone()
            comm.all_reduce(mean, "avg").wait()
            assert_equal([parameter.grad], [mean], 1e-12)
        model.zero_grad()
        with model.no_sync():  # nothing is expected any more
            model(x.detach() * (comm.rank + 1)).sum().backward()
        local = torch.autograd.grad(net(x.detach() * (comm.rank + 1)).sum(), [*net.parameters()])
        assert_equal([parameter.grad for parameter in net.parameters()], [*local], 1e-12)


@pytest.mark.parametrize("bucket_cap_mb", [1e-4, 25])
@pytest.mark.parametrize("how", ["in place", "replaced"])
@pytest.mark.parametrize("is_view", [True, False])
def test_users_hooks_run_before_the_mean_whenever_they_came(
    comm: Communicator, how: str, bucket_cap_mb: float, is_view: bool
) -> None:
    def clamp(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if how == "in place":
            parameter.grad.clamp_(-0.01, 0.01)
        else:
            parameter.grad = parameter.grad.clamp(-0.01, 0.01)

    def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, number: int) -> None:
        if number in (0, 2):  # in the first step, and in one whose buckets are made
            last = [*model.parameters()][-2:]
            for parameter in model.parameters() if number == 0 else last:
                parameter.register_post_accumulate_grad_hook(clamp)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    options = {"bucket_cap_mb": bucket_cap_mb, "gradient_as_bucket_view": is_view}
    both(comm, lambda: mlp(6, 200, 200, 3), step, options=options)


class Constant(torch.autograd.Function):
    """Adds something that gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor) -> Tensor:
        return x + shift.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class Shifted(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.line = nn.Linear(6, 3)
        self.shift = nn.Parameter(torch.zeros(count))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        shifted: Tensor = Constant.apply(self.line(x), self.shift)
        return shifted


@pytest.mark.parametrize("count", [3, 40_000])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": False}], ids=str)
def test_a_function_that_gives_no_gradient_gives_zeros(comm: Communicator, count: int, options: dict[str, Any]) -> None:
    with wrapped(Shifted(count), comm, **options) as model:
        for number in range(3):
            model.zero_grad()
            model(inputs(comm, number, (4, 6), torch.float64)).sum().backward()
            assert torch.count_nonzero(model.module.shift.grad) == 0
            assert model.module.shift.grad.shape == (count,)
            assert torch.count_nonzero(model.module.line.weight.grad)


def test_a_part_of_the_module_gets_another_type(comm: Communicator) -> None:
    net = nn.ModuleDict({"first": nn.Linear(6, 6), "second": nn.Linear(6, 2)})

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = net

        def forward(self, x: Tensor) -> Tensor:
            middle = self.parts["first"](x)
            out: Tensor = self.parts["second"](middle.to(self.parts["second"].weight.dtype))
            return out

    with wrapped(Both(), comm) as model:
        for number in range(4):
            model.zero_grad()
            x = inputs(comm, number, (4, 6), torch.float32)
            model(x).sum().backward()
            gradient = net["first"].weight.grad.clone()
            other = gradient.clone()
            comm.broadcast(other, 0).wait()
            assert torch.equal(gradient, other)
            if number == 1:
                net["second"].double()


def test_the_communicator_of_a_wrapper_that_is_gone_is_given_back_with_the_next(comm: Communicator) -> None:
    transports = []
    for _ in range(4):
        model = DistributedDataParallel(mlp(6, 5, 2), comm)
        model(torch.ones(4, 6).double()).sum().backward()
        transports.append(model.comm._channel.transport)
        del model
        gc.collect()
    model = DistributedDataParallel(mlp(6, 5, 2), comm)
    assert [bool(transport.comm) for transport in transports] == [False] * 4  # MPI's null communicator
    model.close()


def test_a_closed_wrapper_is_not_trained_and_gives_its_communicator_back(comm: Communicator) -> None:
    net = mlp(6, 5, 2)
    used = comm._channel.engine.shared.arena.used_bytes if comm.size > 1 else 0  # type: ignore[union-attr]  # one node
    model = DistributedDataParallel(net, comm)
    model(torch.ones(4, 6).double()).sum().backward()
    model.close()
    model.close()
    with pytest.raises(ClosedError, match=r"DistributedDataParallel on .* is closed: gradients would not be averaged"):
        model(torch.ones(4, 6).double())
    with torch.no_grad():
        assert torch.equal(model(torch.ones(4, 6).double()), net(torch.ones(4, 6).double()))
    normed = mlp(6, 5, 2, normed=True)
    with wrapped(normed, comm) as with_buffers:
        pass
    with torch.no_grad():
        assert torch.equal(with_buffers(torch.ones(4, 6).double()), normed(torch.ones(4, 6).double()))
    net.zero_grad()
    net(torch.ones(4, 6).double() * (comm.rank + 1)).sum().backward()
    assert comm._channel.engine.channels
    assert not any(channel.name == model.comm.name for channel in comm._channel.engine.channels)
    net.zero_grad()
    gc.disable()  # the memory goes without it
    try:
        del model
        if comm.size > 1:
            assert comm._channel.engine.shared.arena.used_bytes <= used  # type: ignore[union-attr]  # one node
    finally:
        gc.enable()


@pytest.mark.parametrize("has_unused", [False, True])
@pytest.mark.parametrize("change", ["assigned", "adapted"])
def test_parameters_that_are_other_ones_since_the_wrapping_are_named(
    comm: Communicator, change: str, has_unused: bool
) -> None:
    net = mlp(6, 5, 2)
    with wrapped(net, comm, find_unused_parameters=has_unused) as model:
        model(torch.ones(4, 6).double()).sum().backward()
        if change == "assigned":
            net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)
        else:
            net.requires_grad_(False)
            net.append(nn.Linear(2, 2).double())
        first = "0" if change == "assigned" else "4"
        with pytest.raises(UsageError, match=rf"trained, {first}\.weight the first, are other.*wrap the module after"):
            model(torch.ones(4, 6).double()).sum().backward()


@pytest.mark.parametrize("convert", ["load", "to"])
def test_swapped_parameters_get_their_hooks_back(comm: Communicator, convert: str) -> None:
    net = mlp(6, 5, 2)
    with wrapped(net, comm) as model:
        for number in range(3):
            model.zero_grad()
            model(inputs(comm, number, (4, 6), torch.float64)).square().sum().backward()
            gradients = [parameter.grad.clone() for parameter in net.parameters()]
            for gradient in gradients:
                comm.broadcast(gradient, 0).wait()
            assert_equal([parameter.grad for parameter in net.parameters()], gradients)
            if number:
                continue
            torch.__future__.set_swap_module_params_on_conversion(True)
            try:
                if convert == "load":
                    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
                else:
                    model.float().double()
            finally:
                torch.__future__.set_swap_module_params_on_conversion(False)
        assert model.reducer.step == 3


def test_a_hook_from_after_the_forward_runs_before_ours(comm: Communicator) -> None:
    net = mlp(6, 5, 2)
    with wrapped(net, comm) as model:
        for number in range(3):
            model.zero_grad()
            loss = model(inputs(comm, number, (4, 6), torch.float64)).square().sum()
            handles = [p.register_post_accumulate_grad_hook(_take_rank(comm)) for p in net.parameters()]
            loss.backward()
            for handle in handles:
                handle.remove()
            for parameter in net.parameters():
                assert torch.equal(parameter.grad, torch.full_like(parameter, (comm.size - 1) / 2))


def _take_rank(comm: Communicator) -> Any:
    def hook(parameter: Tensor) -> None:
        parameter.grad.fill_(comm.rank)  # type: ignore[union-attr]  # it has one then

    return hook


@pytest.mark.parametrize("has_unused", [False, True])
def test_a_part_that_is_replaced_is_named(comm: Communicator, has_unused: bool) -> None:
    net = mlp(6, 5, 2)
    with wrapped(net, comm, find_unused_parameters=has_unused) as model:
        model(torch.ones(4, 6).double()).sum().backward()
        net[2] = nn.Linear(5, 2).double()
        with pytest.raises(UsageError, match=r"2\.weight is another tensor than when the module was wrapped.*wrap the"):
            model(torch.ones(4, 6).double()).sum().backward()


def test_average_leaves_no_memory_behind(comm: Communicator) -> None:
    if comm.size == 1:
        pytest.skip("one rank needs none")
    gradients = {"w": torch.ones(100_000), "b": torch.ones(3)}
    arena: Any = comm._channel.engine.shared.arena  # type: ignore[union-attr]  # one node
    mpdist.average(comm, gradients).wait()
    gc.collect()
    gc.disable()
    try:
        used = arena.used_bytes
        for _ in range(5):
            mpdist.average(comm, gradients).wait()
        assert arena.used_bytes <= used
    finally:
        gc.enable()
