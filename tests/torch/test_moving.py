"""What the backend moves between ranks: every operation x type x form, against values that each rank knows."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from algorithms.forcing import CHANGING, CHOSEN, Way, replaced
from torch_support.values import MOVABLE, assert_same, everyone, joined, numbers, strided

import mpdist

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.limit(120)]

SHAPE = (4, 3)


def layouts(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.clone(), strided(tensor)]


@pytest.mark.parametrize("dtype", MOVABLE, ids=str)
def test_broadcast(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    for root in range(group.size()):
        for x in layouts(numbers(SHAPE, dtype, group.rank())):
            dist.broadcast(x, root)
            assert_same(x, numbers(SHAPE, dtype, root), root)


@pytest.mark.parametrize("dtype", MOVABLE, ids=str)
def test_all_gather(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    size = group.size()
    wanted = everyone(SHAPE, dtype, range(size))
    for x in layouts(numbers(SHAPE, dtype, group.rank())):
        outs = [torch.zeros(SHAPE, dtype=dtype) for _ in range(size)]
        dist.all_gather(outs, x)
        views = list(torch.zeros((size, *SHAPE), dtype=dtype).unbind(0))
        dist.all_gather(views, x)
        whole = torch.zeros((size * SHAPE[0], SHAPE[1]), dtype=dtype)
        dist.all_gather_into_tensor(whole, x, async_op=True).wait()
        for out, view, part, each in zip(outs, views, whole.chunk(size), wanted, strict=True):
            assert_same(out, each, "list")
            assert_same(view, each, "views")
            assert_same(part, each, "into")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex128, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", [CHOSEN, CHANGING], ids=str)
def test_large_moves_by_any_way(group: dist.ProcessGroup, dtype: torch.dtype, way: Way) -> None:
    """As large as takes several rounds through shared memory, where that of two ranks goes one way and the other."""
    size, rank = group.size(), group.rank()
    count = 5 * 1024**2 // dtype.itemsize // size * size
    with replaced(mpdist.init(), way):
        made = dist.new_group()
        for step in range(4):
            x = numbers((count,), dtype, 10 * step + rank)
            everybody = [numbers((count,), dtype, 10 * step + other) for other in range(size)]
            whole = torch.zeros(size * count, dtype=dtype)
            dist.all_gather_into_tensor(whole, x, made)
            assert_same(whole, joined(everybody), step)
            out = torch.zeros(count, dtype=dtype)
            work = dist.all_to_all_single(out, x, group=made, async_op=step % 2 == 1)
            if work is not None:
                work.wait()
            assert_same(out, joined([each.chunk(size)[rank] for each in everybody]), step)
            dist.broadcast(x, step % size, made)
            assert_same(x, everybody[step % size], step)
        dist.destroy_process_group(made)


@pytest.mark.parametrize("dtype", MOVABLE, ids=str)
def test_gather_and_scatter(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    size, rank = group.size(), group.rank()
    wanted = everyone(SHAPE, dtype, range(size))
    for root in range(size):
        for x in layouts(wanted[rank]):
            outs = [strided(torch.zeros(SHAPE, dtype=dtype)) for _ in range(size)] if rank == root else None
            dist.gather(x, outs, root)
            for out, each in zip(outs or [], wanted if rank == root else [], strict=True):
                assert_same(out, each, ("gather", root))
            opts = dist.GatherOptions()
            opts.rootRank = root
            whole = strided(torch.zeros((size, *SHAPE), dtype=dtype)) if rank == root else torch.empty(0)
            group.gather_single(whole, x, opts).wait()
            for row, each in zip(whole if rank == root else [], wanted if rank == root else [], strict=True):
                assert_same(row, each, ("gather_single", root))
        for out in layouts(torch.zeros(SHAPE, dtype=dtype)):
            dist.scatter(out, list(wanted) if rank == root else None, root)
            assert_same(out, wanted[rank], ("scatter", root))


@pytest.mark.parametrize("dtype", MOVABLE, ids=str)
def test_all_to_all(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    size, rank = group.size(), group.rank()

    def block(src: int, dst: int, rows: int) -> torch.Tensor:
        return numbers((rows, 2), dtype, 10 * src + dst)

    wanted = [block(src, rank, 2) for src in range(size)]
    for x in layouts(joined([block(rank, dst, 2) for dst in range(size)])):
        for out in layouts(torch.zeros((2 * size, 2), dtype=dtype)):
            dist.all_to_all_single(out, x)
            assert_same(out, joined(wanted), "even")

    sent = [block(rank, dst, rank + dst) for dst in range(size)]
    wanted = [block(src, rank, src + rank) for src in range(size)]
    outs = [torch.zeros((src + rank, 2)).to(dtype) for src in range(size)]  # torch 2.4 fills no empty float8
    dist.all_to_all(outs, sent)
    for out, each in zip(outs, wanted, strict=True):
        assert_same(out, each, "list")
    rows = [rank + each for each in range(size)]
    whole = torch.zeros((sum(rows), 2), dtype=dtype)
    dist.all_to_all_single(whole, joined(sent), rows, rows, async_op=True).wait()
    assert_same(whole, joined(wanted), "splits")


def test_blocks_of_different_sizes(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    wanted = [numbers(2 * each + 1, torch.float32, each) for each in range(size)]

    def rooms() -> list[torch.Tensor]:
        return [torch.zeros(2 * each + 1) for each in range(size)]

    def are_right(outs: list[torch.Tensor]) -> bool:
        return all(torch.equal(out, each) for out, each in zip(outs, wanted, strict=True))

    outs = rooms()
    dist.all_gather(outs, wanted[rank])
    assert are_right(outs)
    for root in range(size):
        outs = rooms()
        dist.gather(wanted[rank], outs if rank == root else None, root)
        assert are_right(outs) == (rank == root)
        out = torch.zeros(2 * rank + 1)
        dist.scatter(out, wanted if rank == root else None, root)
        assert torch.equal(out, wanted[rank])


@pytest.mark.parametrize("root", [-1, "size"])
@pytest.mark.parametrize("what", ["broadcast", "reduce", "gather", "scatter"])
def test_a_root_that_is_no_rank_is_refused_and_the_group_stays_usable(
    group: dist.ProcessGroup, what: str, root: int | str
) -> None:
    x, number = torch.ones(3), group.size() if root == "size" else int(root)
    calls: dict[str, Callable[[], object]] = {
        "broadcast": lambda: dist.broadcast(x, group_src=number),
        "reduce": lambda: dist.reduce(x, group_dst=number),
        "gather": lambda: dist.gather(x, None, group_dst=number),
        "scatter": lambda: dist.scatter(x, None, group_src=number),
    }
    with pytest.raises(
        RuntimeError, match=rf"^{what} on '.*(src|dst) is {number}, the ranks of this communicator are 0 to"
    ):
        calls[what]()
    dist.all_reduce(x)
    assert_same(x, torch.full((3,), float(group.size())), what)


def test_coalesced_gathers(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    kinds: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((3,), torch.float32), ((2, 2), torch.bfloat16), ((), torch.int64), ((0,), torch.bool)
    ]  # fmt: skip
    ins = [numbers(shape, dtype, rank) for shape, dtype in kinds]
    lists = [[torch.zeros(shape, dtype=dtype) for shape, dtype in kinds] for _ in range(size)]
    group.allgather_coalesced(lists, ins).wait()
    for each in range(size):
        for out, (shape, dtype) in zip(lists[each], kinds, strict=True):
            assert_same(out, numbers(shape, dtype, each), (each, shape))
    outs = [torch.zeros((size * 2,), dtype=dtype) for dtype in (torch.float32, torch.int16)]
    ins = [numbers(2, dtype, rank) for dtype in (torch.float32, torch.int16)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out, x in zip(outs, ins, strict=True):
            dist.all_gather_into_tensor(out, x)
    manager.wait()
    for out in outs:
        assert_same(out, torch.cat(everyone(2, out.dtype, range(size))), out.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2, torch.complex64], ids=str)
def test_coalesced_gathers_of_any_strides(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    size, rank = group.size(), group.rank()
    whole = [numbers((2, 3), dtype, each) for each in range(size)]
    single = whole[rank][:1, 0]  # contiguous, with a stride of 3
    outs = [torch.zeros((3, 2 * size), dtype=dtype).t(), torch.zeros((size, 2), dtype=dtype)[:, 0]]
    with dist._coalescing_manager(device=torch.device("cpu")):
        dist.all_gather_into_tensor(outs[0], whole[rank].t().contiguous().t())
        dist.all_gather_into_tensor(outs[1], single)
    assert_same(outs[0], joined(whole), "transposed")
    assert_same(outs[1], joined([each.flatten()[:1] for each in whole]), "single")


def test_in_place_gather_and_scatter_as_fsdp_does_it(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    whole = torch.zeros(size * 3)
    own = whole[rank * 3 : rank * 3 + 3]
    own.copy_(numbers(3, torch.float32, rank))
    dist.all_gather_into_tensor(whole, own)
    assert torch.equal(whole, torch.cat(everyone(3, torch.float32, range(size))))
    wanted = size * own.clone()
    dist.reduce_scatter_tensor(own, whole)
    assert torch.equal(own, wanted)


def test_objects(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    everything: list[Any] = [None] * size
    dist.all_gather_object(everything, {"rank": rank, "payload": "x" * rank * 100})
    assert everything == [{"rank": each, "payload": "x" * each * 100} for each in range(size)]
    for root in range(size):
        gathered: list[Any] | None = [None] * size if rank == root else None
        dist.gather_object((rank, "g"), gathered, root)
        assert gathered == ([(each, "g") for each in range(size)] if rank == root else None)
        items: list[Any] = [root, {"a": [1, 2]}, None] if rank == root else [None] * 3
        dist.broadcast_object_list(items, root)
        assert items == [root, {"a": [1, 2]}, None]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [f"to {each}" for each in range(size)] if rank == root else None, root)
        assert mine == [f"to {rank}"]


def test_functional_collectives(group: dist.ProcessGroup) -> None:
    import torch.distributed._functional_collectives as functional

    size, rank = group.size(), group.rank()
    inputs = everyone((size, 2), torch.float32, range(size))
    x = inputs[rank]
    total = torch.stack(inputs).sum(0)
    assert torch.equal(functional.all_reduce(x, "sum", group), total)
    assert torch.equal(functional.all_gather_tensor(x, 0, group), torch.cat(inputs))
    assert torch.equal(functional.reduce_scatter_tensor(x, "sum", 0, group), total[rank : rank + 1])
    assert torch.equal(functional.broadcast(x, size - 1, group), inputs[-1])
    received = functional.all_to_all_single(x, None, None, group)
    assert torch.equal(received, torch.stack([each[rank] for each in inputs]))
    reduced = functional.all_reduce_coalesced([x, 2 * x], "sum", group)
    assert torch.equal(reduced[0], total)
    assert torch.equal(reduced[1], 2 * total)
    gathered = functional.all_gather_into_tensor_coalesced([x, x[:1]], group)
    assert torch.equal(gathered[1], torch.cat([each[:1] for each in inputs]))
    scattered = functional.reduce_scatter_tensor_coalesced([x, 2 * x], "sum", [0, 0], group)
    assert torch.equal(scattered[1], 2 * total[rank : rank + 1])


def test_functional_collectives_waited_for_after_many_others(group: dist.ProcessGroup) -> None:
    import torch.distributed._functional_collectives as functional

    size = group.size()
    large, small = torch.ones(size, 5000), torch.ones(size)
    early: Any = [
        functional.all_reduce(large, "sum", group),
        *functional.all_reduce_coalesced([small, large], "sum", group),
    ]
    for _ in range(200):
        dist.all_reduce(torch.ones(1), async_op=True).wait()
    assert [each.max().item() for each in early] == [size] * 3


def test_what_functional_collectives_give_may_be_communicated_before_it_is_waited_for(
    group: dist.ProcessGroup,
) -> None:
    import torch.distributed._functional_collectives as functional

    size, rank = group.size(), group.rank()

    def summed() -> torch.Tensor:
        return functional.all_reduce(torch.ones(size, 2), "sum", group)

    x = summed()
    assert isinstance(x, functional.AsyncCollectiveTensor)
    dist.all_reduce(x)
    assert x.tolist() == [[size**2] * 2] * size
    outs = [torch.zeros(size, 2) for _ in range(size)]
    dist.all_gather(outs, summed())
    assert torch.stack(outs).unique().tolist() == [size]
    dist.reduce_scatter(outs[0], [summed() for _ in range(size)])
    assert outs[0].unique().tolist() == [size**2]
    y = summed()
    works = [dist.isend(summed(), rank), dist.irecv(y, rank)]
    for work in works:
        assert work is not None
        work.wait()
    assert y.unique().tolist() == [size]


def test_gradients_flow_through_collectives(group: dist.ProcessGroup) -> None:
    from torch.distributed.nn import functional

    x = torch.full((3,), float(group.rank() + 1), requires_grad=True)
    functional.all_reduce(x * x, group=group).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0 * (group.rank() + 1) * group.size()] * 3


def test_barrier_holds_until_the_last_rank_has_come(group: dist.ProcessGroup) -> None:
    for last in range(group.size()):
        if group.rank() == last:
            time.sleep(0.02)
        came = torch.tensor([time.monotonic()], dtype=torch.float64)
        dist.barrier()
        left = time.monotonic()
        dist.all_reduce(came, dist.ReduceOp.MAX)
        assert left >= came.item()


def test_sizes_that_do_not_fit_are_refused(group: dist.ProcessGroup) -> None:
    size = group.size()
    with pytest.raises(RuntimeError, match="room for"):
        dist.all_gather([torch.zeros(2) for _ in range(size)], torch.zeros(3))
    with pytest.raises(RuntimeError, match="elements"):
        dist.all_gather_into_tensor(torch.zeros(size * 2 + 1), torch.zeros(2))
    with pytest.raises(RuntimeError, match="each of the"):
        dist.all_to_all([torch.zeros(1)] * (size + 1), [torch.zeros(1)] * (size + 1))
    with pytest.raises(RuntimeError, match="plit"):
        dist.all_to_all_single(torch.zeros(size), torch.zeros(size), [1] * size, [2] * size)
    dist.barrier()


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_what_is_not_strided_is_refused_by_every_rank(group: dist.ProcessGroup, layout: torch.layout) -> None:
    size, rank = group.size(), group.rank()

    def x(rows: int = 2) -> torch.Tensor:
        return torch.eye(rows, 3).to_sparse(layout=layout)

    def rooms() -> list[torch.Tensor]:
        return [torch.zeros(2, 3) for _ in range(size)]

    def xs() -> list[torch.Tensor]:
        return [x() for _ in range(size)]

    refused = [
        lambda: dist.broadcast(x(), 0),
        lambda: group.send([x()], (rank + 1) % size, 0),
        lambda: group.recv([x()], (rank - 1) % size, 0),
        lambda: group.recv_anysource([x()], 0),
        lambda: dist.reduce(x(), 0),
        lambda: group.allreduce_coalesced([x()]),
        lambda: group.allgather([rooms()], [x()]),
        lambda: group.allgather([xs()], [torch.zeros(2, 3)]),
        lambda: group.all_gather_single(torch.zeros(2 * size, 3), x()),
        lambda: group.all_gather_single(x(2 * size), torch.zeros(2, 3)),
        lambda: group.all_gather_single_coalesced([torch.zeros(2 * size, 3)], [x()]),
        lambda: group.all_gather_single_coalesced([x(2 * size)], [torch.zeros(2, 3)]),
        lambda: group.allgather_coalesced([[each] for each in rooms()], [x()]),
        lambda: group.allgather_coalesced([[each] for each in xs()], [torch.zeros(2, 3)]),
        lambda: dist.gather(x(), rooms() if rank == 0 else None, 0),
        lambda: dist.scatter(x(), xs() if rank == 0 else None, 0),
        lambda: group.reduce_scatter([torch.zeros(2, 3)], [xs()]),
        lambda: group.reduce_scatter([x()], [rooms()]),
        lambda: group.reduce_scatter_single(torch.zeros(2, 3), x(2 * size)),
        lambda: group.alltoall(rooms(), xs()),
        lambda: group.alltoall(xs(), rooms()),
        lambda: group.all_to_all_single(torch.zeros(size, 3), x(size)),
        lambda: group.all_to_all_single(x(size), torch.zeros(size, 3)),
        lambda: group.all_to_all_single(x(size), torch.zeros(size, 3), [1] * size, [1] * size),
    ]
    if layout is not torch.sparse_coo:
        refused.append(lambda: dist.all_reduce(x()))
    for each in refused:
        with pytest.raises(ValueError, match=rf"layout {layout}; .*use to_dense\(\)"):
            each()
    # Nothing was sent: the next one pairs up.
    dist.all_reduce(total := torch.ones(1))
    assert total.item() == size


@pytest.mark.ranks(2, 3)
def test_split_sizes_on_one_rank_only_are_named(group: dist.ProcessGroup) -> None:
    size, text = group.size(), ""
    part: Any = dist.new_group(timeout=timedelta(seconds=2))
    sizes = [1] * size if group.rank() == 0 else None
    try:
        dist.all_to_all_single(torch.zeros(size), torch.zeros(size), sizes, sizes, group=part)
    except RuntimeError as error:  # refused on the rank that comes later; those before it wait in vain
        text = str(error)
    texts: list[Any] = [None] * size
    dist.all_gather_object(texts, text)
    assert any(re.search("differs between ranks.* all_to_all with split sizes", each) for each in texts), texts
    dist.destroy_process_group(part)


def test_outputs_whose_elements_share_memory_are_refused(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    one, many = torch.ones(1).expand(4), torch.ones(1).expand(4 * size)
    ones = [torch.ones(4) for _ in range(size)]
    refused = [
        lambda: group.recv([one], (rank - 1) % size, 0),
        lambda: group.allgather([[one] * size], [torch.ones(4)]),
        lambda: group.all_gather_single(many, torch.ones(4)),
        lambda: group.allgather_coalesced([[one]] * size, [torch.ones(4)]),
        lambda: group.all_gather_single_coalesced([many], [torch.ones(4)]),
        lambda: group.reduce_scatter([one], [ones]),
        lambda: group.reduce_scatter_single(one, torch.ones(4 * size)),
        lambda: dist.scatter(one, ones if rank == 0 else None, 0),
        lambda: group.alltoall([one] * size, ones),
        lambda: group.all_to_all_single(many, torch.ones(4 * size)),
        lambda: group.allreduce_coalesced([one]),
    ]
    if size > 1:  # alone, nothing is written
        refused.append(lambda: dist.all_reduce(one))
        slices = many[:size]
        refused.append(lambda: group.all_to_all_single(slices, torch.ones(size), [1] * size, [1] * size))
    for each in refused:
        with pytest.raises(ValueError, match=r"elements share memory.*use clone\(\)"):
            each()
    # Nothing was sent: the next one pairs up, and what is only read may be expanded.
    out = one if rank == 0 else torch.zeros(4)
    dist.broadcast(out, 0)
    assert out.tolist() == [1] * 4
    total = torch.ones(4) if rank == 0 else one
    dist.reduce(total, 0)
    assert total.tolist() == [size if rank == 0 else 1] * 4
