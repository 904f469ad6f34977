"""Communication hooks: torch's own run with our buckets, and give what they give in torch's DDP."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_parallel.pairs import assert_equal, mlp, train, wrapped
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel

from mpdist import ClosedError, Communicator, UsageError, WorkTimeout

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.usefixtures("gloo")]


def power_state(**options: Any) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, **options)


HOOKS = {
    "all_reduce": (lambda: None, default_hooks.allreduce_hook, 1e-12),
    "fp16": (lambda: None, default_hooks.fp16_compress_hook, 1e-4),  # rounded in another order on 3 ranks
    "powerSGD": (power_state, powerSGD_hook.powerSGD_hook, 1e-6),
    "fp16 wrapper": (lambda: None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 1e-4),
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("bucket_cap_mb", [1e-3, 25])
def test_torchs_hooks(comm: Communicator, name: str, bucket_cap_mb: float) -> None:
    make, hook, rtol = HOOKS[name]
    torch.manual_seed(7)
    net = mlp(12, 40, 30, 8)
    theirs = TorchDataParallel(copy.deepcopy(net), bucket_cap_mb=bucket_cap_mb)
    theirs.register_comm_hook(make(), hook)
    with wrapped(net, comm, bucket_cap_mb=bucket_cap_mb) as ours:
        ours.register_comm_hook(make(), hook)
        got = train(comm, ours, shape=(4, 12), steps=6)
        if rtol is None or (name == "powerSGD" and bucket_cap_mb < 1):
            # What it makes of a gradient depends on which ones share its bucket; but all ranks must agree.
            for tensor in got:
                mine = tensor.clone()
                comm.broadcast(mine, src=0).wait()
                assert torch.equal(mine, tensor)
            return
        assert_equal(got, train(comm, theirs, shape=(4, 12), steps=6), rtol)


def test_a_hook_may_resize_the_bucket(comm: Communicator) -> None:
    """As torch's batched PowerSGD does: gradients are the same parts of its new memory from then on."""

    def hook(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        count = buffer.numel()
        buffer.resize_(2 * count + 3).resize_(count)
        comm.all_reduce(buffer, op="avg").wait()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    with wrapped(mlp(6, 10, 3), comm) as model:
        model.register_comm_hook(None, hook)
        kept = []
        for step in range(5):
            model.zero_grad()
            model(torch.full((2, 6), step + comm.rank + 1.0, dtype=torch.float64)).sum().backward()
            kept.append([parameter.grad for parameter in model.parameters()])
            alone = copy.deepcopy(model.module)
            alone.zero_grad()
            for rank in range(comm.size):
                alone(torch.full((2, 6), step + rank + 1.0, dtype=torch.float64)).sum().backward()
            assert_equal(kept[-1], [parameter.grad / comm.size for parameter in alone.parameters()], 1e-12)
        assert all(one is other for one, other in zip(kept[3], kept[4], strict=True))


def test_bucket_is_what_torch_documents(comm: Communicator) -> None:
    net = mlp(6, 10, 3)
    seen: list[tuple[int, bool]] = []

    def hook(state: list[str], bucket: Any) -> torch.futures.Future[torch.Tensor]:
        assert state == ["state"]
        seen.append((bucket.index(), bucket.is_last()))
        assert bucket.buffer().dim() == 1
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert gradient.shape == parameter.shape
            low, high = bucket.buffer().data_ptr(), bucket.buffer().data_ptr() + bucket.buffer().nbytes
            assert low <= gradient.data_ptr() < high
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(torch.full_like(bucket.buffer(), 3.0))
        return future

    with wrapped(net, comm, bucket_cap_mb=1e-6) as model:
        model.register_comm_hook(["state"], hook)
        train(comm, model, steps=2)
        assert seen == 2 * [(0, False), (1, False), (2, False), (3, True)]
        assert all(torch.all(p.grad == 3) for p in net.parameters())
        with pytest.raises(RuntimeError, match="only be called once"):
            model.register_comm_hook(None, hook)


def test_buffer_that_a_hook_sets_takes_the_place_of_the_buckets(comm: Communicator) -> None:
    def inner(state: None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        assert bucket.buffer().dtype is torch.float16
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert gradient.dtype is torch.float16
            assert gradient.shape == parameter.shape
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(torch.ones_like(bucket.buffer()))
        return future

    net = mlp(6, 10, 3)
    with wrapped(net, comm) as model:
        model.register_comm_hook(None, default_hooks.fp16_compress_wrapper(inner))
        for _ in range(3):
            model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
            for parameter in net.parameters():
                assert torch.equal(parameter.grad, torch.ones_like(parameter))


def test_hook_with_unused_parameters(comm: Communicator) -> None:
    net = mlp(6, 10, 3)
    net.add_module("extra", torch.nn.Linear(3, 3).double())
    net.forward = lambda x: net[2:4](net[:2](x))
    with wrapped(net, comm, find_unused_parameters=True) as model:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        train(comm, model, steps=3)
        assert net.extra.weight.grad is None
        assert net[0].weight.grad is not None


def test_hook_that_is_no_function_is_refused(comm: Communicator) -> None:
    with wrapped(mlp(6, 3), comm) as model, pytest.raises(TypeError, match="function of state and bucket"):
        model.register_comm_hook(None, 3)


@pytest.mark.parametrize("returned", [None, torch.zeros(1)], ids=["None", "a tensor"])
def test_hook_that_returns_no_future_is_named(comm: Communicator, returned: Any) -> None:
    def hook(state: object, bucket: Any) -> Any:
        return returned

    with wrapped(mlp(6, 3), comm) as model:
        model.register_comm_hook(None, hook)
        with pytest.raises(UsageError, match=f"hook returned a {type(returned).__name__}; it must return a"):
            model(torch.ones(4, 6).double()).sum().backward()


@pytest.mark.parametrize("report_after", [None, "1.2"], ids=["", "reported before"])
def test_hook_whose_future_never_completes_is_named(
    comm: Communicator, report_after: str | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def forgets(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        return torch.futures.Future()

    if report_after is not None:
        monkeypatch.setenv("MPDIST_REPORT_AFTER", report_after)
    with wrapped(mlp(6, 3), comm) as model:
        model.comm.timeout = 0.5
        model.register_comm_hook(None, forgets)
        x = torch.ones(4, 6).double()
        hook = r"the Future that the communication hook .*forgets returned for bucket 0, the gradients of .*,"
        with pytest.raises(WorkTimeout, match=rf"{hook} is not complete after 0.5 s"):
            model(x).sum().backward()
        with pytest.raises(ClosedError, match="Future was not complete in time"):
            model(x).sum().backward()
    written = capfd.readouterr().err
    assert bool(re.search(rf"{hook} which is not complete after 1.2 s", written)) is (report_after is not None)


def test_gloo_is_not_a_group_to_average_over(comm: Communicator) -> None:
    from mpdist import UsageError
    from mpdist.torch import DistributedDataParallel

    with pytest.raises(UsageError, match="backend 'gloo'"):
        DistributedDataParallel(mlp(6, 3), process_group=dist.group.WORLD)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("_register_builtin_comm_hook", (dist.BuiltinCommHookType.ALLREDUCE,)),
        ("_register_accum_grad_hook", ()),
        ("_register_buffer_comm_hook", (None, print)),
        ("_distributed_broadcast_coalesced", ([torch.zeros(2)], 1024, 0)),
    ],
)
def test_what_needs_torchs_own_reducer_is_refused(comm: Communicator, name: str, arguments: tuple[Any, ...]) -> None:
    with wrapped(mlp(6, 3), comm) as model, pytest.raises(UsageError, match=rf"{name}\(\) is for torch's own"):
        getattr(model, name)(*arguments)
