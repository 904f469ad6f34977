"""Uneven inputs: ranks that have no more take part until all are done."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from data_parallel.pairs import assert_equal, inputs, mlp, wrapped
from data_parallel.test_backward import Checkpointed
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel
from torch_support import values

import mpdist.torch
from mpdist import Communicator, UsageError
from mpdist.torch.data_parallel.reducer import Reducer

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.usefixtures("gloo")]


def run(comm: Communicator, model: Any, counts: list[int], options: dict[str, Any], accumulate: bool) -> list[Any]:
    """Train on uneven numbers of batches; one pass without join before it where counts say so."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.join(**options):
        for number in range(counts[comm.rank % len(counts)]):
            optimizer.zero_grad()
            x = inputs(comm, number, (4, 6), torch.float64)
            if accumulate:
                with model.no_sync():
                    model(x).square().mean().backward()
            model(x).square().mean().backward()
            optimizer.step()
    return [tensor.detach().clone() for tensor in [*model.parameters(), *model.buffers()]]


@pytest.mark.parametrize("counts", [[3, 5, 1], [4], [0, 2], [2, 0, 5]], ids=str)
@pytest.mark.parametrize("options", [{}, {"divide_by_initial_world_size": False}], ids=str)
@pytest.mark.parametrize("bucket_cap_mb", [1e-4, 25])
def test_joined_ranks(comm: Communicator, counts: list[int], options: dict[str, Any], bucket_cap_mb: float) -> None:
    torch.manual_seed(7)
    net = mlp(6, 10, 3, normed=True)
    theirs = TorchDataParallel(copy.deepcopy(net), bucket_cap_mb=bucket_cap_mb)
    with wrapped(net, comm, bucket_cap_mb=bucket_cap_mb) as ours:
        got = run(comm, ours, counts, options, False)
        assert_equal(got, run(comm, theirs, counts, options, False))
        model_goes_on = inputs(comm, 99, (4, 6), torch.float64)
        ours(model_goes_on).sum().backward()


def test_joined_ranks_with_accumulation(comm: Communicator) -> None:
    torch.manual_seed(7)
    net = mlp(6, 10, 3)
    theirs = TorchDataParallel(copy.deepcopy(net))
    with wrapped(net, comm) as ours:
        got = run(comm, ours, [2, 4], {}, True)
        assert_equal(got, run(comm, theirs, [2, 4], {}, True))


def test_joined_ranks_with_unused_parameters(comm: Communicator) -> None:
    torch.manual_seed(7)
    net = mlp(6, 10, 3)
    theirs = TorchDataParallel(copy.deepcopy(net), find_unused_parameters=True)
    with wrapped(net, comm, find_unused_parameters=True) as ours:
        got = run(comm, ours, [2, 4], {}, False)
        assert_equal(got, run(comm, theirs, [2, 4], {}, False))


@pytest.mark.parametrize("counts", [[2, 4], [0, 2], [0, 3, 1]], ids=str)
def test_joined_ranks_with_a_static_graph(comm: Communicator, counts: list[int]) -> None:
    """A rank without a batch while the others learn the graph learns it when it is back."""
    torch.manual_seed(7)
    net = Checkpointed(True, repeats=2)
    theirs = TorchDataParallel(Checkpointed(False, repeats=2))
    theirs.module.load_state_dict(net.state_dict())
    with wrapped(net, comm, static_graph=True, bucket_cap_mb=1e-4) as ours:
        assert_equal(run(comm, ours, counts, {}, False), run(comm, theirs, counts, {}, False))
        assert_equal(run(comm, ours, [2], {"enable": False}, False), run(comm, theirs, [2], {"enable": False}, False))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_rank_without_inputs_gets_the_mean(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """An optimizer that has a shard needs it on every rank; afterwards a rank has its own gradients, or none."""
    net = mlp(6, 10, 3)
    seen: list[list[Any]] = []
    join_absent = Reducer.join_absent

    def noted(reducer: Reducer) -> None:
        join_absent(reducer)
        seen.append([parameter.grad.clone() for parameter in net.parameters()])

    monkeypatch.setattr(Reducer, "join_absent", noted)
    with wrapped(net, comm, **options) as model:
        run(comm, model, [2, 0], {}, False)
        gradients = [parameter.grad for parameter in net.parameters()]
        if comm.rank % 2:
            assert gradients == [None] * 4
            gradients = [torch.empty_like(parameter) for parameter in net.parameters()]
        for gradient in gradients:
            comm.broadcast(gradient, src=0).wait()
        assert len(seen) == 2 * (comm.rank % 2)
        for last in seen[-1:]:
            assert_equal(last, gradients)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}], ids=str)
def test_gradients_that_are_zeroed_after_a_step_are_none_of_the_others_afterwards(
    comm: Communicator, options: dict[str, Any]
) -> None:
    def train(model: Any) -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(2):
            with model.join():
                for number in range(3 - comm.rank % 2):
                    model(inputs(comm, number, (4, 6), torch.float64)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters())
        return [parameter.detach() for parameter in model.parameters()]

    torch.manual_seed(7)
    net = mlp(6, 10, 3)
    theirs = TorchDataParallel(copy.deepcopy(net))
    with wrapped(net, comm, **options) as ours:
        assert_equal(train(ours), train(theirs))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}], ids=str)
@pytest.mark.parametrize("is_local", [False, True])
def test_what_a_rank_has_accumulated_is_kept_while_others_go_on(
    comm: Communicator, options: dict[str, Any], is_local: bool
) -> None:
    torch.manual_seed(7)
    net = mlp(6, 10, 3)
    with wrapped(net, comm, **options) as model:
        with model.join():
            for number in range(1 if comm.rank else 3):
                net.zero_grad()
                model(inputs(comm, number, (4, 6), torch.float64)).square().mean().backward()
            if comm.rank and is_local:
                net(values.placed(inputs(comm, 9, (4, 6), torch.float64))).square().mean().backward()
            kept = [parameter.grad for parameter in net.parameters()]
            before = [gradient.clone() for gradient in kept]
        assert all(parameter.grad is gradient for parameter, gradient in zip(net.parameters(), kept, strict=True))
        assert_equal(kept, before)


@pytest.mark.ranks(2, 3)
def test_early_end_stops_all_ranks_where_that_is_wanted(comm: Communicator) -> None:
    with wrapped(mlp(6, 3), comm) as model:
        text = "has no inputs left"
        with pytest.raises(RuntimeError, match=text):
            run(comm, model, [2, 4], {"throw_on_early_termination": True}, False)


def test_join_may_be_disabled(comm: Communicator) -> None:
    with wrapped(mlp(6, 3), comm) as model:
        run(comm, model, [3], {"enable": False}, False)
        assert model.reducer.step == 3


@pytest.mark.ranks(2, 3)
def test_a_norm_over_all_ranks_is_refused_where_one_has_no_inputs(comm: Communicator) -> None:
    """The last rank has none. The others say that they have, and stop before the norm that would wait for it."""
    net = mpdist.torch.convert_sync_batchnorm(mlp(6, 10, 3, normed=True), comm)
    is_last = comm.rank == comm.size - 1

    def run(model: Any) -> None:
        with model.join():
            if not is_last:
                model._call_roll(True)
                raise UsageError("no more")

    with wrapped(net, comm) as model:
        text = r"normalises over the batches of all ranks.*drop_last=True" if is_last else "no more"
        with pytest.raises(UsageError, match=text):
            run(model)


@pytest.mark.ranks(2, 3)
def test_an_optimizers_state_is_made_equal_as_the_docs_say(comm: Communicator) -> None:
    torch.manual_seed(7)
    net = mlp(6, 10, 3)
    with wrapped(net, comm) as model:
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        for epoch in range(2):
            with model.join():
                for number in range(1 if comm.rank == 0 else 3):
                    optimizer.zero_grad()
                    model(inputs(comm, 10 * epoch + number, (4, 6), torch.float64)).square().mean().backward()
                    optimizer.step()
            optimizer.load_state_dict(comm.broadcast_object(optimizer.state_dict(), src=comm.size - 1).wait())
        model(inputs(comm, 99, (4, 6), torch.float64)).square().mean().backward()
        optimizer.step()
        state = [entry["exp_avg"].cpu() for entry in optimizer.state.values()]
        everyone = comm.all_gather_object([*state, *(tensor.detach().cpu() for tensor in net.parameters())]).wait()
        for other in everyone:
            assert_equal(other, everyone[0], 0.0)
