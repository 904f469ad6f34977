"""The backend on tensors of a device: the tests of its values once more, and what only a device has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.utils.backend_registration as registration_of_backends
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel

if not hasattr(registration_of_backends, "_setup_privateuseone_for_python_backend"):
    pytest.skip(f"torch {torch.__version__} has no devices in Python", allow_module_level=True)

from torch_support import again, devices, values
from torch_support.values import assert_same, everyone, numbers, reduced, strided

import mpdist
import mpdist.torch
from mpdist.comm import straight
from mpdist.comm.staging import pinned_of
from mpdist.memory import as_buffer
from mpdist.progress.shown import showing

pytestmark = [pytest.mark.ranks(1, 3), pytest.mark.limit(120), pytest.mark.apart, pytest.mark.any_mpi]

# What these ask of a process has nothing to do with devices.
OTHERS = (
    "test_barrier_holds_until_the_last_rank_has_come",
    "test_objects",
    "test_what_is_not_strided_is_refused_by_every_rank",
)

HERE = Path(__file__).parent
globals().update(again.loaded_from(HERE / "test_reductions.py"))
globals().update(again.loaded_from(HERE / "test_moving.py", without=OTHERS))


@pytest.fixture(scope="module", autouse=True)
def _simulated() -> None:
    devices.install()


@pytest.fixture(scope="module", params=devices.DEVICES, autouse=True)
def device(request: pytest.FixtureRequest, group: dist.ProcessGroup, world: mpdist.Communicator) -> Iterator[str]:
    """The same for all: the group's ranks have joined their devices for good, and follow the streams of those."""
    with devices.opened(request.param, world) as name:
        yield name


def total(group: dist.ProcessGroup, seed: int = 0) -> torch.Tensor:
    return reduced(dist.ReduceOp.SUM, [numbers(1000, torch.float32, seed + each) for each in range(group.size())])


def streams_of(device: str) -> Any:
    return torch.get_device_module(device)


# ---------------------------------------------------------------------- order


def test_operations_follow_the_stream_that_is_current(group: dist.ProcessGroup, device: str) -> None:
    side = streams_of(device).Stream()
    with streams_of(device).stream(side):
        x = numbers(1000, torch.float32, group.rank())
        dist.all_reduce(x)
        assert_same(x, total(group), "other stream")


def test_whoever_waits_is_ordered_behind_what_brings_the_result_home(group: dist.ProcessGroup, device: str) -> None:
    for layout in (torch.clone, strided):
        side = streams_of(device).Stream()
        with streams_of(device).stream(side):
            x = layout(numbers(1000, torch.float32, group.rank()))
            work = dist.all_reduce(x, async_op=True)
        work.wait()
        y = x * 2  # on the default stream
        assert_same(y, 2 * total(group), f"default stream, {layout}")


def test_a_work_that_is_asked_is_brought_home(group: dist.ProcessGroup) -> None:
    x = strided(numbers(1000, torch.float32, group.rank()))
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    assert_same(x, total(group), "asked")


def test_a_future_holds_the_result(group: dist.ProcessGroup) -> None:
    for layout in (torch.clone, strided):
        x = layout(numbers(1000, torch.float32, group.rank()))
        future = dist.all_reduce(x, async_op=True).get_future()
        doubled = future.then(lambda done: done.value()[0] * 2)
        assert_same(doubled.wait(), 2 * total(group), layout)
        assert future.value()[0] is x


def test_works_are_waited_for_in_any_order(group: dist.ProcessGroup) -> None:
    tensors = [strided(numbers(1000, torch.float32, 10 * seed + group.rank())) for seed in range(4)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    for place in (2, 0, 3, 1):
        works[place].wait()
        assert_same(tensors[place], total(group, 10 * place), place)


def test_messages_around_a_ring(group: dist.ProcessGroup) -> None:
    dst, src = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    for layout in (torch.clone, strided):
        x, y = layout(numbers(500, torch.bfloat16, group.rank())), layout(torch.zeros(500, dtype=torch.bfloat16))
        for work in [dist.isend(x, dst), dist.irecv(y, src)]:
            assert work is not None
            work.wait()
        assert_same(y, numbers(500, torch.bfloat16, src), layout)
    pair = [dist.P2POp(dist.isend, x, dst), dist.P2POp(dist.irecv, z := torch.zeros_like(y), src)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    assert_same(z, y, "batch")


def test_tensors_that_go_straight_between_devices(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    for op in straight.IPC_FROM:
        monkeypatch.setitem(straight.IPC_FROM, op, 0)
    size, rank = group.size(), group.rank()
    part = dist.new_group(list(range(size)))  # its ranks join here
    for number in range(6):  # the first ones still go through the host
        for layout in (torch.clone, strided):
            x = layout(numbers(1000, torch.bfloat16, rank))
            work = dist.all_reduce(x, group=part, async_op=True)
            y = layout(numbers(500, torch.int64, rank))
            dist.broadcast(y, number % size, group=part)
            work.wait()
            assert_same(x, reduced(dist.ReduceOp.SUM, everyone(1000, torch.bfloat16, range(size))), number)
            assert_same(y, numbers(500, torch.int64, number % size), number)
        whole = torch.zeros(size * 300)
        dist.all_gather_into_tensor(whole, numbers(300, torch.float32, rank), group=part)
        assert_same(whole, torch.cat(everyone(300, torch.float32, range(size))), number)
        outs = [torch.zeros(200 * each + 1) for each in range(size)]
        dist.all_gather(outs, numbers(200 * rank + 1, torch.float32, rank), group=part)
        for each, out in enumerate(outs):
            assert_same(out, numbers(200 * each + 1, torch.float32, each), number)
    dist.destroy_process_group(part)


@pytest.mark.ranks(2, 3)
def test_blocks_of_different_sizes_never_go_straight(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one size do, when the ranks have found out that they can."""
    for op in straight.IPC_FROM:
        monkeypatch.setitem(straight.IPC_FROM, op, 0)
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(4):
        even = values.placed(torch.ones(5, device="cpu"))
        dist.all_reduce(even)
        assert even.tolist() == [size] * 5
        blocks = [torch.empty(other + 1) for other in range(size)]
        dist.all_gather(blocks, values.placed(torch.full((rank + 1,), float(rank), device="cpu")))
        assert [block.tolist() for block in blocks] == [[other] * (other + 1) for other in range(size)]


@pytest.mark.ranks(2, 3)
def test_messages_stay_on_the_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the ranks have found out that they can."""
    monkeypatch.setattr(showing, "SHOWN_FROM", 0)
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    for turn in range(4):
        room = torch.zeros(300)
        sent = dist.isend(values.placed(torch.full((300,), float(rank + turn), device="cpu")), after)
        received = dist.irecv(room, before)
        assert received is not None
        received.wait()
        assert room.tolist() == [before + turn] * 300
        assert sent is not None
        sent.wait()
    room = torch.zeros(size)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.full((size,), float(rank)), after), dist.P2POp(dist.irecv, room, before)]
    )
    for work in works:
        work.wait()
    assert room.tolist() == [before] * size


# ---------------------------------------------------------------------- what is refused


def test_tensors_in_two_places_are_refused(group: dist.ProcessGroup) -> None:
    size = group.size()
    here, there = torch.zeros(2, device="cpu"), torch.zeros(2)
    whole = torch.zeros(2 * size, device="cpu")
    calls: tuple[Any, ...] = (
        lambda: dist.all_gather_into_tensor(whole, there),
        lambda: dist.reduce_scatter_tensor(here, whole.to(there.device)),
        lambda: dist.all_to_all_single(whole, whole.to(there.device)),
        lambda: dist.all_to_all_single(whole, whole.to(there.device), [2] * size, [2] * size),
        lambda: dist.all_gather([here.clone() for _ in range(size)], there),
        lambda: dist.all_gather([torch.zeros(2 + each, device="cpu") for each in range(size)],
                                torch.zeros(2 + group.rank())),
        lambda: dist.all_reduce_coalesced([here, there]),
        lambda: group.allgather_coalesced([[here.clone()] for _ in range(size)], [there]),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(RuntimeError, match="must be on the same device"):
            call()
    x = torch.ones(1)
    dist.all_reduce(x)  # nothing was sent
    assert x.item() == size


@pytest.mark.skipif(devices.HAS_GPU, reason="of the simulated GPU")
def test_what_is_being_recorded_is_refused(
    group: dist.ProcessGroup, world: mpdist.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(3)
    accelerator: Any = pinned_of(world._channel.engine, as_buffer(x).device).accelerator
    monkeypatch.setattr(accelerator, "is_capturing", True)
    if group.size() > 1:
        with pytest.raises(RuntimeError, match="CUDA graph"):
            dist.all_reduce(x)
    with pytest.raises(RuntimeError, match="CUDA graph"):
        dist.all_gather([torch.zeros(3 + each) for each in range(group.size())], torch.ones(3 + group.rank()))
    monkeypatch.undo()
    dist.all_reduce(x)
    assert x.tolist() == [group.size()] * 3


# ---------------------------------------------------------------------- what torch makes of a group


def test_objects_and_barriers_need_no_device(group: dist.ProcessGroup, device: str) -> None:
    assert {each.type for each in group._device_types} - {"cuda"} == {"cpu", device} - {"cuda"}
    assert dist.distributed_c10d._get_object_coll_device(group) == "cpu"
    everything: list[Any] = [None] * group.size()
    dist.all_gather_object(everything, {"rank": group.rank()})
    assert everything == [{"rank": each} for each in range(group.size())]
    items = [torch.full((2,), 3.0, device="cpu")] if group.rank() == 0 else [None]
    dist.broadcast_object_list(items, 0)
    assert items[0] is not None
    assert items[0].tolist() == [3.0, 3.0]
    dist.barrier()
    dist.monitored_barrier()


def test_a_group_is_told_a_device(group: dist.ProcessGroup, device: str) -> None:
    part = dist.new_group(list(range(group.size())), device_id=torch.device(device, 0))
    x = numbers(1000, torch.float32, group.rank())
    dist.all_reduce(x, group=part)
    assert_same(x, total(group), "group")
    dist.destroy_process_group(part)


# ---------------------------------------------------------------------- training


def net() -> nn.Module:
    torch.manual_seed(3)
    with torch.device("cpu"):
        return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).double()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank), device="cpu").double()


def trained(model: nn.Module, ranks: list[int], steps: int = 4) -> list[torch.Tensor]:
    """Parameters after training on the batches of these ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    where = next(model.parameters()).device
    for step in range(steps):
        optimizer.zero_grad()
        for rank in ranks:
            (model(batch(rank, step).to(where)).square().mean() / len(ranks)).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def no_hook() -> None:
    return None


HOOKS: dict[str, tuple[Any, float]] = {
    "none": (no_hook, 1e-9),
    "all_reduce": (lambda: (None, default_hooks.allreduce_hook), 1e-9),
    "fp16": (lambda: (None, default_hooks.fp16_compress_hook), 1e-2),
    "bf16": (lambda: (None, mpdist.torch.bf16_compress), 3e-2),
    "powerSGD": (lambda: (powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook), 1.0),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("wrapper", ["ours", "torch's"])
def test_data_parallel_is_training_on_all_batches(group: dist.ProcessGroup, wrapper: str, hook: str) -> None:
    make, tolerance = HOOKS[hook]
    wanted = trained(net(), list(range(group.size())))
    module = devices.moved(net())
    if wrapper == "ours":
        model: Any = mpdist.torch.DistributedDataParallel(module, group, bucket_cap_mb=1e-3)
    else:
        model = TorchDataParallel(module, bucket_cap_mb=1e-3)
    made = make()
    if made is not None:
        model.register_comm_hook(*made)
    got = trained(model, [group.rank()])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    if wrapper == "ours":
        model.close()


def test_sync_batch_norm_is_one_batch_norm_over_all(group: dist.ProcessGroup) -> None:
    own = devices.moved(mpdist.torch.convert_sync_batchnorm(nn.BatchNorm1d(6, device="cpu").double()))
    plain = nn.BatchNorm1d(6, device="cpu").double()
    whole = torch.cat([batch(rank, 0) for rank in range(group.size())]).requires_grad_()
    x = batch(group.rank(), 0).to(next(own.parameters()).device).requires_grad_()
    rows = slice(5 * group.rank(), 5 * group.rank() + 5)
    (own(x) ** 3).sum().backward()
    (plain(whole) ** 3).sum().backward()
    assert x.grad is not None
    assert whole.grad is not None
    torch.testing.assert_close(x.grad.cpu(), whole.grad[rows], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(own.running_var.cpu(), plain.running_var, rtol=1e-6, atol=1e-6)


def test_what_is_beside_training(group: dist.ProcessGroup, world: mpdist.Communicator, tmp_path: Path) -> None:
    module = devices.moved(net())
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, float(group.rank() + 1))
    count = sum(parameter.numel() for parameter in module.parameters())
    norm = mpdist.torch.clip_grad_norm(module.parameters(), 1.0, world)
    wanted = np.sqrt(count * sum((rank + 1) ** 2 for rank in range(group.size())))
    np.testing.assert_allclose(norm.item(), wanted)
    np.testing.assert_allclose(next(module.parameters()).grad.cpu(), (group.rank() + 1) / wanted, rtol=1e-5)

    metrics = mpdist.torch.Metrics(world, "loss")
    metrics.add(group.rank() + 1, loss=torch.tensor(2.0))
    metrics.add(1, loss=torch.tensor([5.0]))
    ranks = group.size()
    samples = ranks * (ranks + 1) / 2
    assert metrics.means() == {"loss": (2 * samples + 5 * ranks) / (samples + ranks)}

    path = world.broadcast_object(tmp_path, src=0).wait() / "checkpoint"
    mpdist.torch.save_checkpoint(path, world, module=module, step=3)
    other = devices.moved(net())
    with torch.no_grad():
        next(other.parameters()).zero_()
    assert mpdist.torch.load_checkpoint(path, world, module=other) == {"step": 3}
    assert torch.equal(next(other.parameters()).cpu(), next(module.parameters()).detach().cpu())
    assert not mpdist.torch.check(module, comm=world)
