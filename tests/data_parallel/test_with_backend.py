"""Beside the backend: a process group names the ranks, torch's own tools work with our wrapper."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_parallel.pairs import assert_equal, inputs, mlp, plain_step, train, wrapped
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel

import mpdist.torch
from mpdist import Communicator
from mpdist.torch import DistributedDataParallel

# Its default process group is another than that of the modules beside it.
pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.apart]


@pytest.fixture(scope="module")
def backend(world: Communicator) -> Iterator[dist.ProcessGroup]:
    torch.set_num_threads(1)
    dist.init_process_group("mpdist")
    yield dist.group.WORLD
    dist.destroy_process_group()


def pair(**options: Any) -> tuple[DistributedDataParallel, TorchDataParallel]:
    torch.manual_seed(7)
    net = mlp(6, 10, 3)
    return DistributedDataParallel(net, **options), TorchDataParallel(copy.deepcopy(net))


@pytest.mark.parametrize("is_named", [False, True])
def test_group_is_the_default_one_or_that_given(comm: Communicator, backend: Any, is_named: bool) -> None:
    ours, theirs = pair(process_group=backend if is_named else None)
    assert ours.comm.ranks == comm.ranks
    assert_equal(train(comm, ours), train(comm, theirs))
    ours.close()


@pytest.mark.ranks(2, 3)
def test_group_of_some_ranks(comm: Communicator, backend: Any) -> None:
    group = dist.new_group([0, 1], backend="mpdist")
    if comm.rank < 2:
        net = nn.Linear(6, 3).double()
        model = DistributedDataParallel(net, process_group=group)
        assert model.comm.size == 2
        plain_step(model, torch.optim.SGD(net.parameters(), lr=0.1), inputs(comm, 0, (4, 6), torch.float64), 0)
        model.close()


def in_halves(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook whose Future is torch's own, made of two of the backend's."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    works = [dist.all_reduce(half, async_op=True) for half in buffer.chunk(2)]
    futures = torch.futures.collect_all([work.get_future() for work in works if work is not None])
    return futures.then(lambda _: buffer)  # type: ignore[no-any-return]  # torch's type says object


# torch compares annotations with its own, which strings are not.
in_halves.__annotations__ = default_hooks.fp16_compress_hook.__annotations__


@pytest.mark.parametrize("hook", [default_hooks.fp16_compress_hook, in_halves], ids=lambda hook: hook.__name__)
def test_hooks_over_the_backend(comm: Communicator, backend: Any, hook: Any) -> None:
    ours, theirs = pair(bucket_cap_mb=1e-4)
    for model in (ours, theirs):
        model.register_comm_hook(None, hook)
    assert_equal(train(comm, ours), train(comm, theirs), 1e-6)
    ours.close()


def test_join_of_several_with_a_sharded_optimizer(comm: Communicator, backend: Any) -> None:
    """A rank without inputs goes on to update its shard: the result is that of an optimizer on each rank."""
    results = []
    for is_sharded in (True, False):
        model, _ = pair()
        if is_sharded:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
            context = Join([model, optimizer])
        else:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            context = model.join()
        with context:
            for number in range(2 + comm.rank):
                plain_step(model, optimizer, inputs(comm, number, (4, 6), torch.float64), number)
        results.append([parameter.detach().clone() for parameter in model.parameters()])
        model.close()
    assert_equal(*results)


@pytest.mark.filterwarnings("ignore:.*TorchScript")
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_a_sharded_optimizer_may_step_in_a_hook(comm: Communicator, backend: Any, is_interleaved: bool) -> None:
    """torch's hook learns the buckets in the first backward, and makes no step in that."""
    make = ddp_zero_hook.hook_with_zero_step_interleaved if is_interleaved else ddp_zero_hook.hook_with_zero_step
    (ours, theirs), x = pair(bucket_cap_mb=1e-4), inputs(comm, 0, (4, 6), torch.float64)
    optimizer = ZeroRedundancyOptimizer(ours.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    ours.register_comm_hook(None, make(default_hooks.allreduce_hook, ours, optimizer))
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for number in range(4):
        ours.zero_grad()
        ours(x).square().mean().backward()
        if number:
            plain_step(theirs, plain, x, number)
    assert_equal([*ours.parameters()], [*theirs.parameters()])
    ours.close()


def test_synchronised_batch_norm(comm: Communicator, backend: Any) -> None:
    """Two ranks with half a batch each are one with all of it."""
    torch.manual_seed(3)
    net, alone = mlp(6, 10, 3, normed=True), mlp(6, 10, 3, normed=True)
    for a, b in zip(alone.state_dict().values(), net.state_dict().values(), strict=True):
        a.copy_(comm.broadcast(b.clone(), src=0).wait())
    with wrapped(mpdist.torch.convert_sync_batchnorm(net), comm) as model:
        for number in range(3):
            whole = torch.cat([inputs(comm, 50 * number + rank, (4, 6), torch.float64) for rank in range(comm.size)])
            whole = comm.broadcast(whole, src=0).wait()
            for each, x in ((model, whole[4 * comm.rank : 4 * comm.rank + 4]), (alone, whole)):
                plain_step(each, torch.optim.SGD(each.parameters(), lr=0.1), x, number)
        assert_equal([*net.parameters()], [*alone.parameters()], 1e-9)
