"""Parameters that get no gradient: found where that is allowed, named where it is not, and nobody hangs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from data_parallel.pairs import Breaks, assert_equal, both, inputs, mlp, wrapped
from torch import Tensor, nn
from torch_support import values

from mpdist import ClosedError, Communicator, UsageError

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.usefixtures("gloo")]

FIND = {"find_unused_parameters": True}


class Branches(nn.Module):
    """Four layers, of which a forward uses those that are named."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(6, 6) for name in "abcd"})
        self.double()

    def forward(self, x: Tensor, names: str) -> Tensor:
        for name in names:
            x = self.layers[name](x).tanh()
        return x


def steps_using(comm: Communicator, schedule: list[list[str]]) -> Any:
    """A step in which rank r uses the layers schedule[step % ...][r % ...]."""

    def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, number: int) -> None:
        names = schedule[number % len(schedule)]
        optimizer.zero_grad()
        model(x, names[comm.rank % len(names)]).square().mean().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize(
    "schedule",
    [
        [["abcd"]],
        [["abc"]],  # d by nobody
        [["ab", "cd"]],  # each by one
        [["a", "b"], ["abcd", "d"], ["d", "d"], ["b", "abcd"]],
        [["dcba"], ["abcd"], ["ca"]],  # another order
    ],
    ids=str,
)
@pytest.mark.parametrize("bucket_cap_mb", [1e-4, 25])
def test_found_where_allowed(comm: Communicator, schedule: list[list[str]], bucket_cap_mb: float) -> None:
    both(comm, Branches, steps_using(comm, schedule), options={**FIND, "bucket_cap_mb": bucket_cap_mb}, steps=6)


@pytest.mark.parametrize("schedule", [[["abc"]], [["ab", "bc"]]], ids=str)
def test_static_graph_learns_them(comm: Communicator, schedule: list[list[str]]) -> None:
    both(comm, Branches, steps_using(comm, schedule), options={"static_graph": True, "bucket_cap_mb": 1e-4})


def test_accumulated_gradient_of_a_parameter_unused_in_the_last_part_counts(comm: Communicator) -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, number: int) -> None:
        optimizer.zero_grad()
        with model.no_sync():
            model(x, "abc").square().mean().backward()
        model(x, "bd").square().mean().backward()
        optimizer.step()

    both(comm, Branches, step, options=FIND)


@pytest.mark.parametrize("options", [FIND, {**FIND, "gradient_as_bucket_view": False}, {"static_graph": True}], ids=str)
def test_a_parameter_that_no_rank_uses_keeps_the_gradient_it_had(comm: Communicator, options: dict[str, Any]) -> None:
    net = Branches()
    net.layers["e"] = nn.Embedding(5, 6, sparse=True, dtype=torch.float64)
    idle = [*net.layers["d"].parameters(), *net.layers["e"].parameters()]
    with wrapped(net, comm, **options) as model:
        earlier = [torch.full_like(parameter, comm.rank + 1.0) for parameter in idle]
        earlier[-1] = earlier[-1].to_sparse(1)
        for parameter, gradient in zip(idle, earlier, strict=True):
            parameter.grad = gradient.clone()
        for number in range(3):
            model(inputs(comm, number, (4, 6), torch.float64), "abc").square().mean().backward()
            assert_equal([parameter.grad for parameter in idle], earlier, 0)


def test_one_rank_uses_no_parameter_at_all(comm: Communicator) -> None:
    """Its backward ends in its input, and it takes part with zeros."""
    net, copy = Branches(), Branches()
    with wrapped(net, comm, **FIND) as model:
        copy.load_state_dict(net.state_dict())
        for number in range(4):
            x = inputs(comm, number, (4, 6), torch.float64).requires_grad_()
            for each in (model, copy):
                each.zero_grad()
                (each(x, "" if comm.rank == 0 else "ab") * x).sum().backward()
            for name, parameter in copy.layers.named_parameters():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                comm.all_reduce(gradient, op="avg").wait()
                got = net.layers.get_parameter(name).grad
                assert (got is None) == (name[0] in "cd" or comm.size == 1)
                if got is not None:
                    assert_equal([got], [gradient])


def test_one_rank_has_nothing_to_differentiate(comm: Communicator) -> None:
    """Its output has no gradient, so that it can't call backward."""
    net = Branches()
    with wrapped(net, comm, **FIND) as model:
        for number in range(3):
            model.zero_grad()
            output = model(inputs(comm, number, (4, 6), torch.float64), "" if comm.rank == 0 else "ab")
            if output.requires_grad:
                output.sum().backward()
            gradients = [p.grad for p in net.layers["a"].parameters()]
            assert all((gradient is None) == (comm.size == 1) for gradient in gradients)


def test_is_named_at_the_first_step_that_misses_it(comm: Communicator) -> None:
    net = Branches()
    with wrapped(net, comm) as model:
        for number in range(2):
            model(inputs(comm, number, (4, 6), torch.float64), "abcd").sum().backward()
        with pytest.raises(UsageError, match=r"on this rank layers\.b\.weight, layers\.b\.bias got no gradient"):
            model(inputs(comm, 3, (4, 6), torch.float64), "acd").sum().backward()


def test_is_named_in_the_very_first_step(comm: Communicator) -> None:
    with (
        wrapped(Branches(), comm) as model,
        pytest.raises(UsageError, match=r"on this rank layers\.d\.weight.*find_unused_parameters=True"),
    ):
        model(torch.ones(4, 6).double(), "abc").sum().backward()


@pytest.mark.ranks(2, 3)
def test_other_ranks_are_told(comm: Communicator) -> None:
    with wrapped(Branches(), comm) as model:
        text = (
            r"on this rank layers\.d" if comm.rank == 0 else rf"layers\.d\.bias got none on 1 other of {comm.size} ra"
        )
        for number in range(2):
            with pytest.raises(UsageError, match=text):
                model(torch.ones(4, 6).double(), "abc" if comm.rank == 0 else "abcd").sum().backward()
            assert number == model.reducer.step - 1


@pytest.mark.parametrize("change", ["abcd", "ab"])
def test_static_graph_that_is_not_static_is_named(comm: Communicator, change: str) -> None:
    with wrapped(Branches(), comm, static_graph=True) as model:
        for _ in range(2):
            model(torch.ones(4, 6).double(), "abc").sum().backward()
        with pytest.raises(UsageError, match="static_graph=True") as error:
            model(torch.ones(4, 6).double(), change).sum().backward()
        assert f"layers.{'d' if len(change) > 3 else 'c'}" in str(error.value)


@pytest.mark.ranks(2, 3)
def test_backward_skipped_by_one_rank_is_noticed(comm: Communicator) -> None:
    with wrapped(mlp(6, 3), comm) as model:
        for _ in range(2):
            model(torch.ones(4, 6).double()).sum().backward()
        if comm.rank == 1:
            model(torch.ones(4, 6).double())  # and no backward: the next one meets that of rank 0
        with pytest.warns(UserWarning, match=f"made {1 + (comm.rank == 1)} forwards .* together {comm.size + 1}"):
            model(torch.ones(4, 6).double()).sum().backward()


def test_gradient_of_an_input_alone_is_no_backward(comm: Communicator) -> None:
    net = mlp(6, 10, 3)
    with wrapped(net, comm) as model:
        model(torch.ones(4, 6).double()).sum().backward()
        before = [p.grad.clone() for p in net.parameters()]
        if comm.rank == 0:
            x = torch.ones(4, 6).double().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x)
            assert slope.abs().sum() > 0
        assert_equal([p.grad for p in net.parameters()], before)
        model.zero_grad()
        model.reducer._forwards = 0
        model(torch.ones(4, 6).double()).sum().backward()
        assert_equal([p.grad for p in net.parameters()], before)


@pytest.mark.parametrize("options", [{}, FIND], ids=str)  # with static_graph torch's own does not average these
@pytest.mark.parametrize("returns_input", [False, True])
def test_gradient_of_an_input_before_backward(
    comm: Communicator, options: dict[str, Any], returns_input: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """A loss of forces: the first derivative reaches no parameter, the second one all but the last bias."""

    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1, bias=False)).double()

        def forward(self, x: Tensor) -> Any:
            return (self.net(x), x) if returns_input else (self.net(x),)

    def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, number: int) -> None:
        optimizer.zero_grad()
        x.requires_grad_()
        (forces,) = torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
        forces.square().mean().backward()
        optimizer.step()

    both(comm, Energy, step, options=options)
    assert not any("create_graph" in str(warning.message) for warning in recwarn)


class Heads(nn.Module):
    """Two outputs, of parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Linear(6, 2) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x)


@pytest.mark.parametrize("options", [{}, FIND], ids=str)
def test_two_backwards_for_some_tensors_are_averaged_each(comm: Communicator, options: dict[str, Any]) -> None:
    """Of heads of their own, which each backward for the other's parameters leaves out, or of the same parameters."""
    torch.manual_seed(1)
    net = Heads().double() if options else nn.Linear(6, 2).double()
    alone = copy.deepcopy(net)

    def derive(module: nn.Module, x: Tensor) -> None:
        outputs = module(x)
        one, other = outputs if options else (outputs[:, 0], outputs[:, 1])
        mine = [parameter for parameter in net.parameters() if parameter.requires_grad]
        if module is alone:
            mine = [parameter for parameter in alone.parameters() if parameter.requires_grad]
        one.square().mean().backward(inputs=mine[:2] if options else mine, retain_graph=True)
        other.pow(4).mean().backward(inputs=mine[2:] if options else mine)

    def gradients(module: nn.Module) -> list[Tensor]:
        return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]

    with wrapped(net, comm, **options) as model:
        for number in range(3):
            everyone = []
            for rank in range(comm.size):
                alone.zero_grad()
                derive(alone, batch(rank, number))
                everyone.append(gradients(alone))
            model.zero_grad()
            derive(model, values.placed(batch(comm.rank, number)))
            assert_equal(gradients(net), [sum(each) / comm.size for each in zip(*everyone, strict=True)])
            model.zero_grad()
            with model.no_sync():
                derive(model, values.placed(batch(comm.rank, number)))
            assert_equal(gradients(net), everyone[comm.rank])


def batch(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn((4, 6), generator=generator, dtype=torch.float64, device="cpu")


@pytest.mark.parametrize("options", [{}, FIND], ids=str)
def test_backward_for_some_tensors_averages_what_it_reaches(comm: Communicator, options: dict[str, Any]) -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, number: int) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward(inputs=list(model.parameters()))
        optimizer.step()

    both(comm, lambda: mlp(6, 10, 3), step, options=options)


def test_backward_that_broke_off_before_any_bucket_can_be_repeated(comm: Communicator) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(6, 10, 3)
            self.breaks = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.net[:2](x)
            return self.net[2:](Breaks.apply(y) if self.breaks else y)

    net = Net()
    with wrapped(net, comm) as model:
        for breaks in (False, True, False):
            net.breaks = breaks
            model.zero_grad()
            loss = model(torch.ones(4, 6).double()).sum()
            if breaks:
                with pytest.raises(ArithmeticError):
                    loss.backward()
            else:
                loss.backward()
                assert net.net[0].weight.grad is not None
    net = Net()
    with wrapped(net, comm, bucket_cap_mb=1e-6) as model:
        model(torch.ones(4, 6).double()).sum().backward()
        net.breaks = True
        with pytest.raises(ArithmeticError):
            model(torch.ones(4, 6).double()).sum().backward()
        with pytest.raises(ClosedError, match="ended by an exception after 2 buckets"):
            model(torch.ones(4, 6).double()).sum().backward()
