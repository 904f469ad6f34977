"""Random modules: whatever the graph, gradients are those of torch's DDP over gloo."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from data_parallel.pairs import assert_equal, inputs, wrapped
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel
from torch.utils.checkpoint import checkpoint

from mpdist import Communicator

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.usefixtures("gloo")]

WIDTH = 4
# An operation takes the values of two earlier nodes; a layer may be used again, with its parameters.
OPS = st.tuples(
    st.sampled_from(["layer", "again", "add", "mul", "norm", "checkpoint", "skip on odd ranks"]),
    st.integers(0, 30),
    st.integers(0, 30),
)


class Graph(nn.Module):
    """Values of nodes, each made from earlier ones."""

    def __init__(self, ops: list[tuple[str, int, int]], rank: int) -> None:
        super().__init__()
        self.ops = ops
        self.rank = rank
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(len(ops) + 1))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in ops)
        self.double()

    def forward(self, x: Tensor) -> dict[str, Any]:
        values = [self.layers[-1](x)]
        for number, (op, a, b) in enumerate(self.ops):
            first, second = values[a % len(values)], values[b % len(values)]
            layer = self.layers[number]
            if op == "layer" or (op == "skip on odd ranks" and self.rank % 2 == 0):
                values.append(layer(first).tanh())
            elif op == "again":
                values.append(self.layers[b % len(self.ops)](first).tanh())
            elif op == "add":
                values.append(first + second)
            elif op == "mul":
                values.append(first * second.sigmoid())
            elif op == "norm":
                values.append(self.norms[number](first))
            elif op == "checkpoint":
                values.append(checkpoint(layer, first, use_reentrant=False))
        return {"last": values[-1], "all": [value.mean() for value in values]}


@settings(max_examples=12)
@given(st.lists(OPS, min_size=1, max_size=12), st.sampled_from([1e-6, 1e-3, 25.0]), st.booleans())
def test_random_graphs(
    comm: Communicator, ops: list[tuple[str, int, int]], bucket_cap_mb: float, sums_all: bool
) -> None:
    torch.manual_seed(len(ops))
    net = Graph(ops, comm.rank)
    options = {"find_unused_parameters": True, "bucket_cap_mb": bucket_cap_mb}
    theirs = TorchDataParallel(copy.deepcopy(net), **options)
    with wrapped(net, comm, **options) as ours:
        for number in range(3):
            for model in (ours, theirs):
                model.zero_grad()
                output = model(inputs(comm, number, (5, WIDTH), torch.float64))
                loss = output["last"].square().mean()
                (loss + sum(output["all"]) if sums_all else loss).backward()
            pairs = [(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)]
            for a, b in pairs:
                # torch gives zeros where a parameter is reached, but not from this loss
                assert (a is None) <= (b is None or not b.any())
            assert_equal(
                [torch.zeros_like(b) if a is None else a for a, b in pairs if b is not None],
                [b for _, b in pairs if b is not None],
            )
