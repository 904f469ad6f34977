"""The start: all ranks get the module of rank 0, and differences that cannot be mended are named."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_parallel.pairs import both, inputs, mlp, wrapped
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel

from mpdist import CollectiveMismatch, Communicator, UsageError, WorkTimeout
from mpdist.torch import DistributedDataParallel, check

pytestmark = pytest.mark.ranks(1, 2, 3)


def test_parameters_and_buffers_are_those_of_rank_0(comm: Communicator) -> None:
    torch.manual_seed(comm.rank)
    net = mlp(6, 10, 3, normed=True)
    net[2].running_mean += comm.rank
    net[2].num_batches_tracked += comm.rank
    torch.manual_seed(0)
    expected = mlp(6, 10, 3, normed=True).state_dict()
    with wrapped(net, comm):
        for name, tensor in net.state_dict().items():
            assert torch.equal(tensor, expected[name]), name


def test_from_the_first_step_on_the_process_keeps_the_memory_that_it_frees(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    monkeypatch.setattr("mpdist.torch.data_parallel.reducer.keep_freed", kept.append)
    with wrapped(nn.Linear(2, 2), comm) as model:
        assert not kept
        model(torch.ones(1, 2)).sum().backward()
        assert kept == [1024 * 1024**2]


def test_init_sync_may_be_left_out(comm: Communicator) -> None:
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.weight.fill_(comm.rank)
    with wrapped(net, comm, init_sync=False):
        assert torch.all(net.weight == comm.rank)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda odd: nn.Linear(6, 4 if odd else 3),
            r"weight float32 \(3, 6\) on rank.*weight float32 \(4, 6\) on rank 1",
        ),
        (lambda odd: nn.Linear(6, 3).to(torch.float64 if odd else torch.float32), "weight float64"),
        (lambda odd: nn.Linear(6, 3, bias=not odd), r"number 1 is bias float32 \(3,\) on rank.*nothing on rank 1"),
        (lambda odd: nn.Linear(6, 3).requires_grad_(True) if not odd else _half_frozen(), "weight .* frozen on rank 1"),
        (lambda odd: nn.LazyLinear(3) if odd else nn.Linear(6, 3), "weight not initialised on rank 1"),
        (lambda odd: nn.Flatten() if odd else nn.Linear(6, 3), "refused: no parameter .* nothing to average on rank 1"),
        (lambda odd: nn.Linear(6, 3, device="meta" if odd else "cpu"), r"weight float32 \(3, 6\) on meta on rank 1"),
    ],
)
def test_difference_between_ranks_is_named(comm: Communicator, make: Any, text: str) -> None:
    with pytest.raises(CollectiveMismatch, match=text):
        DistributedDataParallel(make(comm.rank == 1), comm)


def _half_frozen() -> nn.Module:
    net = nn.Linear(6, 3)
    net.weight.requires_grad_(False)
    return net


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    net.register_buffer("adjacent", buffer)
    return net


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.eye(4).to_sparse(), "adjacent, of the buffers, is sparse .torch.sparse_coo.*register it dense"),
        (lambda: torch.eye(4).to_sparse_csr(), "adjacent, of the buffers, is sparse .torch.sparse_csr"),
        (lambda: torch.ones(1, 4).expand(8, 4), r"adjacent, of the buffers, is expanded.*\(0, 1\).*contiguous"),
    ],
)
def test_buffer_that_cannot_be_broadcast_is_named(comm: Communicator, make: Any, text: str) -> None:
    with pytest.raises(UsageError, match=rf"\(rank {comm.rank}\): {text}"):
        DistributedDataParallel(with_buffer(make()), comm)
    problems = check(with_buffer(make()), comm=comm).problems
    assert len(problems) == 1
    assert re.match(text, problems[0])
    with wrapped(with_buffer(make()), comm, broadcast_buffers=False) as model:
        model(torch.ones(1, 2)).sum().backward()
        assert not check(model, comm=comm).problems
    with wrapped(with_buffer(make()), comm, init_sync=False) as model, pytest.raises(UsageError, match="a buffer is"):
        model(torch.ones(1, 2))


@pytest.mark.ranks(2, 3)
def test_buffer_that_is_sparse_on_one_rank_is_named(comm: Communicator) -> None:
    buffer = torch.eye(4).to_sparse() if comm.rank == 1 else torch.eye(4)
    with pytest.raises(CollectiveMismatch, match=r"adjacent float32 \(4, 4\) sparse_coo on rank 1"):
        DistributedDataParallel(with_buffer(buffer), comm)


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (lambda: nn.Linear(2, 2).requires_grad_(False), {}, "nothing to average"),
        (lambda: nn.Flatten(), {}, "nothing to average"),
        (lambda: nn.LazyLinear(2), {}, "weight is not initialised"),
        (lambda: nn.Linear(2, 2, device="meta"), {}, "is on meta"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), {}, "on several devices: 0.weight is"),
        (lambda: nn.Linear(2, 2), {"bucket_cap_mb": 0}, "bucket_cap_mb is 0"),
        (lambda: nn.Linear(2, 2), {"device_ids": [0]}, "leave them out"),
        (lambda: nn.Linear(2, 2), {"process_group": object()}, "comm or process_group"),
        (lambda: nn.Linear(2, 2), {"mixed_precision": object()}, "mixed_precision=.*torch.autocast"),
    ],
)
def test_refusals(comm: Communicator, make: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        DistributedDataParallel(make(), comm, **options)


def test_second_argument_may_be_a_group_and_nothing_else(comm: Communicator, gloo: dist.ProcessGroup) -> None:
    with pytest.raises(UsageError, match=r"comm is \[0\]; .*Leave device_ids out"):
        DistributedDataParallel(nn.Linear(2, 2), [0])
    with pytest.raises(UsageError, match="process_group is of backend 'gloo'"):
        DistributedDataParallel(nn.Linear(2, 2), gloo)
    with pytest.raises(UsageError, match="two process groups"):
        DistributedDataParallel(nn.Linear(2, 2), gloo, process_group=gloo)


def test_options_of_torchs_class_that_change_nothing_are_taken(comm: Communicator) -> None:
    with wrapped(nn.Linear(2, 2), comm, dim=0, check_reduction=False, mixed_precision=None):
        pass
    with pytest.raises(TypeError, match="unexpected keyword argument 'check_reductions'"):
        DistributedDataParallel(nn.Linear(2, 2), comm, check_reductions=False)


@pytest.mark.ranks(2)
def test_buffers_that_are_not_broadcast_may_differ(comm: Communicator) -> None:
    def build() -> nn.Module:
        net = nn.Linear(2, 2)
        net.register_buffer("seen", torch.full((2 + comm.rank,), float(comm.rank)))
        return net

    net = build()
    with wrapped(net, comm, broadcast_buffers=False) as model:
        model(torch.ones(1, 2)).sum().backward()
        assert torch.all(net.seen == comm.rank)
    for options in ({}, {"forward_sync_buffers": False}):
        with pytest.raises(CollectiveMismatch, match="buffers differ"):
            DistributedDataParallel(build(), comm, **options)


def test_it_is_torchs_class_to_torchs_own_code(comm: Communicator) -> None:
    net = mlp(6, 3)
    with wrapped(net, comm) as model:
        assert isinstance(model, TorchDataParallel)
        assert set(model.state_dict()) == {f"module.{name}" for name in net.state_dict()}
        model.load_state_dict(model.state_dict())
        assert TorchDataParallel._get_active_ddp_module() is None
        assert model.bucket_bytes_cap > 0
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        assert set(get_model_state_dict(model)) == set(net.state_dict())
        assert "over" in repr(model)
        model.eval()
        assert not net.training


def test_a_module_is_wrapped_once(comm: Communicator) -> None:
    with wrapped(mlp(6, 3), comm) as model:
        for again in (model, torch.compile(model)):
            with pytest.raises(UsageError, match=r"wrapped in DistributedDataParallel already; .* its \.module"):
                DistributedDataParallel(again, comm)
        model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()


def test_what_torchs_class_averages_already_is_refused(comm: Communicator, gloo: dist.ProcessGroup) -> None:
    inner = nn.ModuleDict({"part": TorchDataParallel(mlp(6, 2), process_group=gloo)})
    with pytest.raises(UsageError, match=r"part is in torch's own DistributedDataParallel already.*its \.module"):
        DistributedDataParallel(inner, comm)
    for parameter in inner.parameters():
        parameter.requires_grad_(False)
    inner["own"] = mlp(6, 2)
    DistributedDataParallel(inner, comm).close()


@pytest.mark.parametrize("ignores", [False, True])
def test_forward_within_torchs_class_is_refused_where_both_average(
    comm: Communicator, gloo: dist.ProcessGroup, ignores: bool
) -> None:
    with wrapped(mlp(6, 2), comm) as ours:
        outer = nn.Sequential(ours, mlp(2, 3))
        if ignores:
            own = [name for name, _ in outer.named_parameters() if name.startswith("0.")]
            TorchDataParallel._set_params_and_buffers_to_ignore_for_model(outer, own)
        theirs = TorchDataParallel(outer, process_group=gloo)
        for number in range(2):
            x = inputs(comm, number, (4, 6), torch.float64)
            with torch.no_grad():
                theirs(x)
            if not ignores:
                with pytest.raises(UsageError, match=r"0\.weight is in mpdist's .*torch's own.*averaged twice"):
                    theirs(x)
                continue
            theirs.zero_grad()
            expected = torch.autograd.grad(outer[1](ours.module(x)).sum(), list(outer.parameters()))
            theirs(x).sum().backward()
            for parameter, gradient in zip(outer.parameters(), expected, strict=True):
                comm.all_reduce(gradient, op="avg").wait()
                torch.testing.assert_close(parameter.grad, gradient)


def test_it_can_be_neither_pickled_nor_copied(comm: Communicator) -> None:
    with wrapped(mlp(6, 3), comm) as model:
        for make in (pickle.dumps, copy.deepcopy):
            with pytest.raises(UsageError, match=r"model\.module"):
                make(model)


def test_hooks_go_with_the_wrapper(comm: Communicator) -> None:
    net = mlp(6, 3)
    model = DistributedDataParallel(net, comm)
    model(torch.ones(2, 6).double()).sum().backward()
    del model
    gc.collect()
    if comm.rank == 0:
        net(torch.ones(2, 6).double()).sum().backward()
    with wrapped(net, comm) as model:
        model.zero_grad()
        model(torch.ones(2, 6).double()).sum().backward()


def test_ignored_parameters_are_left_alone(comm: Communicator) -> None:
    net = mlp(6, 5, 3)
    with torch.no_grad():
        net[0].weight.fill_(comm.rank)
    TorchDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.weight"])
    with wrapped(net, comm) as model:
        model((comm.rank + torch.ones(2, 6)).double()).sum().backward()
        assert torch.all(net[0].weight == comm.rank)


def test_the_first_forward_may_be_one_of_inference(comm: Communicator) -> None:
    """The memory in which buffers travel is made there, and written to in all later forwards."""
    net = mlp(6, 10, 3, normed=True)
    with wrapped(net, comm) as model:
        assert model.will_sync_module_buffers()
        model.eval()
        with torch.inference_mode():
            model(torch.ones(4, 6).double())
        model.train()
        for number in range(2):
            model(torch.full((4, 6), comm.rank + number).double()).sum().backward()
        net[2].running_mean += comm.rank
        model(torch.ones(4, 6).double())
        means = comm.all_gather_object(net[2].running_mean.tolist()).wait()
        assert all(mean == means[0] for mean in means)


def test_the_type_may_change_between_two_steps(comm: Communicator) -> None:
    net = nn.Linear(6, 3)
    with wrapped(net, comm) as model:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            model.to(dtype)
            for _ in range(2):
                model.zero_grad()
                model(torch.full((4, 6), comm.rank + 1.0, dtype=dtype)).sum().backward()
                assert net.weight.grad.dtype == dtype
                assert net.weight.grad[0, 0].item() == pytest.approx(4 * (comm.size + 1) / 2)


def grow(buffer: Tensor) -> None:
    buffer.resize_(buffer.numel() + 2)


def retype(buffer: Tensor) -> None:
    buffer.data = buffer.data.double() if buffer.dtype is torch.float32 else buffer.data.float()


@pytest.mark.parametrize("change", [grow, retype])
def test_a_buffer_may_get_another_shape_or_type_in_place(comm: Communicator, change: Callable[[Tensor], None]) -> None:
    """As the observers of torch's quantization do in their first forward."""
    net = nn.BatchNorm1d(4)
    net.register_buffer("extra", torch.zeros(2, dtype=torch.float64))
    extra = net.get_buffer("extra")
    with wrapped(net, comm) as model:
        for number in range(3):
            with torch.no_grad():
                change(extra)
                extra.fill_(number + comm.rank + 1 / 3)
            model(inputs(comm, number, (5, 4), torch.float32)).sum().backward()
            assert torch.equal(extra, torch.full_like(extra, number + 1 / 3))


@pytest.mark.ranks(2)
def test_a_buffer_that_grows_on_one_rank_is_told(comm: Communicator) -> None:
    """Whoever comes later finds that."""
    net, text = nn.BatchNorm1d(4), ""
    net.register_buffer("cache", torch.zeros(2))
    # Whoever was refused has called one collective less, so that the communicator does not end well either.
    with contextlib.suppress(CollectiveMismatch, WorkTimeout), wrapped(net, comm) as model:
        model(inputs(comm, 0, (5, 4), torch.float32)).sum().backward()
        if comm.rank == 1:
            net.cache = torch.zeros(50)
        model.comm.timeout = 2
        try:
            model(inputs(comm, 1, (5, 4), torch.float32))
        except (CollectiveMismatch, WorkTimeout) as error:
            text = str(error)
    texts = comm.all_gather_object(text).wait()
    assert any("has changed its size on some" in text and "broadcast_buffers=False" in text for text in texts)


class Marked(nn.Module):
    """A parameter and buffers that are the conjugate or the negative of what lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.randn(3, dtype=torch.complex128)
        self.weight = nn.Parameter(values.conj())
        self.register_buffer("conjugate", values.conj())
        self.register_buffer("negative", values.conj().imag)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight * self.conjugate * self.negative).abs().mean()


def test_conjugates_and_negatives_are_broadcast(comm: Communicator, gloo: dist.ProcessGroup) -> None:
    both(comm, Marked, lambda model, optimizer, x, number: model(x).backward(), shape=(4, 3))
    torch.manual_seed(comm.rank)
    with wrapped(Marked(), comm) as model:
        torch.manual_seed(0)
        expected = Marked()
        for mine, first in zip(model.state_dict().values(), expected.state_dict().values(), strict=True):
            assert torch.equal(mine.resolve_conj().resolve_neg(), first.resolve_conj().resolve_neg())


def with_optimizer(net: nn.Module) -> nn.Module:
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    return net


def test_optimizers_in_backward_are_refused(comm: Communicator) -> None:
    with pytest.raises(
        UsageError, match=r"^on .* weight and 1 more, of the parameters: an optimizer in.*step\(\) after"
    ):
        DistributedDataParallel(with_optimizer(nn.Linear(2, 2)), comm)
    if comm.size > 1:
        net = nn.Linear(2, 2)
        with pytest.raises(CollectiveMismatch, match=r"weight float32 \(2, 2\) with an optimizer in backward on rank"):
            DistributedDataParallel(net if comm.rank else with_optimizer(net), comm)
    net = nn.Linear(2, 2)
    with wrapped(net, comm) as model:
        with_optimizer(net)
        with pytest.raises(UsageError, match="weight and 1 more, of the parameters: an optimizer"):
            model(torch.ones(1, 2)).sum().backward()
