"""Linear layers whose backward computes the weight's gradient in its place in the bucket, and where it must not."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from data_parallel.pairs import Breaks, assert_equal, inputs, mlp, wrapped
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mpdist import Communicator
from mpdist.torch import DistributedDataParallel
from mpdist.torch.data_parallel import linear, overlap
from mpdist.torch.data_parallel.reducer import Reducer

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.usefixtures("every_linear_layer_is_large")]

Loss = Callable[[Any, Tensor], Tensor]


@pytest.fixture(autouse=True, params=["no thread", "a thread"])
def has_thread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a thread of ours drives during backward, so that a weight's gradient comes before that of the rows."""
    monkeypatch.setattr(overlap, "is_thread_worth", lambda *_: request.param == "a thread")
    return bool(request.param == "a thread")


def loss_of(model: Any, x: Tensor) -> Tensor:
    return model(x).square().sum()


def placed(model: DistributedDataParallel) -> list[bool]:
    """Of each parameter, whether the last backward computed its gradient in its place."""
    return [slot.is_placed for slot in model.reducer.slots]


def means(comm: Communicator, loss: Tensor, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Of the gradients that each rank has without the wrapper."""
    owners = list(parameters)
    for parameter in owners:
        parameter.grad = None
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in owners]
    for parameter, gradient in zip(owners, gradients, strict=True):
        parameter.grad = None
        comm.all_reduce(gradient, op="avg").wait()
    return gradients


def check(
    comm: Communicator,
    net: nn.Module,
    loss: Loss = loss_of,
    *,
    x: Callable[[int], Tensor] | None = None,
    forward: Callable[[], AbstractContextManager[object]] = nullcontext,
    expects: list[bool] | bool = False,
    rtol: float = 1e-11,
) -> None:
    """Gradients are the mean of those without the wrapper; from the second step on they are in place or not."""
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    make = x or (lambda number: inputs(comm, number, (4, 6), torch.float64))
    with wrapped(net, comm) as model:
        for number in range(4):
            batch = make(number)
            expected = means(comm, loss(net, batch), parameters)
            with forward():
                made = loss(model, batch)
            made.backward()
            assert_equal([parameter.grad for parameter in parameters], expected, rtol)
            assert all(slot.parameter.grad is slot.view for slot in model.reducer.slots)
            net.zero_grad()
            if number and expects is not False:
                assert placed(model) == ([True, False] * (len(parameters) // 2) if expects is True else expects)
            elif number:
                assert not any(placed(model))


# ------------------------------------------------------------------ in place


@pytest.mark.parametrize("shape", [(6,), (1, 6), (4, 6), (2, 3, 6), (2, 0, 6), (0, 6)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_shapes(comm: Communicator, shape: tuple[int, ...], has_bias: bool) -> None:
    net = nn.Sequential(nn.Linear(6, 5, has_bias), nn.Tanh(), nn.Linear(5, 3, has_bias)).double()
    is_placed = [True, False, True, False] if has_bias else [True, True]
    check(comm, net, x=lambda number: inputs(comm, number, shape, torch.float64), expects=is_placed)


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 1e-2)]
)
def test_types(comm: Communicator, dtype: torch.dtype, rtol: float) -> None:
    x = lambda number: inputs(comm, number, (4, 6), dtype)  # noqa: E731
    check(comm, mlp(6, 10, 3, dtype=dtype), lambda m, x: m(x).square().mean(), x=x, expects=True, rtol=rtol)


@pytest.mark.parametrize("make", [lambda x: x.t().contiguous().t(), lambda x: x[:1].expand(4, 6), lambda x: x[:, ::2]])
def test_inputs_that_are_not_contiguous(comm: Communicator, make: Callable[[Tensor], Tensor]) -> None:
    width = make(torch.zeros(4, 6)).shape[1]
    check(comm, mlp(width, 5, 3), x=lambda number: make(inputs(comm, number, (4, 6), torch.float64)), expects=True)


@pytest.mark.parametrize("loss", [lambda m, x: m(x).sum(), lambda m, x: m(x).t().contiguous().square().mean()])
def test_gradients_of_outputs_that_are_not_contiguous(comm: Communicator, loss: Loss) -> None:
    check(comm, nn.Sequential(nn.Linear(6, 3)).double(), loss, expects=True)


def test_outputs_of_which_only_a_transposed_part_is_used(comm: Communicator) -> None:
    loss = lambda m, x: (m(x).permute(2, 0, 1)[1:] * torch.arange(3.0)).square().sum()  # noqa: E731
    x = lambda number: inputs(comm, number, (2, 3, 6), torch.float64)  # noqa: E731
    check(comm, mlp(6, 5, 4), loss, x=x, expects=True)


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6), (2, 2, 3, 6)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_outputs_may_be_changed_in_place(comm: Communicator, shape: tuple[int, ...], has_bias: bool) -> None:
    net = nn.Sequential(nn.Linear(6, 5, has_bias), nn.ReLU(inplace=True), nn.Linear(5, 3, has_bias)).double()
    is_placed = [True, False, True, False] if has_bias else [True, True]
    loss = lambda m, x: m(x).add_(1).mul_(2).square().sum()  # noqa: E731
    check(comm, net, loss, x=lambda number: inputs(comm, number, shape, torch.float64), expects=is_placed)


def test_inputs_may_be_changed_in_place_where_torch_keeps_a_copy(comm: Communicator) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = (1 * x).transpose(0, 1)
            made = self.layer(x)
            x += 1
            return made

    x = lambda number: inputs(comm, number, (2, 3, 6), torch.float64)  # noqa: E731
    check(comm, Changing().double(), x=x, expects=True)


def test_gradient_of_the_input(comm: Communicator) -> None:
    net = mlp(6, 10, 3)
    with wrapped(net, comm) as model:
        for number in range(3):
            x = inputs(comm, number, (2, 4, 6), torch.float64).requires_grad_()
            (expected,) = torch.autograd.grad(loss_of(net, x), x)
            model.zero_grad()
            loss_of(model, x).backward()
            assert_equal([x.grad], [expected])
        assert placed(model) == [True, False] * 2


def test_gradient_of_a_weight_is_there_before_that_of_the_rows(
    comm: Communicator, has_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it may be under way meanwhile."""
    events: list[str] = []
    ready = Reducer.ready
    monkeypatch.setattr(Reducer, "ready", lambda self, slot, p: (events.append(slot.name), ready(self, slot, p))[1])
    with wrapped(net := mlp(6, 10, 3), comm) as model:
        for number in range(3):
            x = inputs(comm, number, (4, 6), torch.float64).requires_grad_()
            x.register_hook(lambda _: events.append("rows"))
            events.clear()
            net.zero_grad()
            loss_of(model, x).backward()
        by_thread = model.reducer.overlap.has_thread
    assert by_thread is (has_thread and comm.size > 1)
    assert events.index("2.weight") < events.index("0.weight")
    assert (events.index("0.weight") < events.index("rows")) is by_thread


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2.weight"])
def test_frozen_parameters(comm: Communicator, frozen: str) -> None:
    net = mlp(6, 10, 3)
    net.get_parameter(frozen).requires_grad_(False)
    check(comm, net, expects=[name.endswith("weight") for name, p in net.named_parameters() if p.requires_grad])


def test_output_that_is_not_used(comm: Communicator) -> None:
    """Nothing comes to the node, or nothing comes through what is after it."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Linear(6, 3).double() for _ in range(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    def loss(model: Any, x: Tensor) -> Tensor:
        a, b = model(x)
        return a.square().sum() + Nothing.apply(b).sum()

    with wrapped(Two(), comm) as model:
        for number in range(3):
            model.zero_grad()
            loss(model, inputs(comm, number, (4, 6), torch.float64)).backward()
            assert [bool(p.grad.any()) for p in model.parameters()] == [True, True, False, False]


class Nothing(torch.autograd.Function):
    """The identity, by which no gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


@pytest.mark.parametrize("needs_weight", [True, False])
def test_weight_changed_between_forward_and_backward(comm: Communicator, needs_weight: bool) -> None:
    """As with torch's own node: an error only where backward needs the weight."""
    net = mlp(6, 3)
    with wrapped(net, comm) as model:
        for number in range(3):
            model.zero_grad()
            made = loss_of(model, inputs(comm, number, (4, 6), torch.float64).requires_grad_(needs_weight))
            with torch.no_grad():
                net[0].weight.mul_(0.9)
            if needs_weight:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    made.backward()
            else:
                made.backward()


# ------------------------------------------------------------------ the place is not free


def test_gradients_that_accumulate(comm: Communicator) -> None:
    """Only a backward that finds no gradient computes it in place."""
    net = mlp(6, 10, 3)
    alone = copy.deepcopy(net)
    with wrapped(net, comm) as model:
        alone.load_state_dict(net.state_dict())  # rank 0's
        for number in range(6):
            for each in (model, alone):
                each.zero_grad(set_to_none=number % 3 != 2)
            for part in range(2):
                x = inputs(comm, 2 * number + part, (4, 6), torch.float64)
                with model.no_sync() if part == 0 else nullcontext():
                    loss_of(model, x).backward()
                loss_of(alone, x).backward()
            assert not any(placed(model))
            for parameter in alone.parameters():
                comm.all_reduce(parameter.grad, op="avg").wait()
            assert_equal([p.grad for p in net.parameters()], [p.grad for p in alone.parameters()], 1e-11)


def penalized(model: Any, x: Tensor) -> Tensor:
    return loss_of(model, x) + sum(p.square().sum() for p in model.parameters())


def twice(model: Any, x: Tensor) -> Tensor:
    return loss_of(model, x) + loss_of(model, 2 * x)


@pytest.mark.parametrize("loss", [penalized, twice])
def test_weight_that_something_else_uses(comm: Communicator, loss: Loss) -> None:
    """The sum is right in the step that finds it; from then on the gradient is not computed in place."""
    net = mlp(6, 10, 3)
    with wrapped(net, comm) as model:
        for number in range(4):
            x = inputs(comm, number, (4, 6), torch.float64)
            expected = means(comm, loss(net, x), net.parameters())
            model.zero_grad()
            loss(model, x).backward()
            assert_equal([parameter.grad for parameter in net.parameters()], expected, 1e-11)
            assert placed(model) == [number == 1, False] * 2


def test_backward_that_breaks_off_leaves_nothing_behind(comm: Communicator) -> None:
    """Before any bucket has started the next step may be made."""
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with wrapped(net, comm) as model:
        for number in range(5):
            x = inputs(comm, number, (4, 6), torch.float64).requires_grad_()
            expected = means(comm, loss_of(net, x), net.parameters())
            model.zero_grad()
            if number == 2:
                handle = net[0].register_forward_hook(lambda module, arguments, output: Breaks.apply(output))
                with pytest.raises(ArithmeticError):
                    loss_of(model, x).backward()
                handle.remove()
                continue
            loss_of(model, x).backward()
            assert_equal([parameter.grad for parameter in net.parameters()], expected, 1e-11)
            assert placed(model) == ([True, False] * 2 if number else [False] * 4)


@pytest.mark.parametrize("where", ["on the gradient", "after it"])
def test_hooks_see_gradients_that_are_not_averaged(comm: Communicator, where: str) -> None:
    net = mlp(6, 3)
    seen: list[Tensor] = []
    with wrapped(net, comm) as model:
        alone = copy.deepcopy(net)
        for number in range(4):
            x = inputs(comm, number, (4, 6), torch.float64)
            (expected,) = torch.autograd.grad(loss_of(alone, x), alone[0].weight)
            model.zero_grad()
            if number == 2 and where == "on the gradient":
                net[0].weight.register_hook(seen.append)
            elif number == 2:
                net[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
            loss_of(model, x).backward()
            assert placed(model) == [number == 1, False]
            if number >= 2:
                assert_equal([seen[-1]], [expected])
                if where == "on the gradient":
                    assert seen[-1].data_ptr() != net[0].weight.grad.data_ptr()
    assert len(seen) == 2


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("hook", ["on the gradient", "after it"])
def test_hooks_that_change_the_weight_come_after_the_gradient_of_the_rows(
    comm: Communicator, name: str, hook: str
) -> None:
    net = mlp(6, 3)

    def change(_: Tensor) -> None:
        net[0].weight.data.mul_(2)

    parameter = getattr(net[0], name)
    register = parameter.register_hook if hook == "on the gradient" else parameter.register_post_accumulate_grad_hook
    with wrapped(net, comm) as model:
        for number in range(3):
            model.zero_grad()
            x = inputs(comm, number, (4, 6), torch.float64).requires_grad_()
            (expected,) = torch.autograd.grad(loss_of(net, x), x)
            handle = register(change)
            loss_of(model, x).backward()
            handle.remove()
            assert_equal([x.grad], [expected])


# ------------------------------------------------------------------ derivatives of some tensors only


def test_gradient_of_the_input_alone_computes_none_of_weights(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = mlp(6, 10, 3)
    computed: list[str] = []
    of_weight = linear._of_weight
    monkeypatch.setattr(linear, "_of_weight", lambda *arguments: computed.append("weight") or of_weight(*arguments))
    with wrapped(net, comm) as model:
        for number in range(2):
            model.zero_grad()
            loss_of(model, inputs(comm, number, (4, 6), torch.float64)).backward()
        assert len(computed) == 2
        x = inputs(comm, 9, (4, 6), torch.float64).requires_grad_()
        (expected,) = torch.autograd.grad(loss_of(net, x), x)
        assert_equal(list(torch.autograd.grad(loss_of(model, x), x)), [expected])
        loss_of(model, x).backward(inputs=[x])
        assert_equal([x.grad], [expected])
        assert len(computed) == 2


def test_gradients_that_the_program_asks_for_are_its_own(comm: Communicator) -> None:
    net = mlp(6, 10, 3)
    with wrapped(net, comm) as model:
        for number in range(3):
            x = inputs(comm, number, (4, 6), torch.float64)
            asked = list(net.parameters())
            expected = torch.autograd.grad(loss_of(net, x), asked)
            got = torch.autograd.grad(loss_of(model, x), asked)
            assert_equal(list(got), list(expected))
            model.zero_grad()
            loss_of(model, x).backward()
            assert_equal(list(got), list(expected))


def test_derivatives_of_derivatives(comm: Communicator) -> None:
    """Of the input and of the weight, whose own gradients are averaged."""

    def loss(model: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        weight = (model.module if isinstance(model, DistributedDataParallel) else model)[0].weight
        of_x, of_weight = torch.autograd.grad(loss_of(model, x), [x, weight], create_graph=True)
        return loss_of(model, x) + of_x.square().sum() + of_weight.square().sum()

    net = mlp(6, 10, 3)
    with wrapped(net, comm) as model:
        for number in range(3):
            x = inputs(comm, number, (4, 6), torch.float64)
            expected = means(comm, loss(net, x), net.parameters())
            model.zero_grad()
            loss(model, x).backward()
            assert_equal([parameter.grad for parameter in net.parameters()], expected, 1e-10)


def test_many_gradients_of_the_input_at_once(comm: Communicator) -> None:
    net = mlp(6, 10, 3)
    with wrapped(net, comm) as model:
        for number in range(2):
            model.zero_grad()
            loss_of(model, inputs(comm, number, (4, 6), torch.float64)).backward()
        x = inputs(comm, 9, (6,), torch.float64).requires_grad_()
        ours, theirs = (
            torch.autograd.grad(each(x), x, torch.eye(3, dtype=torch.float64), is_grads_batched=True)
            for each in (model, net)
        )
        assert_equal(list(ours), list(theirs))


# ------------------------------------------------------------------ anything unusual


class Seeing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "context",
    [Seeing, Dispatching, forward_ad.dual_level, lambda: saved_tensors_hooks(lambda x: x, lambda x: x)],
    ids=["function mode", "dispatch mode", "dual level", "saved tensors"],
)
def test_within_a_context_forward_is_that_of_torch(
    comm: Communicator, context: Callable[[], AbstractContextManager[object]]
) -> None:
    check(comm, mlp(6, 10, 3), forward=context)


def test_within_autocast_forward_is_that_of_torch(comm: Communicator) -> None:
    net = mlp(6, 10, 3, dtype=torch.float32)
    autocast = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    check(comm, net, x=lambda number: inputs(comm, number, (4, 6), torch.float32), forward=autocast, rtol=0.1)


@contextmanager
def another_linear() -> Iterator[None]:
    """A library that has put its own in the place of torch's."""
    original = nn.functional.linear
    nn.functional.linear = lambda *arguments: original(*arguments)
    try:
        yield
    finally:
        nn.functional.linear = original


def test_where_linear_is_another_function_it_is_called(comm: Communicator) -> None:
    check(comm, mlp(6, 10, 3), forward=another_linear)


@contextmanager
def another_forward() -> Iterator[None]:
    original = nn.Linear.forward
    nn.Linear.forward = lambda layer, x: original(layer, x)
    try:
        yield
    finally:
        nn.Linear.forward = original


def test_where_the_forward_of_linear_layers_is_another_function_it_is_called(comm: Communicator) -> None:
    check(comm, mlp(6, 10, 3), forward=another_forward)


class Tripled(nn.Parameter):
    """Weights that a linear function takes three times."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear:
                return func(args[0], 3 * args[1], *args[2:])
            return func(*args, **(kwargs or {}))


class Other(nn.Parameter):
    """Not torch's own class."""


@pytest.mark.parametrize(
    "convert",
    [
        lambda net: net.to(torch.complex128),
        lambda net: torch.utils.swap_tensors(net[0].weight, Other(net[0].weight.detach().clone())),
        lambda net: setattr(net[0].weight, "data", net[0].weight.data.t().contiguous().t()),
    ],
    ids=["complex", "another class", "not contiguous"],
)
def test_a_weight_that_has_become_another_since_the_last_forward(
    comm: Communicator, convert: Callable[[nn.Module], object]
) -> None:
    net = nn.Sequential(nn.Linear(6, 5, bias=False)).double()
    with wrapped(net, comm) as model:
        for number in range(2):
            model(inputs(comm, number, (4, 6), torch.float64)).sum().backward()
            net.zero_grad()
        assert placed(model) == [True]
        convert(net)
        x = inputs(comm, 2, (4, 6), torch.float64).to(net[0].weight.dtype)
        output = model(x)
        assert "Multiply" not in output.grad_fn.name()
        output.abs().square().sum().backward()
        (gradient,) = torch.autograd.grad(net(x).abs().square().sum(), [net[0].weight])
        mean = gradient.contiguous()
        comm.all_reduce(mean, op="avg").wait()
        assert_equal([net[0].weight.grad], [mean])


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_parameters_of_another_class_have_its_functions(comm: Communicator, name: str) -> None:
    layer = nn.Linear(6, 3).double()
    setattr(layer, name, Tripled(getattr(layer, name).detach()))
    check(comm, nn.Sequential(layer))


class Seen(Tensor):
    """Inputs of a class of their own."""


def test_inputs_of_another_class_have_its_functions(comm: Communicator) -> None:
    x = lambda number: inputs(comm, number, (4, 6), torch.float64).as_subclass(Seen)  # noqa: E731
    check(comm, mlp(6, 10, 3), x=x)


@pytest.mark.filterwarnings("ignore:.*nested:UserWarning", "ignore:.*Sparse:UserWarning")
@pytest.mark.parametrize("layout", ["nested", "sparse"])
def test_inputs_of_another_layout(comm: Communicator, layout: str) -> None:
    def made(number: int) -> Tensor:
        x = inputs(comm, number, (4, 6), torch.float64)
        return torch.nested.nested_tensor([x, x[:2]]) if layout == "nested" else x.to_sparse_csr()

    def loss(model: Any, x: Tensor) -> Tensor:
        made = model(x)
        return (torch.cat(made.unbind()) if made.is_nested else made).square().sum()

    check(comm, nn.Sequential(nn.Linear(6, 3)).double(), loss, x=made)


@pytest.mark.parametrize("shape", [(1,), (1, 3), (4, 3)])
def test_bias_of_another_shape(comm: Communicator, shape: tuple[int, ...]) -> None:
    layer = nn.Linear(6, 3).double()
    layer.bias = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    check(comm, nn.Sequential(layer))


class Derived(nn.Linear):
    pass


class Checkpointed(nn.Sequential):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class Transformed(nn.Module):
    """Per-sample values by vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.layer)(x)


class Called(nn.Module):
    """Its layer is called with other weights than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: 2 * parameter for name, parameter in self.layer.named_parameters()}
        return torch.func.functional_call(self.layer, weights, (x,))


class OfItsOwn(nn.Module):
    """Its layer has got a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.layer.forward = lambda x: 2 * nn.Linear.forward(self.layer, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Derived(6, 3),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)),
        lambda: Checkpointed(nn.Linear(6, 5), nn.Linear(5, 3)),
        lambda: Reentrant(nn.Linear(6, 5), nn.Linear(5, 3)),
        Transformed,
        Called,
        OfItsOwn,
    ],
    ids=["derived", "weight norm", "checkpoint", "reentrant", "vmap", "functional_call", "own forward"],
)
def test_modules_that_are_not_as_usual(comm: Communicator, make: Callable[[], nn.Module]) -> None:
    check(comm, make().double())


def test_torch_that_cannot_tell_of_hooks(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_saving_hooks", None)
    check(comm, mlp(6, 10, 3))


def test_layer_that_is_found_twice_or_replaced(comm: Communicator) -> None:
    layer = nn.Linear(6, 6)
    net = nn.Sequential(layer, nn.Tanh(), nn.Sequential(layer)).double()
    with wrapped(net, comm) as model:
        for number in range(3):
            model.zero_grad()
            loss_of(model, inputs(comm, number, (4, 6), torch.float64)).backward()
        layer.weight = nn.Parameter(torch.zeros_like(layer.weight))
        with pytest.raises(Exception, match="weight"):
            loss_of(model, inputs(comm, 9, (4, 6), torch.float64)).backward()


# ------------------------------------------------------------------ the module is as it was


class Copying(nn.Module):
    """Its forward makes a copy of its layer, with weights of its own, and computes with both."""

    def __init__(self, copied: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.layer, self.copied, self.copies = nn.Linear(6, 3), copied, []

    def forward(self, x: Tensor) -> Tensor:
        twin = self.copied(self.layer)
        twin._parameters = {name: 2 * parameter for name, parameter in self.layer.named_parameters()}
        self.copies.append(twin)
        return self.layer(x) + twin(x)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_that_are_made_within_forward(comm: Communicator, copied: Callable[[nn.Module], nn.Module]) -> None:
    net = Copying(copied).double()
    with wrapped(net, comm) as model:
        for number in range(4):
            x = inputs(comm, number, (4, 6), torch.float64)
            expected = means(comm, loss_of(net, x), net.parameters())
            model.zero_grad()
            loss_of(model, x).backward()
            assert_equal([parameter.grad for parameter in net.parameters()], expected)
    assert {type(twin) for twin in net.copies} == {nn.Linear}
    assert all("forward" not in vars(twin) for twin in net.copies)


def test_a_layer_that_gets_another_class_computes_by_that(comm: Communicator) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    net = mlp(6, 3)
    with wrapped(net, comm) as model:
        for number in range(4):
            if number == 2:
                net[0].__class__ = Doubled
            x = inputs(comm, number, (4, 6), torch.float64)
            expected = means(comm, loss_of(net, x), net.parameters())
            model.zero_grad()
            loss_of(model, x).backward()
            assert_equal([parameter.grad for parameter in net.parameters()], expected)
            assert placed(model)[0] == (number == 1)
    assert type(net[0]) is Doubled


def test_the_layers_are_torchs_by_name_within_forward(comm: Communicator) -> None:
    names = []

    class Named(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            names.append((repr(self[0]), isinstance(self[0], nn.Linear)))
            return super().forward(x)

    with wrapped(Named(nn.Linear(6, 3)).double(), comm) as model:
        for number in range(3):
            loss_of(model, inputs(comm, number, (4, 6), torch.float64)).backward()
    assert set(names) == {("Linear(in_features=6, out_features=3, bias=True)", True)}


def test_the_memory_of_the_buckets_goes_when_the_wrapper_is_closed(comm: Communicator) -> None:
    net = mlp(6, 10, 3)
    with wrapped(net, comm) as model:
        for number in range(3):
            model.zero_grad()
            loss_of(model, inputs(comm, number, (4, 6), torch.float64)).backward()
        buckets = [weakref.ref(bucket) for bucket in model.reducer.buckets]
    assert [bucket() for bucket in buckets] == [None] * len(buckets)


def test_what_overflows_is_infinite(comm: Communicator) -> None:
    """Also where something is added to what is in its place, and the sum divides."""
    net = nn.Sequential(nn.Linear(6, 3)).bfloat16()
    with wrapped(net, comm) as model:
        for number in range(2):
            x = inputs(comm, number, (4, 6), torch.bfloat16).abs() + 1
            model.zero_grad()
            (model(x).sum() + (model(x * torch.inf) if number else model(x)).sum()).backward()
        assert placed(model)[0]
        assert net[0].weight.grad.isinf().all()


def test_nothing_is_left_in_the_layers(comm: Communicator) -> None:
    net = mlp(6, 10, 3)
    before = [dict(vars(layer)) for layer in net]
    with wrapped(net, comm) as model:
        for number in range(3):
            loss_of(model, inputs(comm, number, (4, 6), torch.float64)).backward()
            assert [{**vars(layer)} == each for layer, each in zip(net, before, strict=True)] == [True] * len(net)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.zeros(4, 7, dtype=torch.float64))
        assert {type(layer) for layer in net} == {nn.Linear, nn.Tanh}
        assert linear._places == {}
        assert_equal([pickle.loads(pickle.dumps(net))[0].weight], [net[0].weight])


@pytest.mark.parametrize("is_off", [torch.no_grad, torch.inference_mode])
def test_without_gradients_forward_is_that_of_torch(
    comm: Communicator, is_off: Callable[[], AbstractContextManager[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = mlp(6, 10, 3)
    with wrapped(net, comm) as model:
        for number in range(2):
            loss_of(model, inputs(comm, number, (4, 6), torch.float64)).backward()
        monkeypatch.setattr(linear._Multiply, "apply", None)
        with is_off():
            x = inputs(comm, 9, (4, 6), torch.float64)
            assert_equal([model(x)], [net(x)])


def test_small_layers_are_left_alone(comm: Communicator, has_thread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a thread drives, which could have the gradient under way, those that are smaller still."""
    monkeypatch.setattr(linear, "EARLY_COUNT", 35)
    monkeypatch.setattr(linear, "PLACED_COUNT", 36)
    by_thread = has_thread and comm.size > 1
    check(comm, mlp(6, 5, 7, 7), expects=[False, False, by_thread, False, True, False])
