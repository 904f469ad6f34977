"""Reductions of the backend: every type x op x form, against values that each rank computes itself."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch_support.older import hears_of_invariants, keeps_order
from torch_support.values import (
    BITWISE,
    COMPLEX,
    FLOATS,
    INTEGERS,
    REDUCIBLE,
    TINY,
    assert_same,
    everyone,
    numbers,
    ops_for,
    reduced,
    strided,
)

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.limit(120)]

SHAPES = ((0,), (1,), (), (5, 3))


@pytest.mark.parametrize("dtype", REDUCIBLE, ids=str)
def test_all_reduce(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    ops = ops_for(dtype)
    for op, shape in [*((op, SHAPES[-1]) for op in ops), *((ops[0], shape) for shape in SHAPES[:-1])]:
        wanted = reduced(op, everyone(shape, dtype, range(group.size())))
        for is_async in (False, True):
            for layout in (torch.clone, strided):
                x = layout(numbers(shape, dtype, group.rank()))
                work = dist.all_reduce(x, op, async_op=is_async)
                if is_async:
                    work.wait()
                assert_same(x, wanted, (op, shape, is_async, layout))


@pytest.mark.parametrize("dtype", REDUCIBLE, ids=str)
def test_reduce(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    inputs = everyone((4, 2), dtype, range(group.size()))
    for op in ops_for(dtype):
        for root in range(group.size()):
            x = strided(inputs[group.rank()])
            dist.reduce(x, root, op)
            wanted = reduced(op, inputs) if group.rank() == root else inputs[group.rank()]
            assert_same(x, wanted, (op, root))


@pytest.mark.parametrize("dtype", REDUCIBLE, ids=str)
def test_reduce_scatter(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    size, rank = group.size(), group.rank()
    for op in ops_for(dtype):
        inputs = everyone((size * 3, 2), dtype, range(size))
        wanted = reduced(op, [x[rank * 3 : rank * 3 + 3] for x in inputs])
        for out in (torch.zeros((3, 2), dtype=dtype), strided(torch.zeros((3, 2), dtype=dtype))):
            dist.reduce_scatter_tensor(out, inputs[rank], op)
            assert_same(out, wanted, (op, "tensor"))
            out.zero_()
            dist.reduce_scatter(out, [block.clone() for block in inputs[rank].chunk(size)], op)
            assert_same(out, wanted, (op, "list"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_reduce_scatter_of_blocks_of_different_sizes(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    size, rank = group.size(), group.rank()
    inputs = [[numbers(block + 1, dtype, 10 * each + block) for block in range(size)] for each in range(size)]
    out = torch.zeros(rank + 1, dtype=dtype)
    dist.reduce_scatter(out, inputs[rank])
    assert_same(out, reduced(ReduceOp.SUM, [blocks[rank] for blocks in inputs]), "sum")


def test_premultiplied_sum(group: dist.ProcessGroup) -> None:
    inputs = everyone(6, torch.float32, range(group.size()))
    for factor in (2.0, torch.tensor([2.0])):
        x = inputs[group.rank()].clone()
        dist.all_reduce(x, dist._make_nccl_premul_sum(factor))
        assert_same(x, 2 * reduced(ReduceOp.SUM, inputs), factor)


def test_half_types_accumulate_in_float32(group: dist.ProcessGroup) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        start = 2048.0 if dtype is torch.float16 else 256.0  # one more is not representable
        x = torch.full((4,), start if group.rank() == 0 else 1.0, dtype=dtype)
        dist.all_reduce(x)
        assert x.tolist() == torch.tensor([start + group.size() - 1] * 4).to(dtype).tolist()


def test_coalesced(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    shapes = ((3,), (2, 2), (0,), ())
    tensors = [numbers(shape, torch.float32, 7 * place + rank) for place, shape in enumerate(shapes)]
    dist.all_reduce_coalesced(tensors)
    for place, (shape, tensor) in enumerate(zip(shapes, tensors, strict=True)):
        inputs = [numbers(shape, torch.float32, 7 * place + each) for each in range(size)]
        assert_same(tensor, reduced(ReduceOp.SUM, inputs), shape)
    x, y = numbers(4, torch.float32, rank), numbers(5, torch.float32, rank)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(y)
    manager.wait()
    assert_same(x, reduced(ReduceOp.SUM, everyone(4, torch.float32, range(size))), "manager")
    assert_same(y, reduced(ReduceOp.SUM, everyone(5, torch.float32, range(size))), "manager")
    outs = [torch.zeros(2), torch.zeros(1, dtype=torch.float64)]
    ins = [numbers(len(out) * size, out.dtype, rank) for out in outs]
    with dist._coalescing_manager():
        for out, each in zip(outs, ins, strict=True):
            dist.reduce_scatter_tensor(out, each)
    for out, each in zip(outs, ins, strict=True):
        inputs = everyone(len(each), each.dtype, range(size))
        own = slice(rank * len(out), (rank + 1) * len(out))
        assert_same(out, reduced(ReduceOp.SUM, [x[own] for x in inputs]), each.dtype)


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_coalesced_on_a_device_is_waited_for(group: dist.ProcessGroup, is_async: bool) -> None:
    size, rank = group.size(), group.rank()
    here = torch.device("cpu")
    x, y, out = torch.full((30_000,), rank + 1.0), torch.zeros(30_000), torch.zeros(30_000)
    with dist._coalescing_manager(device=here, async_ops=is_async) as manager:
        dist.isend(x, (rank + 1) % size)
        dist.irecv(y, (rank - 1) % size)
        dist.all_reduce(out.add_(x), async_op=True)
    if is_async:
        manager.wait()
    assert y[-1] == (rank - 1) % size + 1
    assert out[-1] == size * (size + 1) / 2


def test_sparse_tensors_are_summed(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()

    def sparse(of: int) -> torch.Tensor:
        indices = torch.tensor([[of, 0, of], [1, 2, 1]])  # one entry twice: not coalesced
        return torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, of]), (size, 3))

    wanted = sum((sparse(of).to_dense() for of in range(size)), torch.zeros(size, 3))
    for is_async in (False, True):
        x = sparse(rank)
        work = dist.all_reduce(x, async_op=is_async)
        if is_async:
            work.wait()
        assert x.is_sparse
        assert torch.equal(x.to_dense(), wanted)
    empty = torch.sparse_coo_tensor(torch.zeros((2, 0), dtype=torch.int64), torch.zeros(0), (size, 3))
    x = sparse(rank) if rank == 0 else empty
    dist.all_reduce(x)
    assert torch.equal(x.to_dense(), sparse(0).to_dense())


@pytest.mark.parametrize("what", ["sizes", "sparse_dim"])
def test_sparse_tensors_of_different_shapes_are_refused_on_all_ranks(group: dist.ProcessGroup, what: str) -> None:
    is_last = group.rank() == group.size() - 1
    if what == "sizes":
        x = torch.eye(1003 if is_last else 3).to_sparse()
        first, last = r"\(3, 3\), sparse_dim 2", r"\(1003, 1003\), sparse_dim 2"
    else:
        x = torch.ones(3, 2).to_sparse(2 if is_last else 1)
        first, last = r"\(3, 2\), sparse_dim 1", r"\(3, 2\), sparse_dim 2"
    if group.size() == 1:
        pytest.skip("one rank has one shape")
    with pytest.raises(RuntimeError, match=f" 0.*: shape {first}.* {group.size() - 1}: shape {last}"):
        dist.all_reduce(x)
    y = torch.ones(1)
    dist.all_reduce(y)
    assert y.item() == group.size()


@pytest.mark.skipif(not hears_of_invariants, reason=f"torch {torch.__version__} warns whatever it is told")
def test_sparse_sums_come_without_torchs_warning(group: dist.ProcessGroup) -> None:
    x = torch.eye(3).to_sparse()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Sparse invariant")
        torch.set_warn_always(True)  # else torch says each thing once in a process
        try:
            dist.all_reduce(x)
        finally:
            torch.set_warn_always(False)
    assert torch.equal(x.to_dense(), group.size() * torch.eye(3))


def test_what_has_no_meaning_is_refused(group: dist.ProcessGroup) -> None:
    for op in BITWISE:
        for dtype in FLOATS:
            with pytest.raises(RuntimeError, match="non-integral"):
                dist.all_reduce(torch.ones(2, dtype=dtype), op)
    with pytest.raises(RuntimeError, match="AVG has no meaning for bool"):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), ReduceOp.AVG)
    with pytest.raises(ValueError, match="complex"):
        dist.all_reduce(torch.ones(2, dtype=torch.complex64), ReduceOp.MAX)
    for op in (ReduceOp.MAX, ReduceOp(ReduceOp.MAX)):
        with pytest.raises(RuntimeError, match=r"sums only, got RedOpType\.MAX"):
            dist.all_reduce(torch.eye(2).to_sparse(), op)
    with pytest.raises(RuntimeError, match="float8"):
        dist.all_reduce(torch.ones(2).to(torch.float8_e5m2))
    for empty in (
        lambda: group.allreduce_coalesced([]),
        lambda: group.allgather_coalesced([[]] * group.size(), []),
        lambda: group.all_gather_single_coalesced([], []),
    ):
        with pytest.raises(ValueError, match="empty list"):
            empty()
    # Nothing was sent: the next one pairs up.
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == group.size()


@pytest.mark.parametrize("dtype", [*TINY, torch.complex32], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_what_is_only_moved_is_refused_in_every_form(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    size = group.size()
    out, x = torch.zeros(2, dtype=dtype), torch.zeros(2 * size, dtype=dtype)
    octets = torch.zeros(2 * size * dtype.itemsize, dtype=torch.uint8)
    uneven = [torch.zeros(3 + each, dtype=dtype) for each in range(size)]
    for refused in (
        lambda: group.allreduce([x]),  # dist.all_reduce makes real numbers of complex ones
        lambda: group.allreduce([x], ReduceOp.AVG),
        lambda: group.allreduce([strided(x)]),
        lambda: group.allreduce_coalesced([x, x.clone()]),
        lambda: dist.reduce(x, 0),
        lambda: dist.reduce_scatter_tensor(out, x),
        lambda: dist.reduce_scatter_tensor(out, octets),
        lambda: dist.reduce_scatter_tensor(octets[: 2 * dtype.itemsize], x),
        lambda: dist.reduce_scatter(out, list(x.chunk(size))),
        lambda: dist.reduce_scatter(uneven[group.rank()].clone(), uneven),
    ):
        with pytest.raises(ValueError, match=str(dtype).removeprefix("torch.")):
            refused()
    dist.all_reduce(total := torch.ones(1))
    assert total.item() == size


def test_integers_of_all_sizes_are_averaged_as_torch_does(group: dist.ProcessGroup) -> None:
    for dtype in INTEGERS:
        x = torch.full((3,), 5 if group.rank() == 0 else 2, dtype=dtype)
        dist.all_reduce(x, ReduceOp.AVG)
        assert x.tolist() == [(5 + 2 * (group.size() - 1)) // group.size()] * 3


@pytest.mark.skipif(not keeps_order, reason=f"new_group of torch {torch.__version__} sorts its ranks")
def test_a_subgroup_in_any_order(group: dist.ProcessGroup) -> None:
    ranks = list(range(group.size()))[::-1][: max(1, group.size() - 1)]
    part: Any = dist.new_group(ranks, sort_ranks=False)
    if group.rank() not in ranks:
        return
    assert dist.get_group_rank(part, ranks[0]) == 0
    for dtype in REDUCIBLE:
        for op in ops_for(dtype):
            x = numbers(7, dtype, group.rank())
            dist.all_reduce(x, op, group=part)
            assert_same(x, reduced(op, everyone(7, dtype, ranks)), (dtype, op))
    x = torch.tensor([float(group.rank())])
    dist.broadcast(x, src=ranks[-1], group=part)
    assert x.item() == ranks[-1]
    dist.destroy_process_group(part)


def test_complex_tensors_handed_on_as_they_are(group: dist.ProcessGroup) -> None:
    inputs = everyone(4, COMPLEX[0], range(group.size()))
    x = inputs[group.rank()].clone()
    group.allreduce([x]).wait()
    assert_same(x, reduced(ReduceOp.SUM, inputs), "sum")
    wanted = reduced(ReduceOp.SUM, inputs).conj().resolve_conj()
    lazy = inputs[group.rank()].conj()
    group.allreduce([lazy]).wait()
    assert_same(lazy.resolve_conj(), wanted, "conjugated")
