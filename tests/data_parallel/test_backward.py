"""Backward in all its forms: checkpoints, several of them, late ranks, hooks that replace gradients."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from data_parallel.pairs import Breaks, assert_equal, both, inputs, mlp, wrapped
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mpdist
from mpdist import ClosedError, Communicator, UsageError, WorkTimeout
from mpdist.torch import DistributedDataParallel
from mpdist.torch.data_parallel.ending import is_in_backward

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.usefixtures("gloo")]


class Checkpointed(nn.Module):
    """Layers whose activations are computed again in backward."""

    def __init__(self, use_reentrant: bool, repeats: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.parts = nn.ModuleList([mlp(8, 9, 8), mlp(8, 7, 8)])
        self.last = nn.Linear(8, 2)
        self.use_reentrant = use_reentrant
        self.repeats = repeats
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.repeats):
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=self.use_reentrant)
        return self.last(x)


class Hidden:
    """An output whose tensors are not looked for."""

    __slots__ = ("y",)

    def __init__(self, y: Tensor) -> None:
        self.y = y


@pytest.mark.parametrize("has_unused", [False, True])
def test_reentrant_checkpoint_behind_an_output_that_is_not_seen_is_an_error(
    comm: Communicator, has_unused: bool
) -> None:
    class Net(Checkpointed):
        def forward(self, x: Tensor) -> Any:
            return Hidden(checkpoint(self.last, super().forward(x)[:, :1].expand(-1, 8), use_reentrant=True))

    with wrapped(Net(True), comm, find_unused_parameters=has_unused) as model:
        text = r"last\.(weight|bias) comes from a reentrant checkpoint.*use_reentrant=False"
        with pytest.raises(UsageError, match=text):
            model(inputs(comm, 0, (4, 6), torch.float64)).y.sum().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("bucket_cap_mb", [1e-4, 25])
def test_activation_checkpoints(comm: Communicator, use_reentrant: bool, bucket_cap_mb: float) -> None:
    both(comm, lambda: Checkpointed(use_reentrant), options={"bucket_cap_mb": bucket_cap_mb})


def test_checkpoints_that_share_parameters(comm: Communicator) -> None:
    both(comm, lambda: Checkpointed(False, repeats=2))
    both(comm, lambda: Checkpointed(True, repeats=2), options={"static_graph": True, "bucket_cap_mb": 1e-4})


@pytest.mark.parametrize("steps", [0, 2])
def test_gradient_ready_twice_is_named(comm: Communicator, steps: int) -> None:
    net = Checkpointed(True)
    with wrapped(net, comm, bucket_cap_mb=25) as model:
        for number in range(steps):
            model(inputs(comm, number, (4, 6), torch.float64)).sum().backward()
        net.repeats = 2
        with pytest.raises(UsageError, match=r"parts\.1\.\S+ became ready twice.*use_reentrant=False"):
            model(torch.ones(4, 6).double()).sum().backward()


def test_view_behind_a_checkpoint_may_be_changed_in_place(comm: Communicator) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = mlp(6, 8), mlp(8, 2)

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.last, self.first(x), use_reentrant=True).view(-1)

    def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, number: int) -> None:
        optimizer.zero_grad()
        model(x).mul_(2).square().mean().backward()
        optimizer.step()

    both(comm, Net, step)


@pytest.mark.ranks(1)
def test_parameters_are_looked_at_after_a_forward_that_is_not_of_a_backward(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with wrapped(mlp(6, 10, 3), comm) as model:
        looks: list[bool] = []
        monkeypatch.setattr(model.reducer, "look_at_parameters", lambda: looks.append(is_in_backward()))
        x = torch.ones(4, 6, dtype=torch.float64, requires_grad=True)
        checkpoint(model, x, use_reentrant=True).sum().backward()
        assert looks == []
        model(x).sum().backward()
        assert looks == [False]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_whole_module_in_a_checkpoint(comm: Communicator, use_reentrant: bool) -> None:
    net, copy = mlp(6, 10, 3), mlp(6, 10, 3)
    with wrapped(net, comm) as model:
        copy.load_state_dict(net.state_dict())
        for number in range(3):
            x = inputs(comm, number, (4, 6), torch.float64).requires_grad_()
            for each in (model, copy):
                each.zero_grad()
                checkpoint(each, x, use_reentrant=use_reentrant).square().mean().backward()
            for parameter in copy.parameters():
                comm.all_reduce(parameter.grad, op="avg").wait()
            assert_equal([p.grad for p in net.parameters()], [p.grad for p in copy.parameters()])


def averaged(comm: Communicator, net: nn.Module, *losses: Any) -> list[Tensor]:
    """What the gradients should be: those of this rank's losses, averaged by hand."""
    gradients = [torch.zeros_like(p) for p in net.parameters()]
    for loss in losses:
        for total, part in zip(gradients, torch.autograd.grad(loss(net), list(net.parameters())), strict=True):
            total += part
    for gradient in gradients:
        comm.all_reduce(gradient, op="avg").wait()
    return gradients


def test_several_backwards_in_a_step(comm: Communicator) -> None:
    net = mlp(6, 10, 3)
    with wrapped(net, comm, bucket_cap_mb=1e-4) as model:
        for number in range(3):
            x = inputs(comm, number, (4, 6), torch.float64)
            model.zero_grad()
            a, b = model(x), model(2 * x)
            a.square().mean().backward()
            b.square().mean().backward()
            expected = averaged(comm, net, lambda f, x=x: f(x).square().mean(), lambda f, x=x: f(2 * x).square().mean())
            assert_equal([p.grad for p in net.parameters()], expected)


def test_backward_twice_through_one_graph(comm: Communicator) -> None:
    net = mlp(6, 10, 3)
    with wrapped(net, comm) as model:
        for number in range(3):
            x = inputs(comm, number, (4, 6), torch.float64)
            model.zero_grad()
            y = model(x)
            y.square().mean().backward(retain_graph=True)
            y.mean().backward()
            expected = averaged(comm, net, lambda f, x=x: f(x).square().mean(), lambda f, x=x: f(x).mean())
            assert_equal([p.grad for p in net.parameters()], expected)


def test_backward_past_the_wrapper_stays_local(comm: Communicator) -> None:
    """`model.module` is the user's own: rank 0 alone may differentiate through it."""
    net = mlp(6, 10, 3)
    with wrapped(net, comm) as model:
        model(torch.ones(4, 6).double()).sum().backward()
        model.zero_grad()
        if comm.rank == 0:
            net(torch.ones(4, 6).double()).sum().backward()
            assert all(p.grad is not None for p in net.parameters())
        model.zero_grad()
        model(torch.ones(4, 6).double()).sum().backward()


def test_two_wrapped_modules_in_one_backward(comm: Communicator) -> None:
    a, b = mlp(6, 10, 5), mlp(5, 9, 2)
    with wrapped(a, comm, bucket_cap_mb=1e-4) as first, wrapped(b, comm, bucket_cap_mb=1e-4) as second:
        both_nets = nn.Sequential(a, b)
        for number in range(3):
            x = inputs(comm, number, (4, 6), torch.float64)
            first.zero_grad()
            second.zero_grad()
            second(first(x)).square().mean().backward()
            expected = averaged(comm, both_nets, lambda f, x=x: f(x).square().mean())
            assert_equal([p.grad for p in both_nets.parameters()], expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)  # of halves the notes are a message more
@pytest.mark.parametrize("has_unused", [False, True])
def test_wrapped_modules_in_one_backward_may_come_in_another_order_on_each_rank(
    comm: Communicator, has_unused: bool, dtype: torch.dtype
) -> None:
    options = {"bucket_cap_mb": 1e-4, "find_unused_parameters": has_unused}
    a, b = mlp(6, 10, 5, dtype=dtype), mlp(6, 9, 2, dtype=dtype)
    with wrapped(a, comm, **options) as first, wrapped(b, comm, **options) as second:
        models = [first, second]
        for model in models:
            model.comm.timeout = 10
        for number in range(3):
            x = inputs(comm, number, (4, 6), dtype)
            for net in (a, b):
                net.zero_grad()
            order = models if (comm.rank + number) % 2 else models[::-1]
            torch.stack([model(x).square().mean() for model in order]).sum().backward()
            for net in (a, b):
                expected = averaged(comm, net, lambda f, x=x: f(x).square().mean())
                assert_equal([p.grad for p in net.parameters()], expected, 1e-12 if dtype is torch.float64 else 1e-2)


@pytest.mark.ranks(2, 3)
def test_backwards_of_two_wrapped_modules_in_another_order_are_named(comm: Communicator) -> None:
    with wrapped(mlp(6, 3), comm) as first, wrapped(mlp(6, 3), comm) as second:
        models = [first, second] if comm.rank % 2 else [second, first]
        for model in models:
            model.comm.timeout = 1
        loss = models[0](inputs(comm, 0, (4, 6), torch.float64)).sum()
        with pytest.raises(WorkTimeout) as caught:
            loss.backward()  # that of models[1] would follow
        texts = comm.all_gather_object(str(caught.value)).wait()  # one may have been late, and found the others gone
        assert any("several wrapped modules? their backwards must come in the same order" in text for text in texts)


def test_a_module_that_fails_at_the_end_of_a_common_backward_leaves_the_others_as_they_are(comm: Communicator) -> None:
    a, b = mlp(6, 3), mlp(6, 3)
    b.add_module("never", nn.Linear(3, 3).double())
    b.forward = lambda x: b[1](b[0](x))
    with wrapped(b, comm) as second, wrapped(a, comm) as first:
        for number in range(3):
            x = inputs(comm, number, (4, 6), torch.float64)
            with pytest.raises(UsageError, match=r"never\.(weight|bias), never\.(weight|bias) got no gradient"):
                (first(x).sum() + second(x).sum()).backward()
            assert not first.reducer.is_active
            assert not second.reducer.is_active


def test_gradients_are_views_of_buckets(comm: Communicator) -> None:
    net = mlp(6, 10, 3)
    with wrapped(net, comm) as model:
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(4, 6).double()).sum().backward()
            (bucket,) = model.reducer.buckets
            low = bucket.flat.data_ptr()
            for parameter in net.parameters():
                assert low <= parameter.grad.data_ptr() < low + bucket.nbytes


@pytest.mark.limit(120)
def test_one_rank_is_late_in_a_backward_of_300_hooks(comm: Communicator) -> None:
    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            if comm.rank == comm.size - 1:
                time.sleep(0.5)  # longer than what holds another rank up
            return gradient

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(150))
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                x = x + 0.1 * layer(x)
                if number == 75:
                    x = Late.apply(x)
            return x

    net = Deep()
    with wrapped(net, comm, bucket_cap_mb=1e-3) as model:
        for number in range(3):
            x = inputs(comm, number, (4, 4), torch.float64)
            model.zero_grad()
            model(x).square().mean().backward()
            expected = averaged(comm, net, lambda f, x=x: f(x).square().mean())
            assert_equal([p.grad for p in net.parameters()], expected)
        assert len(model.reducer.buckets) > 10
        last = model.statistics(1)
        assert last.steps[0].slowest == comm.size - 1
        if comm.rank != comm.size - 1:
            assert last.waiting > 0.05


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_backward_whose_wait_for_the_others_is_interrupted_is_the_last(comm: Communicator, steps: int) -> None:
    """The next one would be averaged with this one of the others."""

    def interrupt(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGUSR2, interrupt)
    net = mlp(6, 3)
    try:
        with wrapped(net, comm) as model:
            for _ in range(steps):
                model(torch.ones(4, 6).double()).sum().backward()
            comm.barrier().wait()
            model.comm.timeout = 20
            loss = model(torch.ones(4, 6).double()).sum()
            if comm.rank == 0:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()
                with pytest.raises(InterruptedError):
                    loss.backward()
                with pytest.raises(ClosedError, match=r"interrupted.*wrap its \.module again"):
                    model(torch.ones(4, 6).double()).sum().backward()
        with wrapped(net, comm) as model:
            model(torch.full((4, 6), float(comm.rank)).double()).sum().backward()
            assert model.reducer.step == 1
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_wrapper_whose_backward_broke_off_is_closed_by_each_rank_for_itself(comm: Communicator) -> None:
    """Its ranks have begun different numbers of collectives by then."""

    net = mlp(6, 10, 3, normed=True)
    x = torch.ones(4, 6).double()
    model = DistributedDataParallel(net, comm, bucket_cap_mb=1e-6)
    model(x).sum().backward()
    with pytest.raises(ArithmeticError):
        model(Breaks.apply(x.requires_grad_())).sum().backward()
    for work in model.comm._channel.unfinished():
        work.wait()
    if comm.rank == 0:
        model(x)  # gives the others its buffers, and waits for none of them
        model.close()
    comm.barrier().wait()
    if comm.rank != 0:
        model.close()
    net.zero_grad()
    with wrapped(net, comm) as model:
        model(x).sum().backward()
        assert model.reducer.step == 1


def test_inside_a_running_event_loop(comm: Communicator) -> None:
    async def main(world: Communicator) -> None:
        async with world.dup() as own:
            net = mlp(6, 10, 3)
            with wrapped(net, own) as model:
                for number in range(3):
                    x = inputs(own, number, (4, 6), torch.float64)
                    model.zero_grad()
                    model(x).square().mean().backward()
                assert model.reducer.step == 3

    mpdist.run(main)


def test_gradient_taken_away_by_a_hook_is_named(comm: Communicator) -> None:
    net = nn.Linear(6, 3).double()

    def take(parameter: Tensor) -> None:
        parameter.grad = None

    handle = net.weight.register_post_accumulate_grad_hook(take)  # before the wrapper's
    with wrapped(net, comm) as model, pytest.raises(UsageError, match="the gradient of weight was taken away"):
        model(torch.ones(4, 6).double()).sum().backward()
    handle.remove()


def test_tensor_hooks_change_gradients_before_they_are_averaged(comm: Communicator) -> None:
    net = mlp(6, 10, 3)
    with wrapped(net, comm) as model:
        for number in range(3):
            x = inputs(comm, number, (4, 6), torch.float64)
            model.zero_grad()
            handle = net[0].weight.register_hook(lambda gradient: gradient * 3)
            model(x).square().mean().backward()
            handle.remove()
            expected = averaged(comm, net, lambda f, x=x: f(x).square().mean())
            expected[0] *= 3
            assert_equal([p.grad for p in net.parameters()], expected)


@pytest.mark.parametrize("width", [3, 400])
def test_sparse_gradient_of_an_ordinary_parameter_is_named(comm: Communicator, width: int) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(width, width))

        def forward(self, rows: Tensor) -> Tensor:
            return nn.functional.embedding(rows, self.table, sparse=True)

    with wrapped(Rows(), comm) as model, pytest.raises(UsageError, match="the gradient of table is sparse"):
        model(torch.arange(2)).sum().backward()
