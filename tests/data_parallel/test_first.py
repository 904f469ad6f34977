"""The first backward: gradients go at once to where the buckets will be, if all ranks see them come in one order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from data_parallel.pairs import Breaks, assert_equal, inputs, wrapped
from torch import Tensor, nn

from mpdist import Communicator
from mpdist.torch.data_parallel.first import First
from mpdist.torch.data_parallel.slot import Slot

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.usefixtures("every_linear_layer_is_large")]

Came = dict[int, list[int]]


@pytest.fixture
def came(monkeypatch: pytest.MonkeyPatch) -> Came:
    """Of each parameter, by its number, where its gradient lay whenever it had come before there were buckets."""
    found: Came = {}
    take = First.take

    def watched(first: First, slot: Slot) -> None:
        take(first, slot)
        assert slot.parameter.grad is not None
        if not slot.is_sparse:
            found.setdefault(slot.index, []).append(slot.parameter.grad.data_ptr())

    monkeypatch.setattr(First, "take", watched)
    return found


class Branches(nn.Module):
    """Layers of sizes that fill no line of the cache, and of two types, in the order in which they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, width) for width in (3, 5, 1, 7))
        self.others = nn.ModuleList(nn.Linear(6, width, dtype=torch.float64) for width in (2, 9))
        self.order = list(range(6))

    def forward(self, x: Tensor) -> Tensor:
        layers = [*self.layers, *self.others]
        loss = x.new_zeros((), dtype=torch.float64)
        for number in self.order:
            layer = layers[number]
            loss = loss + layer(x.to(layer.weight.dtype)).double().square().sum()
        return loss


def step(comm: Communicator, model: Any, net: nn.Module, number: int) -> None:
    """One backward, whose gradients are the means of those without the wrapper, where they are told to be."""
    x = inputs(comm, number, (4, 6), torch.float32)
    expected = []
    for gradient in torch.autograd.grad(net(x), list(net.parameters())):
        mean = gradient.double()
        comm.all_reduce(mean, op="avg").wait()
        expected.append(mean)
    net.zero_grad()
    model(x).backward()
    assert_equal([parameter.grad.double() for parameter in net.parameters()], expected, 1e-5)
    assert all(slot.parameter.grad is slot.view for slot in model.reducer.slots)


def are_there(model: Any, came: Came) -> list[bool]:
    """Of each parameter, whether its gradient lay in its bucket as soon as it had come."""
    return [came[slot.index][0] == slot.view.data_ptr() for slot in model.reducer.slots]


@pytest.mark.parametrize("bucket_cap_mb", [None, 1e-4])
def test_gradients_lie_in_their_buckets_from_the_first_on(
    comm: Communicator, came: Came, bucket_cap_mb: float | None
) -> None:
    net = Branches()
    with wrapped(net, comm, bucket_cap_mb=bucket_cap_mb) as model:
        for number in range(3):
            step(comm, model, net, number)
        assert are_there(model, came) == [True] * 12
        assert {len(places) for places in came.values()} == {1}
        buckets = model.reducer.buckets
        assert len(buckets) >= (2 if bucket_cap_mb is None else 5)
        for bucket in buckets:  # the gaps between gradients are zero
            total = sum(slot.parameter.grad.double().sum() for slot in bucket.slots)
            assert bucket._gradients.double().sum() == pytest.approx(total.item())


@pytest.mark.ranks(2, 3)
def test_ranks_that_see_another_order_move_them(comm: Communicator, came: Came) -> None:
    net = Branches()
    if comm.rank:
        net.order.reverse()
    with wrapped(net, comm) as model:
        for number in range(3):
            step(comm, model, net, number)
        everyones = comm.all_gather_object(all(are_there(model, came))).wait()
        assert not all(everyones)


def test_gradients_of_no_sync_go_there_with_the_others(comm: Communicator, came: Came) -> None:
    net = Branches()
    with wrapped(net, comm) as model:
        x = inputs(comm, 1, (4, 6), torch.float32)
        with model.no_sync():
            model(x).backward()
        assert not came
        model(x).backward()
        assert all(are_there(model, came))
        twice = [2 * gradient for gradient in torch.autograd.grad(net(x), list(net.parameters()))]
        for gradient in twice:
            comm.all_reduce(gradient, op="avg").wait()
        assert_equal([parameter.grad for parameter in net.parameters()], twice, 1e-5)


def test_what_a_broken_first_backward_has_placed_is_added_to_by_the_next(comm: Communicator, came: Came) -> None:
    """As torch has it: gradients that came before it broke stay, until they are taken away."""
    last, first = nn.Linear(6, 1), nn.Linear(6, 6)
    net = nn.Sequential(first, nn.Tanh(), last)
    with wrapped(net, comm) as model:
        x = inputs(comm, 1, (4, 6), torch.float32)
        breaking = first.register_forward_hook(lambda module, args, output: Breaks.apply(output))
        with pytest.raises(ArithmeticError):
            model(x).sum().backward()
        breaking.remove()
        assert first.weight.grad is None
        assert last.weight.grad is not None
        assert model.reducer._first is None
        model(x).sum().backward()
        own = torch.autograd.grad(net(x).sum(), list(net.parameters()))
        expected = [gradient * (1 if number < 2 else 2) for number, gradient in enumerate(own)]
        for gradient in expected:
            comm.all_reduce(gradient, op="avg").wait()
        assert_equal([parameter.grad for parameter in net.parameters()], expected, 1e-5)


def test_sparse_gradients_have_no_place(comm: Communicator, came: Came) -> None:
    net = nn.Sequential(nn.EmbeddingBag(50_000, 6, sparse=True), nn.Linear(6, 2))
    with wrapped(net, comm) as model:
        model(torch.tensor([[1, 2, comm.rank]])).sum().backward()
        assert net[0].weight.grad.layout is torch.sparse_coo
        memory = [bucket.flat.untyped_storage().nbytes() for bucket in model.reducer.buckets]
        assert max(memory) < 4096
        assert all(came[slot.index][0] == slot.view.data_ptr() for slot in model.reducer.slots[1:])


def test_what_is_laid_otherwise_since_it_came_is_moved(comm: Communicator, came: Came) -> None:
    """As where a module is converted within its first backward."""
    first, last = nn.Linear(4, 4), nn.Linear(4, 3)
    net = nn.Sequential(first, nn.Tanh(), last)

    def turn(*_: object) -> None:
        last.weight.data = last.weight.data.t().contiguous().t()

    first.register_full_backward_hook(turn)
    with wrapped(net, comm) as model:
        x = inputs(comm, 1, (5, 4), torch.float32).requires_grad_()
        expected = list(torch.autograd.grad(net(x).square().sum(), list(net.parameters())))
        last.weight.data = last.weight.data.contiguous()
        for gradient in expected:
            comm.all_reduce(gradient, op="avg").wait()
        model(x).square().sum().backward()
        assert_equal([parameter.grad for parameter in net.parameters()], expected, 1e-5)


@pytest.mark.parametrize("why", ["hook", "own gradients"])
def test_where_gradients_do_not_stay_in_buckets_they_wait(comm: Communicator, came: Came, why: str) -> None:
    net = Branches()
    with wrapped(net, comm, gradient_as_bucket_view=why == "hook") as model:
        if why == "hook":
            model.register_comm_hook(None, averaging(comm))
        x = inputs(comm, 1, (4, 6), torch.float32)
        model(x).backward()
        assert not came
        expected = list(torch.autograd.grad(net(x), list(net.parameters())))
        for gradient in expected:
            comm.all_reduce(gradient, op="avg").wait()
        assert_equal([parameter.grad for parameter in net.parameters()], expected, 1e-5)


def averaging(comm: Communicator) -> Callable[[Any, Any], torch.futures.Future[Any]]:
    def hook(state: object, bucket: Any) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        mean = bucket.buffer().clone()
        comm.all_reduce(mean, op="avg").wait()
        future.set_result(mean)
        return future

    return hook
