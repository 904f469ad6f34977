"""Start: all ranks begin with the same module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpdist.gradients.agreement import check_descriptions
from mpdist.torch.data_parallel.buffers import Buffers
from mpdist.torch.data_parallel.waiting import hold

if TYPE_CHECKING:
    from mpdist.comm import Communicator

# Tensors are broadcast through memory of this size.
CHUNK_BYTES = 16 * 1024**2

Named = Sequence[tuple[str, Tensor]]


def compare(comm: Communicator, what: str, tensors: Named) -> None:
    """Raise CollectiveMismatch, on all ranks, if names, shapes, strides or dtypes differ between them."""
    hold(check_descriptions(comm, what, [describe(name, tensor) for name, tensor in tensors]))


def describe(name: str, tensor: Tensor) -> str:
    """`fc.weight float32 (10, 64)`; strides and device only where they are unusual."""
    strides = "" if tensor.is_contiguous() else f" strides {tuple(tensor.stride())}"
    frozen = " frozen" if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad else ""
    where = "" if tensor.is_cpu else f" on {tensor.device.type}"
    return f"{name} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{strides}{where}{frozen}"


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
