"""Outputs: backward is found wherever the forward's result keeps its tensors."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from data_parallel.pairs import assert_equal, inputs, mlp, wrapped
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from mpdist import Communicator, UsageError
from mpdist.torch.data_parallel.outputs import LOOKED_AT, Entrance, Search, tensors_in, watch

FIND = {"find_unused_parameters": True}


@dataclass
class Record:
    values: Any


class Slotted:
    __slots__ = ("values",)

    def __init__(self, values: Any) -> None:
        self.values = values


def circle(y: Tensor) -> Any:
    box = SimpleNamespace(values=[y])
    box.values.append(box)
    return box


def chain(length: int, end: object) -> Any:
    for _ in range(length):
        end = SimpleNamespace(next=end)
    return end


WRAPPINGS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "distribution": (lambda y: Independent(Normal(y, 1.0), 1), lambda d: d.mean),
    "object": (lambda y: SimpleNamespace(values=[y]), lambda box: box.values[0]),
    "deque": (lambda y: deque([y]), lambda box: box[0]),
    "mapping": (lambda y: UserDict(loss=y), lambda box: box["loss"]),
    "dataclass": (lambda y: Record([{"y": y}]), lambda box: box.values[0]["y"]),
    "circle": (circle, lambda box: box.values[0]),
    "slots": (Slotted, lambda box: box.values),
    "function": (lambda y: lambda: y, lambda box: box()),
}


class Wraps(nn.Module):
    """A module that returns its result in something."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net = mlp(6, 10, 3)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.net(x))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", WRAPPINGS)
@pytest.mark.parametrize("options", [{}, FIND], ids=str)
def test_gradients_are_averaged_whatever_the_output_is(comm: Communicator, kind: str, options: dict[str, Any]) -> None:
    wrap, unwrap = WRAPPINGS[kind]
    net = Wraps(wrap)
    with wrapped(net, comm, **options) as model:
        for number in range(2):
            x = inputs(comm, number, (4, 6), torch.float64)
            expected = torch.autograd.grad(net.net(x).sum(), list(net.parameters()))
            for gradient in expected:
                comm.all_reduce(gradient, op="avg").wait()
            model.zero_grad()
            unwrap(model(x)).sum().backward()
            assert_equal([p.grad for p in net.parameters()], list(expected))


class KeepsLoss(nn.Module):
    """A module whose result is not returned."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 3)
        self.loss = torch.zeros(())

    def forward(self, x: Tensor) -> None:
        self.loss = self.net(x).sum()


@pytest.mark.ranks(2)
def test_gradient_after_an_output_without_any_is_named(comm: Communicator) -> None:
    net = KeepsLoss()
    with wrapped(net, comm, **FIND) as model:
        model(torch.ones(4, 6).double())
        with pytest.raises(UsageError, match=r"forward returned NoneType.*net\.0\.\S+ gets a gradient"):
            net.loss.backward()


@pytest.mark.ranks(2)
def test_gradients_in_no_sync_stay_local_after_an_output_without_any(comm: Communicator) -> None:
    net = KeepsLoss()
    with wrapped(net, comm, **FIND) as model:
        model(torch.ones(4, 6).double())
        with torch.no_grad():
            model(torch.ones(4, 6).double())
        with model.no_sync():
            x = inputs(comm, 0, (4, 6), torch.float64)
            model(x)
            (expected,) = torch.autograd.grad(net.net(x).sum(), net.net[0].weight)
            model.zero_grad()
            net.loss.backward()
        assert_equal([net.net[0].weight.grad], [expected])


@pytest.mark.ranks(1)
@pytest.mark.parametrize("is_view", [False, True])
def test_a_tensor_of_every_output_is_watched_once(is_view: bool) -> None:
    y = torch.ones(3, requires_grad=True) * 2
    y = y.view(-1) if is_view else y
    entries: list[int] = []
    enter, leave = partial(entries.append, 1), partial(entries.append, -1)
    for _ in range(3):
        assert watch(y, enter) is watch(y, leave) is Entrance.WATCHED
    for _ in range(2):
        entries.clear()
        y.sum().backward(retain_graph=True)
        assert sorted(set(entries)) == [-1, 1]
        assert len(entries) == (4 if is_view else 2)


def test_tensors_come_in_order() -> None:
    a, b, c, d = (torch.full((), float(number)) for number in range(4))
    output = {"a": a, "rest": [(b, SimpleNamespace(c=c)), 5, "text", None], "d": d}
    assert [x.item() for x in tensors_in(output)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("output", "is_complete"),
    [
        (None, True),
        ([1, 2.0, "a", {"b": (torch.float32, Record(3))}], True),
        (SimpleNamespace(a=[SimpleNamespace(b=1)]), True),
        (chain(LOOKED_AT, None), True),
        (chain(LOOKED_AT + 1, None), False),
        (Slotted(1), False),
        (iter([1]), False),
        (lambda: 1, False),
        ([nn.Linear(1, 1)], False),
    ],
)
def test_search_knows_what_it_cannot_look_into(output: object, is_complete: bool) -> None:
    search = Search(output)
    assert list(search) == []
    assert search.is_complete is is_complete
