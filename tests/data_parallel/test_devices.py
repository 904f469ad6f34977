"""DistributedDataParallel on a device: the tests of its training once more, and what only a device has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from data_parallel import pairs
from data_parallel.pairs import mlp, wrapped
from memory.simulated import Simulated
from torch import nn
from torch_support import again, devices, simulated_torch, values

import mpdist.torch
from mpdist import Communicator, UsageError
from mpdist.memory.cuda import Cuda
from mpdist.torch import DistributedDataParallel
from mpdist.torch.data_parallel import overlap
from mpdist.torch.data_parallel.streams import Streams

pytestmark = [
    pytest.mark.ranks(1, 2),
    pytest.mark.limit(120),
    pytest.mark.apart,
    pytest.mark.any_mpi,
    pytest.mark.usefixtures("gloo", "device"),
]

HERE = Path(__file__).parent
# What these compute beside the wrapped module is on the CPU, or is pickled, which the simulated GPU's tensors can't be.
ON_CPU = {
    "equality": ("test_mixed_precision", "test_two_ranks_are_one_rank_with_the_double_batch"),
    "unused": ("test_one_rank_uses_no_parameter_at_all",),
    "own_gradients": ("test_gradients_of_the_user_hold_the_mean",),
    "join": ("test_an_optimizers_state_is_made_equal_as_the_docs_say",),
}
for module, others in ON_CPU.items():
    globals().update(again.loaded_from(HERE / f"test_{module}.py", without=others))

# torch ends the process where a hook of a device that is written in Python raises; and there are no convolutions.
NOT_SIMULATED = (
    "test_static_graph_that_is_not_static_is_named",
    "test_backward_that_broke_off_before_any_bucket_can_be_repeated",
    "test_channels_last_gradients_have_the_strides_of_their_parameters",
)


@pytest.fixture(scope="module", autouse=True)
def _simulated() -> None:
    devices.install()


@pytest.fixture(params=devices.DEVICES)
def device(request: pytest.FixtureRequest, comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == simulated_torch.NAME and request.node.originalname in NOT_SIMULATED:
        pytest.skip("not to be had on a simulated GPU")
    with devices.opened(request.param, comm, is_default=False) as name:
        monkeypatch.setattr(pairs, "placed", devices.moved)
        yield name


def test_buckets_are_on_the_device_and_nothing_waits_for_it_in_hooks(comm: Communicator, device: str) -> None:
    with wrapped(mlp(6, 30, 20, 3), comm, bucket_cap_mb=1e-3) as model:
        for number in range(3):
            model(values.placed(pairs.inputs(comm, number, (4, 6), torch.float64))).sum().backward()
        buckets = model.reducer.buckets
        assert buckets is not None
        assert len(buckets) > 1
        assert {bucket.flat.device.type for bucket in buckets} == {device}
        assert all(slot.view is slot.parameter.grad for slot in model.reducer.slots)


def test_gradients_of_several_streams_are_waited_for_and_their_streams_wait(comm: Communicator, device: str) -> None:
    module = torch.get_device_module(device)
    streams = Streams(torch.device(device, 0))
    side = module.Stream()
    with module.stream(side):
        x = queued(comm.rank)
        streams.note()
    with streams.joined():
        work = comm.all_reduce(x)  # follows the current stream, not that of the value
        y = queued(1)
    with module.stream(side):
        after = (y + 1).cpu()
    work.wait()
    assert x.cpu().unique().tolist() == [comm.size * (comm.size - 1) / 2]
    assert after.unique().tolist() == [2]


def test_gradients_that_come_in_several_streams_are_averaged(comm: Communicator, device: str) -> None:
    module = torch.get_device_module(device)
    side = module.Stream()
    with wrapped(mlp(6, 30, 3), comm) as model, torch.no_grad():
        with torch.enable_grad():  # makes the buckets
            model(values.placed(pairs.inputs(comm, 0, (4, 6), torch.float64))).sum().backward()
        reducer = model.reducer
        reducer._open()
        for number, slot in enumerate(reducer.slots):
            is_late = number % 2 == 0
            with module.stream(side) if is_late else nullcontext():
                value = queued(comm.rank)[0] if is_late else float(comm.rank)
                slot.parameter.grad = torch.zeros_like(slot.parameter) + value
                reducer.ready(slot, slot.parameter)
        reducer._close()
        assert [slot.parameter.grad.cpu().unique().tolist() for slot in reducer.slots] == [[(comm.size - 1) / 2]] * 4


def test_a_thread_may_drive_the_reductions(comm: Communicator, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "is_thread_worth", lambda *_: True)
    pairs.both(comm, lambda: mlp(200, 200, 3), options={"bucket_cap_mb": 1e-3}, shape=(4, 200), rtol=1e-11)


def queued(value: float) -> torch.Tensor:
    """A tensor that gets its value after many kernels of the current stream."""
    x = values.placed(torch.full((1000,), value - 60.0, device="cpu"))
    for _ in range(60):
        x = x + 1
    return x


def test_buffers_of_a_module_may_be_in_two_places(comm: Communicator, device: str) -> None:
    net = devices.moved(mlp(6, 3))
    net.register_buffer("here", torch.full((3,), float(comm.rank)))
    net.register_buffer("there", torch.full((2,), float(comm.rank), device=device))
    model = DistributedDataParallel(net, comm)
    assert [net.here.tolist(), net.there.tolist()] == [[0.0] * 3, [0.0] * 2]
    model.close()


def test_a_module_elsewhere_on_one_rank_is_named(comm: Communicator) -> None:
    net = mlp(6, 3)
    if comm.rank == 0:
        net = devices.moved(net)
    if comm.size == 1:
        DistributedDataParallel(net, comm).close()
        return
    with pytest.raises(mpdist.CollectiveMismatch, match=r"0.weight float64 \(3, 6\) on "):
        DistributedDataParallel(net, comm)


def test_device_ids_are_those_of_the_module(comm: Communicator, device: str) -> None:
    net = devices.moved(mlp(6, 3))
    for wrong in ({"device_ids": [1]}, {"device_ids": [0, 1]}, {"output_device": "cpu"}, {"device_ids": ["cpu"]}):
        with pytest.raises(UsageError, match="a rank has one device"):
            DistributedDataParallel(net, comm, **wrong)
    model = DistributedDataParallel(net, comm, device_ids=[torch.device(device, 0)], output_device=0)
    assert model.device_ids == [0]
    out = model(torch.ones(2, 6, dtype=torch.float64))
    assert out.device.type == device
    model.close()


def test_scaled_gradients_overflow_on_all_ranks_or_none(comm: Communicator, device: str) -> None:
    """What a GradScaler asks after the average must have one answer."""
    with wrapped(mlp(6, 3, dtype=torch.float32), comm) as model:
        for is_bad in (False, True):
            model.zero_grad()
            factor = float("inf") if is_bad and comm.rank == comm.size - 1 else 8.0
            (model(torch.ones(4, 6)).mean() * factor).backward()
            found = [parameter.grad.cpu().isfinite().all().item() for parameter in model.parameters()]
            assert found == [not is_bad] * len(found)
            same = [comm.broadcast(p.grad.clone(), src=0).wait() for p in model.parameters()]
            for gradient, first in zip([p.grad for p in model.parameters()], same, strict=True):
                torch.testing.assert_close(gradient.cpu(), first.cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_loss_scaling_are_those_of_one_process(comm: Communicator, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    alone, net = mlp(6, 30, 3, dtype=torch.float32).cuda(), mlp(6, 30, 3, dtype=torch.float32).cuda()
    for parameter in alone.parameters():
        comm.broadcast(parameter.detach(), src=0).wait()
    net.load_state_dict(alone.state_dict())
    with wrapped(net, comm) as model:
        scalers = [torch.amp.GradScaler("cuda", init_scale=64.0) for _ in range(2)]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, alone)]
        for number in range(5):
            mine = pairs.inputs(comm, number, (4, 6), torch.float32)
            shares = [comm.broadcast(mine.clone(), src=rank).wait() for rank in range(comm.size)]
            for each, scaler, optimizer, x in zip(
                (model, alone), scalers, optimizers, (shares[comm.rank], torch.cat(shares)), strict=True
            ):
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=dtype):
                    loss = each(values.placed(x)).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        pairs.assert_equal(list(net.parameters()), list(alone.parameters()), 2e-2)
        assert scalers[0].get_scale() == scalers[1].get_scale()


@pytest.mark.parametrize("is_one", [True, False])
def test_ranks_that_share_a_device_while_others_idle_are_hinted_at(
    comm: Communicator, device: str, monkeypatch: pytest.MonkeyPatch, is_one: bool
) -> None:
    number = 0 if is_one else comm.rank  # each may see another part of the node's devices, and counts those from 0 on
    for kind in (Simulated, Cuda):
        monkeypatch.setattr(kind, "identity", lambda _: number)
    monkeypatch.setattr(torch.get_device_module(device), "device_count", lambda: 2)
    findings = mpdist.torch.check(devices.moved(nn.Linear(2, 2)), comm=comm)
    assert any("2, 1 in use" in hint for hint in findings.hints) == (is_one and comm.size > 1)
