"""check: what loaders and batches of all ranks say."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from data_parallel.pairs import mlp
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import mpdist.torch
from mpdist import Communicator, UsageError


class Endless(IterableDataset[int]):
    """A dataset whose length nobody knows."""

    def __iter__(self) -> Iterator[int]:
        yield 1


def found(comm: Communicator, **given: object) -> mpdist.torch.checking.Findings:
    torch.manual_seed(0)
    return mpdist.torch.check(mlp(6, 3), comm=comm, **given)


@pytest.mark.ranks(1, 2)
def test_loader_without_a_length_is_left_out(comm: Communicator) -> None:
    assert not found(comm, loader=DataLoader(Endless()))
    assert not found(comm, loader=DataLoader(Endless()) if comm.rank else range(3))


@pytest.mark.ranks(3, 4)
def test_same_data_is_found_on_any_ranks(comm: Communicator) -> None:
    findings = found(comm, batch=torch.full((2,), float(comm.rank > 0)))
    others = ", ".join(map(str, range(1, comm.size)))
    assert findings.hints[0].startswith(f"ranks {others} have the same first batch: ")


@pytest.mark.ranks(4)
def test_pairs_with_the_same_data_are_told_apart(comm: Communicator) -> None:
    (hint,) = found(comm, batch=torch.full((2,), float(comm.rank // 2))).hints
    assert hint.startswith("ranks 0, 1 have the same first batch, and so have ranks 2, 3: ")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
def test_sparse_batches_are_compared(comm: Communicator, layout: torch.layout) -> None:
    assert not found(comm, batch=(torch.eye(3) * (comm.rank + 1)).to_sparse(layout=layout)).hints
    (hint,) = found(comm, batch=torch.eye(3).to_sparse(layout=layout)).hints
    assert "have the same first batch" in hint


BATCHES: dict[str, Callable[[], torch.Tensor]] = {
    "conjugate": lambda: torch.ones(2, dtype=torch.cfloat).conj(),
    "negative": lambda: torch.full((2,), 1j).conj().imag,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged),
}


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("kind", BATCHES)
def test_unusual_batches_are_compared(comm: Communicator, kind: str) -> None:
    batch = BATCHES[kind]()
    assert "have the same first batch" in found(comm, batch=batch).hints[0]
    assert not found(comm, batch=batch * (comm.rank + 2)).hints


@pytest.mark.ranks(1, 2)
def test_what_is_not_initialised_is_a_problem(comm: Communicator) -> None:
    net = nn.Sequential(mlp(6, 3), nn.LazyBatchNorm1d(affine=False))
    assert "running_mean, of the buffers, is not initialised yet" in mpdist.torch.check(net, comm=comm).problems[0]
    with pytest.raises(UsageError, match="running_mean, of the buffers, is not initialised yet"):
        mpdist.torch.DistributedDataParallel(net, comm)
    if comm.rank == 0:
        net[1] = nn.BatchNorm1d(3, affine=False)
    if comm.size > 1:
        (problem, *_) = mpdist.torch.check(net, comm=comm).problems
        assert "running_mean not initialised on rank 1" in problem
    (problem, *_) = mpdist.torch.check(nn.LazyLinear(2), comm=comm).problems
    assert problem.endswith("run a forward of the module before it is wrapped")
