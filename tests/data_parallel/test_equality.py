"""DistributedDataParallel trains as torch's does over gloo: every option and every kind of step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from data_parallel.pairs import assert_equal, both, inputs, mlp, plain_step, train, wrapped
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch_support.older import hears_of_invariants

from mpdist import Communicator

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.usefixtures("gloo")]

TINY = 1e-4  # MiB: a bucket for each parameter


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": TINY},
        {"bucket_cap_mb": 1000},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"broadcast_buffers": False},
        {"find_unused_parameters": True, "bucket_cap_mb": TINY},
    ],
    ids=str,
)
def test_options(comm: Communicator, options: dict[str, Any]) -> None:
    both(comm, lambda: mlp(6, 10, 8, 3, normed=True), options=options)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("foreach", [True, False])
def test_zero_grad(comm: Communicator, set_to_none: bool, foreach: bool) -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, number: int) -> None:
        optimizer.zero_grad(set_to_none)
        model(x).square().mean().backward()
        optimizer.step()

    both(comm, lambda: mlp(6, 10, 3), step, optimizer=lambda p: torch.optim.Adam(p, foreach=foreach))


def test_without_zero_grad(comm: Communicator) -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, number: int) -> None:
        model(x).square().mean().backward()  # the mean of earlier steps is added to, on all ranks alike
        optimizer.step()

    both(comm, lambda: mlp(6, 10, 3), step, rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_types(comm: Communicator, dtype: torch.dtype) -> None:
    if dtype.is_complex and torch.__version__ < "2.9":
        pytest.skip(f"stock DDP of torch {torch.__version__} broadcasts no complex numbers by gloo")

    def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, number: int) -> None:
        optimizer.zero_grad()
        model(x).abs().square().mean().backward()
        optimizer.step()

    rtol = {torch.float64: 1e-12, torch.float32: 1e-5, torch.complex64: 1e-5}.get(dtype, 3e-2)
    both(comm, lambda: mlp(6, 10, 3).to(dtype), step, dtype=dtype, rtol=rtol)


def test_several_types_in_one_module(comm: Communicator) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 5).double()
            self.b = nn.Linear(5, 4).float()
            self.c = nn.Linear(4, 3).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x).float()).bfloat16()).double()

    both(comm, Mixed, rtol=3e-2)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_optimizers(comm: Communicator, optimizer: Any) -> None:
    both(comm, lambda: mlp(6, 10, 3), optimizer=lambda p: optimizer(p, lr=0.01, weight_decay=0.1))


@pytest.mark.parametrize("views", [True, False])
def test_gradient_accumulation(comm: Communicator, views: bool) -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, number: int) -> None:
        optimizer.zero_grad()
        parts = x.chunk(4)
        with model.no_sync():
            for part in parts[:-1]:
                model(part).square().mean().backward()
        model(parts[-1]).square().mean().backward()
        optimizer.step()

    both(comm, lambda: mlp(6, 10, 3), step, options={"gradient_as_bucket_view": views})


def test_gradients_of_two_outputs_in_one_backward(comm: Communicator) -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, number: int) -> None:
        optimizer.zero_grad()
        (model(x).square().mean() + model(2 * x).mean()).backward()
        optimizer.step()

    both(comm, lambda: mlp(6, 10, 3), step)


def test_clipped_and_replaced_gradients(comm: Communicator) -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, number: int) -> None:
        if number % 2:
            optimizer.zero_grad()
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 2  # a new tensor, which the next backward adds to
        optimizer.step()

    both(comm, lambda: mlp(6, 10, 3), step, rtol=1e-10)


def test_shared_parameters(comm: Communicator) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.b = nn.Linear(6, 6)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(self.a(x)).tanh())

    both(comm, lambda: Shared().double())


def test_frozen_parameters(comm: Communicator) -> None:
    def build() -> nn.Module:
        net = mlp(6, 10, 3)
        net[0].weight.requires_grad_(False)
        return net

    both(comm, build)


def test_parameters_thawed_and_frozen_again(comm: Communicator) -> None:
    torch.manual_seed(3)
    net = mlp(6, 10, 8, 3)
    copy = mlp(6, 10, 8, 3)
    copy.load_state_dict(net.state_dict())
    with wrapped(net, comm) as model:
        for number in range(9):
            for each in (net, copy):
                each[0].requires_grad_(number // 3 == 1)
            got, expected = [], []
            model.zero_grad()
            copy.zero_grad()
            x = inputs(comm, number, (4, 6), torch.float64)
            model(x).square().mean().backward()
            copy(x).square().mean().backward()
            for a, b in zip(net.parameters(), copy.parameters(), strict=True):
                assert (a.grad is None) == (b.grad is None)
                if a.grad is not None:
                    comm.all_reduce(b.grad, op="avg").wait()
                    got.append(a.grad)
                    expected.append(b.grad)
            assert len(got) == (6 if number // 3 == 1 else 4)
            assert_equal(got, expected)


def test_channels_last_gradients_have_the_strides_of_their_parameters(comm: Communicator) -> None:
    def build() -> nn.Module:
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).double()
        return net.to(memory_format=torch.channels_last)

    both(comm, build, shape=(2, 3, 8, 8))
    net = build()
    with wrapped(net, comm) as model:
        train(comm, model, shape=(2, 3, 8, 8))
        assert all(parameter.grad.stride() == parameter.stride() for parameter in net.parameters())


def test_empty_and_scalar_parameters(comm: Communicator) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.zeros(0, 3).double())
            self.scale = nn.Parameter(torch.tensor(2.0).double())

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * x + self.nothing.sum()

    both(comm, Odd)


def test_nested_outputs(comm: Communicator) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(6, 10, 3)

        def forward(self, x: Tensor) -> dict[str, Any]:
            y = self.net(x)
            return {"loss": [y.square().mean(), (y.detach(), 3)], "text": "ok", "y": y}

    def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, number: int) -> None:
        optimizer.zero_grad()
        output = model(x)
        assert output["text"] == "ok"
        (output["loss"][0] if number % 2 else output["y"].square().mean()).backward()
        optimizer.step()

    both(comm, Nested, step)


def test_output_modified_in_place(comm: Communicator) -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, number: int) -> None:
        optimizer.zero_grad()
        model(x).mul_(2).square_().mean().backward()
        optimizer.step()

    both(comm, lambda: nn.Linear(6, 3).double(), step)


def test_hidden_output_is_averaged_all_the_same(comm: Communicator) -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(6, 10, 3)

        def forward(self, x: Tensor) -> Any:
            y = self.net(x)
            return lambda: y

    def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, number: int) -> None:
        optimizer.zero_grad()
        model(x)().square().mean().backward()
        optimizer.step()

    both(comm, Hidden, step)


def test_mixed_precision(comm: Communicator) -> None:
    def build() -> nn.Module:
        return mlp(6, 10, 3, dtype=torch.float32)

    scaler = {}

    def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, number: int) -> None:
        mine = scaler.setdefault(id(model), torch.amp.GradScaler("cpu", init_scale=8.0))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).square().mean()
        mine.scale(loss).backward()
        mine.unscale_(optimizer)
        mine.step(optimizer)
        mine.update()

    both(comm, build, step, dtype=torch.float32, rtol=1e-5)


def test_loss_scaler_skips_on_all_ranks_what_overflows_on_one(comm: Communicator) -> None:
    net = mlp(6, 3, dtype=torch.float32)
    before = [parameter.clone() for parameter in net.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with wrapped(net, comm) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.ones(4, 6)).mean() * (float("inf") if comm.rank == comm.size - 1 else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0
    expected = [comm.broadcast(tensor, src=0).wait() for tensor in before]
    assert_equal([parameter.detach() for parameter in net.parameters()], expected)


def test_buffers_are_those_of_rank_0(comm: Communicator) -> None:
    net = mlp(6, 3, normed=True)
    with wrapped(net, comm) as model:
        train(comm, model)
        with torch.no_grad():
            model(torch.zeros(2, 6).double())
        net.eval()
        model(torch.zeros(2, 6).double())
        mine = net[2].running_mean.clone()
        comm.broadcast(mine, src=0).wait()
        assert_equal([net[2].running_mean], [mine])


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_create_graph(comm: Communicator) -> None:
    net, copy = mlp(6, 10, 3), mlp(6, 10, 3)
    with wrapped(net, comm) as model:
        copy.load_state_dict(net.state_dict())
        for number in range(3):
            x = inputs(comm, number, (4, 6), torch.float64)
            with pytest.warns(UserWarning, match="have no graph"):
                model(x).square().mean().backward(create_graph=True)
            copy(x).square().mean().backward()
            for parameter in copy.parameters():
                comm.all_reduce(parameter.grad, op="avg").wait()
            assert_equal([p.grad for p in net.parameters()], [p.grad for p in copy.parameters()])
            net.zero_grad()
            copy.zero_grad()


@pytest.mark.filterwarnings("ignore:.*the averaged gradients have no graph:UserWarning")
def test_gradient_penalty(comm: Communicator) -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, number: int) -> None:
        optimizer.zero_grad()
        x = x.requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.square().mean() + slope.square().mean()).backward()
        optimizer.step()

    torch.manual_seed(1)
    net, copy = mlp(6, 10, 3), mlp(6, 10, 3)
    copy.load_state_dict(net.state_dict())
    with wrapped(net, comm) as model:
        # torch's reducer counts the first, partial backward; so the reference is averaging by hand
        for number in range(3):
            for each in (model, copy):
                x = inputs(comm, number, (4, 6), torch.float64)
                step(each, torch.optim.SGD(each.parameters(), lr=0.0), x, number)
            for parameter in copy.parameters():
                comm.all_reduce(parameter.grad, op="avg").wait()
            assert_equal([p.grad for p in net.parameters()], [p.grad for p in copy.parameters()])


def test_sparse_gradients(comm: Communicator) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(20, 6, sparse=True)
            self.bag = nn.EmbeddingBag(9, 6, sparse=True)
            self.out = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            rows = (x.abs() * 10).long() % 20
            return self.out(self.words(rows).mean(1) + self.bag(rows % 9))

    torch.manual_seed(7)
    net, copy = Words().double(), Words().double()
    copy.load_state_dict(net.state_dict())
    with wrapped(net, comm) as model:
        for number in range(3):
            x = inputs(comm, number, (3 + comm.rank, 4), torch.float64)
            for each in (model, copy):
                each.zero_grad()
                each(x).square().mean().backward()
            assert net.words.weight.grad.is_sparse
            for parameter in copy.parameters():
                dense = parameter.grad.to_dense().contiguous()
                comm.all_reduce(dense, op="avg").wait()
                parameter.grad = dense
            assert_equal([p.grad.to_dense() for p in net.parameters()], [p.grad for p in copy.parameters()])


@pytest.mark.skipif(not hears_of_invariants, reason=f"torch {torch.__version__} warns whatever it is told")
def test_sparse_gradients_come_without_torchs_warning(comm: Communicator) -> None:
    net = nn.Embedding(20, 6, sparse=True)
    rows = torch.tensor([comm.rank, 3])
    with wrapped(net, comm) as model, warnings.catch_warnings():
        warnings.filterwarnings("error", message="Sparse invariant")
        torch.set_warn_always(True)  # else torch says each thing once in a process
        try:
            model(rows).sum().backward()
        finally:
            torch.set_warn_always(False)
    assert net.weight.grad.is_sparse


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_two_ranks_are_one_rank_with_the_double_batch(comm: Communicator, gloo: ProcessGroup, optimizer: Any) -> None:
    torch.manual_seed(2)
    net, alone = mlp(6, 30, 20, 3), mlp(6, 30, 20, 3)
    comm_values = [comm.broadcast(p.detach(), src=0).wait() for p in net.parameters()]
    alone.load_state_dict(dict(zip(net.state_dict(), comm_values, strict=True)))
    with wrapped(net, comm) as model:
        steps = [(model, optimizer(model.parameters(), lr=0.01)), (alone, optimizer(alone.parameters(), lr=0.01))]
        for number in range(50):
            whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
            for (each, made), x in zip(steps, (whole[comm.rank :: 2], whole), strict=True):
                plain_step(each, made, x, number)
        differences = [(a - b).abs().max().item() for a, b in zip(net.parameters(), alone.parameters(), strict=True)]
        assert max(differences) <= 1e-13
