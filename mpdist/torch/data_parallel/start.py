"""Start: all ranks begin with the same module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from mpdist.errors import UsageError
from mpdist.gradients.agreement import check_descriptions
from mpdist.torch.data_parallel.buffers import Buffers, fault_of, is_sparse
from mpdist.torch.data_parallel.waiting import hold

if TYPE_CHECKING:
    from mpdist.comm import Communicator

# Tensors are broadcast through memory of this size.
CHUNK_BYTES = 16 * 1024**2

Named = Sequence[tuple[str, Tensor]]


def compare(comm: Communicator, what: str, tensors: Named) -> None:
    """See whether all ranks have the same, of a kind that is broadcast.

    Raises:
        CollectiveMismatch: on all ranks, if names, shapes, strides, layouts or dtypes differ between them.
        UsageError: on all ranks, if some have a layout that is not broadcast, or an optimizer in backward.
    """
    hold(check_descriptions(comm, what, [describe(name, tensor) for name, tensor in tensors]))
    # What is refused shows in the descriptions, so that from here on all ranks refuse it or none.
    refused = refusals(what, tensors)
    if refused:
        raise UsageError(f"on '{comm.name}' (rank {comm.rank}): " + "; ".join(refused))


def tell(comm: Communicator, parameters: Named, fault: UsageError) -> None:
    """Let the other ranks, which compare their parameters, hear that this one refuses its module; ends `comm`.

    Raises:
        CollectiveMismatch: not all ranks refuse theirs likewise.
    """
    try:
        described = [describe(name, parameter) for name, parameter in parameters]
        hold(check_descriptions(comm, "parameters", [*described, f"refused: {fault}"]))
    finally:
        comm._closed("its DistributedDataParallel was not made")


def refusals(what: str, tensors: Named) -> list[str]:
    """Why some tensors are not broadcast or not trained, and what to do, in words."""
    faults = [(name, fault_of(tensor)) for name, tensor in tensors]
    refused = [f"{name}, of the {what}, {fault}" for name, fault in faults if fault]
    stepping = [name for name, tensor in tensors if _has_optimizer(tensor)]
    if stepping:
        others = f" and {len(stepping) - 1} more" if len(stepping) > 1 else ""
        refused.append(
            f"{stepping[0]}{others}, of the {what}: an optimizer in backward, of torch's "
            "_apply_optimizer_in_backward(), would step with this rank's own gradient instead of the mean; leave that "
            "out, and call optimizer.step() after backward"
        )
    return refused


def _has_optimizer(tensor: Tensor) -> bool:
    return bool(getattr(tensor, "_in_backward_optimizers", None))


def describe(name: str, tensor: Tensor) -> str:
    """`fc.weight float32 (10, 64)`; what else is unusual is said, too."""
    if is_lazy(tensor):
        return f"{name} not initialised"
    if is_sparse(tensor):
        strides = f" {str(tensor.layout).removeprefix('torch.')}"
    else:
        strides = "" if tensor.is_contiguous() else f" strides {tuple(tensor.stride())}"
    frozen = " frozen" if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad else ""
    optimizer = " with an optimizer in backward" if _has_optimizer(tensor) else ""
    where = "" if tensor.is_cpu else f" on {tensor.device.type}"
    return f"{name} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{strides}{where}{frozen}{optimizer}"


def broadcast(comm: Communicator, tensors: Sequence[Tensor], src: int) -> None:
    """Give all ranks the values of rank `src`, in messages of about CHUNK_BYTES."""
    for group in _groups(tensors):
        Buffers(comm).broadcast([tensor.detach() for tensor in group], src)


def _groups(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: list[list[Tensor]] = []
    filled = CHUNK_BYTES
    for tensor in tensors:
        if not tensor.numel():
            continue
        if filled >= CHUNK_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.numel() * tensor.itemsize
    return groups
