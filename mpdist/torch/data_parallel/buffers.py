"""Buffers of the module, as running means: before a forward all ranks get those of one rank, in one message."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import is_lazy

from mpdist.errors import UsageError
from mpdist.torch.data_parallel.bucket import empty
from mpdist.torch.sharded import is_sharded
from mpdist.torch.waiting import finish

if TYPE_CHECKING:
    from mpdist.comm import Communicator

# Each buffer begins at a multiple of this: no dtype is larger.
ALIGNED_BYTES = 16

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def has_buffers(module: torch.nn.Module) -> bool:
    """Whether there is any; a tenth of the time that it takes to name them, before every forward."""
    modules: list[torch.nn.Module | None] = [module]
    for each in modules:  # which grows on the way
        if each is None:
            continue
        if each._buffers:
            return True
        if each._modules:
            modules.extend(each._modules.values())
    return False


def is_sparse(tensor: Tensor) -> bool:
    """Whether it is of one of torch's sparse layouts."""
    return tensor.layout in _SPARSE


def fault_of(tensor: Tensor) -> str:
    """Why a tensor cannot be broadcast, and what to do; empty if it can."""
    if is_lazy(tensor):
        return "is not initialised yet: run a forward of the module before it is wrapped"
    if is_sharded(tensor):
        return (
            f"is a {type(tensor).__name__}, of which each rank has its part: fully_shard() and parallelize_module() "
            "average the gradients of what they share out by themselves, so leave the wrapper out"
        )
    if is_sparse(tensor):
        return (
            f"is sparse ({tensor.layout}), and only dense tensors are broadcast: register it dense, or its indices and "
            "values as buffers, or give broadcast_buffers=False where all ranks make the same"
        )
    if tensor.numel() and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        return (
            f"is expanded, shape {tuple(tensor.shape)} with strides {tensor.stride()}: several elements are one place "
            "in memory, which cannot be written to. Register it .contiguous()"
        )
    return ""


Layout: TypeAlias = tuple[torch.dtype, torch.Size, torch.device]


class Buffers:
    """A list of buffers, and the messages in which they travel: one for each device."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._tensors: list[Tensor] = []
        self._layouts: list[Layout] = []
        self._messages: list[Message] = []

    def broadcast(self, tensors: Sequence[Tensor], src: int) -> None:
        """Give all ranks the buffers of rank `src`.

        `tensors` are read anew: a buffer may have been reassigned, or changed by `.resize_()` or `.data = ...`.
        """
        if not tensors:
            return
        layouts = [(tensor.dtype, tensor.shape, tensor.device) for tensor in tensors]
        if layouts != self._layouts or any(a is not b for a, b in zip(tensors, self._tensors, strict=True)):
            self._tensors, self._layouts = list(tensors), layouts
            devices = dict.fromkeys(tensor.device for tensor in tensors)
            self._messages = [Message(self._comm, [x for x in tensors if x.device == device]) for device in devices]
        for message in self._messages:
            message.broadcast(src)


class Message:
    """Buffers on one device, and the memory in which they travel."""

    def __init__(self, comm: Communicator, tensors: Sequence[Tensor]) -> None:
        self._comm = comm
        self._tensors = list(tensors)
        for tensor in tensors:
            fault = fault_of(tensor)
            if fault:
                raise UsageError(f"on '{comm.name}' (rank {comm.rank}): a buffer {fault}")
        starts = [0]
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.itemsize
            starts.append(-(-(starts[-1] + nbytes) // ALIGNED_BYTES) * ALIGNED_BYTES)
        with torch.inference_mode(False):  # what is made in such a forward could not be written to in others
            flat = empty(comm, starts[-1], torch.uint8, tensors[0].device)
            self._flat = flat
            self._views = [
                flat[start : start + tensor.numel() * tensor.itemsize].view(tensor.dtype).view(tensor.shape)
                for tensor, start in zip(tensors, starts, strict=False)
            ]

    def broadcast(self, src: int) -> None:
        """Give all ranks those of rank `src`."""
        # Backward may still need the values from before; it is torch's own way to leave them to chance here.
        copy = _copy_each if any(map(_is_marked, self._tensors)) else torch._foreach_copy_
        with torch.no_grad(), _with_their_versions(self._tensors):
            if self._comm.rank == src:
                copy(self._views, self._tensors)
            finish(self._comm.broadcast(self._flat, src=src))
            if self._comm.rank != src:
                copy(self._tensors, self._views)


def _copy_each(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for destination, source in zip(destinations, sources, strict=True):
        destination.copy_(source)


def _is_marked(tensor: Tensor) -> bool:
    """Whether its values are the conjugate or the negative of what lies in memory, which torch's list copy refuses."""
    return tensor.is_conj() or tensor.is_neg()


def _with_their_versions(tensors: Sequence[Tensor]) -> AbstractContextManager[object]:
    """Hide from autograd that tensors change."""
    if _TAKES_SEVERAL:
        return _unsafe_preserve_version_counter(tuple(tensors))
    stack = ExitStack()
    for tensor in tensors:
        stack.enter_context(_unsafe_preserve_version_counter(tensor))
    return stack


def _takes_several() -> bool:
    try:
        _unsafe_preserve_version_counter(())
    except AttributeError:  # older versions take one tensor
        return False
    return True


_TAKES_SEVERAL = _takes_several()
