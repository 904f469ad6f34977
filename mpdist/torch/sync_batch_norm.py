"""SyncBatchNorm: batch normalisation over the batches of all ranks, on the CPU and on a GPU.

torch's own needs a GPU, and DDP refuses its class and what derives from it on a CPU. This one normalises by count,
sum and sum of squares of all ranks; batches may differ in size, and may be empty on some ranks.

Its collectives run on the group itself, also where that is mpdist's world: forward and backward bring them in the
same order on all ranks, as what the program does there itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from mpdist.comm import Communicator
from mpdist.errors import UsageError
from mpdist.torch.compiling import leave_alone
from mpdist.torch.waiting import finish


def synchronized_norm(module: torch.nn.Module, ranks: int) -> str | None:
    """The name of a part of the module that normalises over so many ranks now; None where none does."""
    for name, part in module.named_modules():
        if part.training and isinstance(part, SyncBatchNorm | torch.nn.SyncBatchNorm):
            group = _shared_group(part.process_group)
            if group is not None and _size(group) == ranks:
                return name or type(part).__name__
    return None


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation of (N, C, ...) over all ranks of a group in training.

    Else with the running statistics, or without those of the rank's own batch, as torch's.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | Communicator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Arguments as of torch.nn.SyncBatchNorm; `process_group` may be a communicator, too.

        Without one: torch's default group, or where there is none mpdist's world, as they are when it runs. On one
        rank, and where mpdist is not started, it is plain batch norm. Over several ranks it has no second derivatives.
        """
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_group: dist.ProcessGroup | Communicator | None = None
    ) -> torch.nn.Module:
        """As the function below."""
        return convert_sync_batchnorm(module, process_group)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; collective over the group in training."""
        self._check_input_dim(input)
        group = _shared_group(self.process_group) if self.training else None
        if group is None:
            if self.training and input.numel() == 0:
                raise ValueError("expected more than 1 value per channel when training, got an empty batch")
            return super().forward(input)
        channels = [1, -1, *[1] * (input.dim() - 2)]
        normalised: Tensor
        normalised, mean, variance, count = _normalise(input, self.eps, group, channels)
        if self.track_running_stats:
            self._track(mean, variance, count)
        if self.affine:
            normalised = normalised * self.weight.view(channels) + self.bias.view(channels)
        return normalised.to(input.dtype)

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Follow the statistics of all ranks; the variance without bias, as torch does it."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) with the mean and variance of all ranks, and its gradient.

    Halves give float32: they are rounded once, after weight and bias.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, eps: float, group: dist.ProcessGroup | Communicator, channels: list[int]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        axes = [0, *range(2, x.dim())]
        wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        total = wide.sum(axes)
        count = torch.full_like(total[:1], x.numel() // x.shape[1] if x.shape[1] else 0)
        # The mean first: a variance from the sum of squares would lose what a large mean hides.
        sums = torch.cat([total, count])
        _add_up(sums, group)
        count = sums[-1:]
        if count.item() < 2:
            raise ValueError(f"expected more than 1 value per channel when training, got {int(count.item())} in all")
        mean = sums[:-1] / count
        centred = wide - mean.view(channels)
        squares = (centred * centred).sum(axes)
        _add_up(squares, group)
        variance = squares / count
        scale = torch.rsqrt(variance + eps)
        normalised = centred * scale.view(channels)
        ctx.save_for_backward(normalised, scale, count)
        ctx.group, ctx.channels, ctx.axes, ctx.dtype = group, channels, axes, x.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        return normalised, mean, variance, count

    @staticmethod
    @leave_alone
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        with torch.no_grad():
            result = _Normalise._gradient(ctx, gradients[0])
        if torch.is_grad_enabled():  # create_graph
            result = _DifferentiatedOnce.apply(result.requires_grad_())  # type: ignore[no-untyped-call]  # torch's
        return result, None, None, None

    @staticmethod
    def _gradient(ctx: Any, given: Tensor) -> Tensor:
        normalised, scale, count = ctx.saved_tensors
        gradient = given.to(normalised.dtype)
        along = (gradient * normalised).sum(ctx.axes)
        sums = torch.stack([gradient.sum(ctx.axes), along])
        _add_up(sums, ctx.group)
        plain, along = (sums / count).unbind(0)
        result: Tensor = (gradient - plain.view(ctx.channels) - normalised * along.view(ctx.channels)) * scale.view(
            ctx.channels
        )
        return result.to(ctx.dtype)


class _DifferentiatedOnce(torch.autograd.Function):
    """The gradient, where a graph is made of backward.

    torch's once_differentiable lets pass one for which a constant came in, and which still depends on x.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        raise UsageError(
            "SyncBatchNorm was differentiated twice, and has no second derivatives: they would need the other ranks' "
            "batches. Take GroupNorm, or torch's batch norm of each rank's own batch, where a penalty on gradients or "
            "the like goes through it"
        )


@leave_alone
def _normalise(*inputs: Any) -> Any:
    return _Normalise.apply(*inputs)  # type: ignore[no-untyped-call]  # torch's


def _shared_group(given: dist.ProcessGroup | Communicator | None) -> dist.ProcessGroup | Communicator | None:
    """The group that is given, or torch's default group, or mpdist's world; None where that is one rank."""
    group = given
    if group is None:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else _world()
    return None if group is None or _size(group) == 1 else group


def _size(group: dist.ProcessGroup | Communicator) -> int:
    return group.size if isinstance(group, Communicator) else dist.get_world_size(group)


def _world() -> Communicator | None:
    from mpdist.runtime import started

    return started()


def _add_up(x: Tensor, group: dist.ProcessGroup | Communicator) -> None:
    """Replace by the sum over the ranks."""
    if isinstance(group, Communicator):
        finish(group.all_reduce(x))
    else:
        dist.all_reduce(x, group=group)


def convert_sync_batchnorm(
    module: torch.nn.Module, process_group: dist.ProcessGroup | Communicator | None = None
) -> torch.nn.Module:
    """Replace all batch normalisations in a module, torch's SyncBatchNorm among them; parameters are shared.

    One that has several names stays one.

    Args:
        process_group: over which to normalise, or a communicator; missing: torch's default group, or mpdist's world.

    Returns:
        The module, or what replaces it.
    """
    return _replaced(module, process_group, {})


def _replaced(
    module: torch.nn.Module,
    process_group: dist.ProcessGroup | Communicator | None,
    made: dict[torch.nn.Module, torch.nn.Module],
) -> torch.nn.Module:
    """One replacement for each module, however many names it has; `made` remembers them."""
    if module in made:
        return made[module]
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        made[module] = _converted(module, process_group)
        return made[module]
    made[module] = module
    for name, child in [*module._modules.items()]:
        if child is not None:
            module.add_module(name, _replaced(child, process_group, made))
    return module


def _converted(old: _BatchNorm, process_group: dist.ProcessGroup | Communicator | None) -> SyncBatchNorm:
    new = SyncBatchNorm(
        old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats, process_group, device="meta"
    )
    for name in ("weight", "bias"):
        setattr(new, name, getattr(old, name))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        new._buffers[name] = getattr(old, name)
    new.training = old.training
    return new
