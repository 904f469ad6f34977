"""What PyTorch builds on a process group, as it is in the wheel: DDP, FSDP, DTensor, pipelines, checkpoints, compile.

The expected values come from the same training without any group, in one process, over the batches of all ranks.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_support.older import (
    has_events_of_two_threads,
    loads_in_a_part,
    shapes_of,
    shards_on_cpu,
)

import mpdist
from mpdist.torch import SyncBatchNorm, bf16_compress, convert_sync_batchnorm

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.limit(150)]

STEPS = 4


class Net(nn.Module):
    """Two layers, and one that only some inputs use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 4)
        self.sometimes = nn.Linear(16, 4)

    def forward(self, x: Tensor, *, use_both: bool = True) -> Tensor:
        hidden = torch.tanh(self.first(x))
        out = self.second(hidden)
        return out + self.sometimes(hidden) if use_both else out


def batch(rank: int, step: int, rows: int = 5) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def trained_alone(size: int, *, use_both: bool = True, steps: int = STEPS) -> list[Tensor]:
    """Parameters after training on all ranks' batches in one process."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = sum((net(batch(rank, step), use_both=use_both).pow(2).mean() for rank in range(size)), torch.zeros(()))
        (loss / size).backward()
        optimizer.step()
    return [each.detach() for each in net.parameters()]


def train(model: nn.Module, rank: int, *, use_both: bool = True, steps: int = STEPS) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step), use_both=use_both).pow(2).mean().backward()
        optimizer.step()


def assert_trained(net: nn.Module, wanted: list[Tensor], *, tolerance: float = 1e-6) -> None:
    for (name, got), want in zip(net.named_parameters(), wanted, strict=True):
        assert torch.allclose(got, want, atol=tolerance, rtol=tolerance), f"{name}: got {got}, wanted {want}"


# ---------------------------------------------------------------------- DDP


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"bucket_cap_mb": 0.0001},
        {"broadcast_buffers": False, "find_unused_parameters": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_ddp(group: dist.ProcessGroup, options: dict[str, Any]) -> None:
    net = Net()
    if group.rank():
        with torch.no_grad():
            for each in net.parameters():
                each.zero_()  # DDP takes rank 0's
    train(DistributedDataParallel(net, **options), group.rank())
    assert_trained(net, trained_alone(group.size()))


def test_ddp_with_a_large_bucket(group: dist.ProcessGroup) -> None:
    """torch asks for the Future of a Work that nobody else holds."""
    torch.manual_seed(4)
    net = nn.Linear(200, 100)
    alone = copy.deepcopy(net)
    inputs = [torch.randn(3, 200, generator=torch.Generator().manual_seed(rank)) for rank in range(group.size())]
    model = DistributedDataParallel(net)
    model(inputs[group.rank()]).pow(2).mean().backward()
    (sum((alone(x).pow(2).mean() for x in inputs), torch.zeros(())) / group.size()).backward()
    torch.testing.assert_close(net.weight.grad, alone.weight.grad)


def test_ddp_with_unused_parameters(group: dist.ProcessGroup) -> None:
    net = Net()
    train(DistributedDataParallel(net, find_unused_parameters=True), group.rank(), use_both=False)
    assert_trained(net, trained_alone(group.size(), use_both=False))


def test_ddp_accumulates_without_communication(group: dist.ProcessGroup) -> None:
    net = Net()
    model = DistributedDataParallel(net)
    before = group._get_sequence_number_for_group()
    with model.no_sync():
        model(batch(group.rank(), 0)).pow(2).mean().backward()
    assert group._get_sequence_number_for_group() == before
    model(batch(group.rank(), 1)).pow(2).mean().backward()
    alone = Net()
    for rank in range(group.size()):
        for step in range(2):
            (alone(batch(rank, step)).pow(2).mean() / group.size()).backward()
    for got, want in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


@pytest.mark.parametrize("by_all", [True, False], ids=["by all ranks", "by those that train"])
def test_ddp_with_uneven_inputs(group: dist.ProcessGroup, by_all: bool) -> None:
    net = nn.Linear(6, 2)
    model = DistributedDataParallel(net)
    steps = [1 + 2 * rank for rank in range(group.size())]
    with model.join(divide_by_initial_world_size=by_all):
        for step in range(steps[group.rank()]):
            model.zero_grad()
            model(batch(group.rank(), step)).sum().backward()
            active = [rank for rank in range(group.size()) if step < steps[rank]]
            total = torch.stack([batch(rank, step).sum(0) for rank in active]).sum(0)
            assert net.weight.grad is not None
            torch.testing.assert_close(net.weight.grad[0], total / (group.size() if by_all else len(active)))
    gathered = [torch.zeros_like(net.weight) for _ in range(group.size())]
    dist.all_gather(gathered, net.weight.detach())
    assert all(torch.equal(each, gathered[0]) for each in gathered)


def hooks() -> Iterator[Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    yield pytest.param(lambda: (None, default_hooks.allreduce_hook), 1e-6, id="allreduce")
    yield pytest.param(lambda: (None, default_hooks.fp16_compress_hook), 2e-3, id="fp16")
    yield pytest.param(lambda: (None, bf16_compress), 1e-2, id="bf16")
    yield pytest.param(
        lambda: (
            powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2),
            powerSGD_hook.powerSGD_hook,
        ),
        0.2,
        id="powerSGD",
    )


@pytest.mark.parametrize(("hook", "tolerance"), list(hooks()))
def test_ddp_with_a_hook(group: dist.ProcessGroup, hook: Callable[[], tuple[Any, Any]], tolerance: float) -> None:
    net = Net()
    model = DistributedDataParallel(net, bucket_cap_mb=1e-4)
    model.register_comm_hook(*hook())
    train(model, group.rank())
    assert_trained(net, trained_alone(group.size()), tolerance=tolerance)
    gathered = [torch.zeros_like(net.first.weight) for _ in range(group.size())]
    dist.all_gather(gathered, net.first.weight.detach())
    assert all(torch.equal(each, gathered[0]) for each in gathered)


def test_ddp_compiled(group: dist.ProcessGroup) -> None:
    net = Net()
    train(torch.compile(DistributedDataParallel(net), backend="aot_eager"), group.rank())
    assert_trained(net, trained_alone(group.size()))


def test_a_compiled_collective(group: dist.ProcessGroup) -> None:
    @torch.compile(backend="aot_eager")
    def double_and_sum(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    assert double_and_sum(torch.ones(3)).tolist() == [2.0 * group.size() + 1] * 3


def test_sampler_and_loader(group: dist.ProcessGroup) -> None:
    data = torch.arange(20)
    sampler: Any = torch.utils.data.DistributedSampler(data, shuffle=True)  # type: ignore[arg-type]
    sampler.set_epoch(3)
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    mine = torch.cat(list(loader))
    everything: list[Any] = [None] * group.size()
    dist.all_gather_object(everything, mine.tolist())
    assert {item for each in everything for item in each} == set(range(20))


def test_zero_redundancy_optimizer(group: dist.ProcessGroup) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = Net()
    model = DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(group.rank(), step)).pow(2).mean().backward()
        optimizer.step()
    assert_trained(net, trained_alone(group.size()))


# ---------------------------------------------------------------------- sharded


@contextlib.contextmanager
def mesh_of_all(group: dist.ProcessGroup, *names: str) -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    yield init_device_mesh("cpu", (group.size(),), mesh_dim_names=names or None)


@pytest.mark.skipif(not shards_on_cpu, reason=f"FSDP2 of torch {torch.__version__} needs a GPU")
@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=str)
def test_fsdp2(group: dist.ProcessGroup, precision: torch.dtype | None) -> None:
    from torch_support.sharded import MixedPrecisionPolicy, fully_shard

    with mesh_of_all(group) as mesh:
        net = Net()
        policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
        fully_shard(net.first, mesh=mesh, mp_policy=policy)
        fully_shard(net, mesh=mesh, mp_policy=policy)
        train(net, group.rank())
        wanted = trained_alone(group.size())
        for got, want in zip(net.parameters(), wanted, strict=True):
            tolerance = 1e-6 if precision is None else 2e-2
            torch.testing.assert_close(got.full_tensor().detach(), want, atol=tolerance, rtol=tolerance)  # type: ignore[attr-defined]


def test_fsdp1(group: dist.ProcessGroup) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    train(model, group.rank())
    with FullyShardedDataParallel.summon_full_params(model):
        assert_trained(model, trained_alone(group.size()))


def test_dtensor_and_tensor_parallel(group: dist.ProcessGroup) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch_support.sharded import Replicate, Shard, distribute_tensor

    with mesh_of_all(group) as mesh:
        whole = torch.arange(12.0 * group.size()).reshape(2 * group.size(), 6)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        assert torch.equal(sharded.to_local(), whole.chunk(group.size())[group.rank()])
        assert torch.equal(
            sharded.redistribute(mesh, [Shard(1) if 6 % group.size() == 0 else Replicate()]).full_tensor(), whole
        )
        product = sharded.t() @ sharded
        torch.testing.assert_close(product.full_tensor(), whole.t() @ whole)
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
        alone = copy.deepcopy(net)
        parallel = parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        x = batch(0, 0)
        torch.testing.assert_close(parallel(x), alone(x))
        parallel(x).sum().backward()
        alone(x).sum().backward()
        grad: Any = parallel[0].weight.grad  # type: ignore[index]
        torch.testing.assert_close(grad.full_tensor(), alone[0].weight.grad)


def test_pipeline(group: dist.ProcessGroup) -> None:
    from torch_support.sharded import PipelineStage, ScheduleGPipe, scales_gradients

    torch.manual_seed(5)
    layers = [nn.Linear(6, 6) for _ in range(group.size())]
    x, target = batch(0, 0, 8), torch.zeros(8, 6)
    shapes = shapes_of(PipelineStage, x[:2])
    place = (group.rank(), group.size(), torch.device("cpu"))
    stage = PipelineStage(layers[group.rank()], *place, **shapes, group=group)
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).pow(2).sum())
    if group.rank() == 0:
        schedule.step(x)
    else:
        schedule.step(target=target) if group.rank() == group.size() - 1 else schedule.step()
    alone = copy.deepcopy(layers)
    for each in alone:
        each.zero_grad()
    out = x
    for each in alone:
        out = each(out)
    (out.pow(2).sum() / (4 if scales_gradients else 1)).backward()
    torch.testing.assert_close(layers[group.rank()].weight.grad, alone[group.rank()].weight.grad)


def test_what_is_sharded_is_refused_where_each_rank_must_have_all(
    group: dist.ProcessGroup, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch_support.sharded import fully_shard

    world = mpdist.init()
    path = world.broadcast_object(str(tmp_path_factory.mktemp("saved")), src=0).wait() + "/a.pt"
    mpdist.torch.save_checkpoint(path, world, net=Net(), step=1)
    with mesh_of_all(group) as mesh:
        net = Net()
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.Adam(net.parameters())
        net(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        for part, name in ((net, r"\['\S+'\]"), ([optimizer.state_dict()], r"\[0\]\['state'\]\[0\]")):
            with pytest.raises(mpdist.CommunicationError, match=rf"mine{name}\S* is sharded.*torch\.distributed"):
                mpdist.torch.save_checkpoint(path, world, mine=part)
        with pytest.raises(mpdist.UsageError, match="is a DTensor, of which each rank has its part"):
            mpdist.torch.DistributedDataParallel(net, world)
        assert not mpdist.torch.check(net, comm=world)
    with pytest.raises(mpdist.UsageError, match="net is sharded"):
        mpdist.torch.save_checkpoint(path, world, net=FullyShardedDataParallel(Net(), device_id=torch.device("cpu")))
    assert mpdist.torch.load_checkpoint(path, world)["step"] == 1


@pytest.mark.skipif(not loads_in_a_part, reason=f"torch {torch.__version__} loads a checkpoint on all ranks only")
@pytest.mark.parametrize("is_async", [False, True], ids=["save", "async_save"])
def test_checkpoint_is_loaded_on_another_number_of_ranks(
    group: dist.ProcessGroup, tmp_path_factory: pytest.TempPathFactory, is_async: bool
) -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch_support.sharded import fully_shard

    folder = mpdist.init().broadcast_object(str(tmp_path_factory.mktemp("saved")), src=0).wait()
    with mesh_of_all(group) as mesh:
        net = Net()
        wanted = {name: value.clone() for name, value in net.state_dict().items()}
        fully_shard(net, mesh=mesh)
        state = {"net": net.state_dict(), "step": 3}
        if is_async:
            gloo = dist.new_group(backend="gloo")
            checkpoint.async_save(state, checkpoint_id=folder, process_group=gloo).result()
        else:
            checkpoint.save(state, checkpoint_id=folder)
    fewer: Any = dist.new_group([0])
    if group.rank() == 0:
        loaded = {"net": {name: torch.zeros_like(value) for name, value in wanted.items()}, "step": 0}
        checkpoint.load(loaded, checkpoint_id=folder, process_group=fewer)
        assert loaded["step"] == 3
        net_state: Any = loaded["net"]
        assert all(torch.equal(net_state[name], value) for name, value in wanted.items())
    dist.barrier()


# ---------------------------------------------------------------------- what torch lacks on a CPU


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5), (3, 3, 2, 4)], ids=str)
def test_sync_batch_norm_is_one_batch_norm_over_all(group: dist.ProcessGroup, shape: tuple[int, ...]) -> None:
    kinds: dict[int, type[nn.Module]] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
    alone = kinds[len(shape)](3)
    torch.manual_seed(1)
    nn.init.uniform_(alone.weight)  # type: ignore[arg-type]
    synced: Any = convert_sync_batchnorm(nn.Sequential(copy.deepcopy(alone)))
    assert isinstance(synced[0], SyncBatchNorm)
    sizes = [shape[0] + rank for rank in range(group.size())]  # different on each rank
    for step in range(2):
        whole = torch.randn((sum(sizes), *shape[1:]), generator=torch.Generator().manual_seed(step)) * 3 + 50
        start = sum(sizes[: group.rank()])
        own = slice(start, start + sizes[group.rank()])
        x = whole.clone().requires_grad_()
        wanted = alone(x)
        weights = torch.arange(wanted.numel()).reshape(wanted.shape).cos()
        (wanted * weights).sum().backward()
        y = whole[own].clone().requires_grad_()
        got = synced(y)
        (got * weights[own]).sum().backward()
        torch.testing.assert_close(got, wanted[own], atol=1e-4, rtol=1e-4)
        assert x.grad is not None
        torch.testing.assert_close(y.grad, x.grad[own], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(synced[0].running_mean, alone.running_mean)
        torch.testing.assert_close(synced[0].running_var, alone.running_var, atol=1e-4, rtol=1e-4)
    gradient = synced[0].weight.grad.clone()
    dist.all_reduce(gradient)
    torch.testing.assert_close(gradient, alone.weight.grad, atol=1e-3, rtol=1e-3)  # type: ignore[union-attr]
    synced.eval()
    alone.eval()
    torch.testing.assert_close(synced(whole), alone(whole), atol=1e-4, rtol=1e-4)


def test_sync_batch_norm_of_half_precision_stays_so(group: dist.ProcessGroup) -> None:
    synced, alone = SyncBatchNorm(3), nn.BatchNorm1d(3)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    got = synced(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, alone(x), atol=0.02, rtol=0.02)  # all ranks have the same batch
    got.float().square().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert synced.weight.grad.dtype == torch.float32


def test_stock_ddp_takes_it_on_a_cpu(group: dist.ProcessGroup) -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4), nn.Linear(4, 1))
    model = DistributedDataParallel(convert_sync_batchnorm(net))
    for step in range(3):
        model(batch(group.rank(), step)).sum().backward()
    means: list[Any] = [None] * group.size()
    dist.all_gather_object(means, net[1].running_mean.tolist())
    assert all(each == means[0] for each in means)


def test_events_for_profilers(group: dist.ProcessGroup) -> None:
    if not has_events_of_two_threads():
        pytest.skip(f"the profiler of torch {torch.__version__} shows no event that ends on another thread")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        dist.all_reduce(torch.ones(2, 3))
        late = dist.all_reduce(torch.ones(4), async_op=True)
        dist.barrier()
    late.wait()
    events = [event for event in profiler.events() if event.name.startswith("mpdist:")]
    assert [event.name for event in events] == ["mpdist:all_reduce", "mpdist:all_reduce", "mpdist:barrier"]
    assert [event.input_shapes for event in events] == [[[2, 3]], [[4]], []]
    assert all(event.is_async for event in events)
