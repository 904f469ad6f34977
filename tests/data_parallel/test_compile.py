"""torch.compile inside and outside the wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from data_parallel.pairs import assert_equal, inputs, mlp, wrapped
from torch import Tensor, nn

from mpdist import Communicator, UsageError

pytestmark = [pytest.mark.ranks(1, 2), pytest.mark.limit(120)]


class Net(nn.Module):
    """A class of the user's: the compiler leaves forwards of torch.nn's own to those who call them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(6, 400, 400, 400, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_compiled_module_has_the_same_gradients(comm: Communicator, place: str) -> None:
    torch._dynamo.reset()
    net, copy = Net(), Net()
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.backends.registry.lookup_backend("aot_eager")(graph, examples)

    inner: Any = torch.compile(net, backend=backend) if place == "inside" else net
    with wrapped(inner, comm, bucket_cap_mb=1) as model:
        copy.load_state_dict(net.state_dict())
        compiled = torch.compile(model, backend=backend) if place == "outside" else model
        for number in range(4):
            x = inputs(comm, number, (4, 6), torch.float64)
            for each in (compiled, copy):
                each.zero_grad()
                each(x).square().mean().backward()
            for parameter in copy.parameters():
                comm.all_reduce(parameter.grad, op="avg").wait()
            assert_equal([p.grad for p in net.parameters()], [p.grad for p in copy.parameters()])
        assert len(graphs) > 1  # dynamo's splitter saw the wrapper: buckets start while the rest of backward runs
        assert len(model.reducer.buckets) > 1
    torch._dynamo.reset()


def test_a_compiled_step_of_training_has_the_same_parameters(comm: Communicator) -> None:
    """Dynamo goes on tracing where backward calls hooks."""
    torch._dynamo.reset()
    net, copy = Net(), Net()
    with wrapped(net, comm) as model:
        copy.load_state_dict(net.state_dict())
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (net, copy)]

        @torch.compile(backend="eager")
        def step(x: Tensor) -> None:
            optimizers[0].zero_grad()
            model(x).square().mean().backward()
            optimizers[0].step()

        for number in range(3):
            x = inputs(comm, number, (4, 6), torch.float64)
            step(x)
            optimizers[1].zero_grad()
            copy(x).square().mean().backward()
            for parameter in copy.parameters():
                comm.all_reduce(parameter.grad, op="avg").wait()
            optimizers[1].step()
        assert_equal(list(net.parameters()), list(copy.parameters()))
    torch._dynamo.reset()


@pytest.mark.usefixtures("every_linear_layer_is_large")
def test_a_compiled_function_within_forward_calls_layers_as_torch_has_them(comm: Communicator) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8).double(), nn.Linear(8, 3).double()
            self.inner = torch.compile(lambda x: self.first(x).tanh(), backend=counter, fullgraph=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(x))

    net = Partly()
    with wrapped(net, comm) as model:
        for number in range(5):
            x = inputs(comm, number, (4, 6), torch.float64)
            net.zero_grad()
            net(x).square().mean().backward()
            expected = [parameter.grad.clone() for parameter in net.parameters()]
            for gradient in expected:
                comm.all_reduce(gradient, op="avg").wait()
            net.zero_grad()
            model(x).square().mean().backward()
            assert_equal([p.grad for p in net.parameters()], expected)
        placed = {slot.name: slot.is_placed for slot in model.reducer.slots}
    assert [name for name in placed if placed[name]] == ["last.weight"]
    assert counter.frame_count <= 2
    torch._dynamo.reset()


@pytest.mark.usefixtures("every_linear_layer_is_large")
@pytest.mark.parametrize("compiled", [lambda net: net.compile(backend="eager"), lambda net: net.layers.compile()])
def test_modules_that_compile_themselves_are_left_alone(comm: Communicator, compiled: Any) -> None:
    net = Net()
    with wrapped(net, comm) as model, torch.compiler.set_stance("force_eager"):
        compiled(net)
        for number in range(3):
            model.zero_grad()
            model(inputs(comm, number, (4, 6), torch.float64)).square().mean().backward()
        assert not any(slot.is_placed for slot in model.reducer.slots)


@pytest.mark.parametrize("has_unused", [False, True])
def test_compiled_autograd_is_refused(comm: Communicator, has_unused: bool) -> None:
    """It never calls what waits for the end of backward; an ordinary backward may follow."""
    torch._dynamo.reset()
    net = mlp(6, 10, 3)
    with wrapped(net, comm, find_unused_parameters=has_unused) as model:

        def step(x: Tensor) -> None:
            model.zero_grad()
            model(x).square().mean().backward()

        x = inputs(comm, 0, (4, 6), torch.float64)
        for _ in range(2):
            with (
                torch._dynamo.config.patch(compiled_autograd=True),
                pytest.raises(UsageError, match="compiled autograd, whose end cannot be seen"),
            ):
                torch.compile(step, backend="eager")(x)
            step(x)
        expected = net[0].weight.grad.clone()
        comm.broadcast(expected, 0).wait()
        assert torch.equal(net[0].weight.grad, expected)
        assert model.reducer.step == 2
    torch._dynamo.reset()
