"""Staging: memory that MPI can use for a tensor that has none of its own shape.

A contiguous tensor of a known type is used where it is. Anything else (strided, lazily conjugated, of an 8-bit
floating point type) is copied before, or written back afterwards. A list of tensors that lie one behind the other,
as `chunk` and `split` make them, is one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpdist.torch.devices import check_together
from mpdist.torch.errors import WrongCall

Finish = Callable[[], object]

_PLAIN_TYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        *(getattr(torch, name) for name in ("uint16", "uint32", "uint64") if hasattr(torch, name)),
    }
)

# What torch's check says where elements certainly share memory; where it is too hard to say, it is for the caller.
_OVERLAPS = 1


def is_known(dtype: torch.dtype) -> bool:
    """Whether elements of this type are communicated as such; others travel as bytes."""
    return dtype in _PLAIN_TYPES


def is_plain(tensor: Tensor) -> bool:
    """Whether its memory can be used as it is."""
    return (
        tensor.dtype in _PLAIN_TYPES
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def check_strided(tensor: Tensor) -> None:
    """Only what has a place for each element is communicated.

    Raises:
        WrongCall: the tensor is sparse, or of another layout without strides.
    """
    if tensor.layout is not torch.strided:
        raise WrongCall(
            f"got a tensor of layout {tensor.layout}; needed a strided one (all_reduce also takes torch.sparse_coo): "
            "use to_dense()"
        )


def check_output(tensor: Tensor) -> None:
    """A result needs memory of its own for each element.

    Raises:
        WrongCall: the tensor is not strided, or several of its elements are one in memory.
    """
    check_strided(tensor)
    if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == _OVERLAPS:
        raise WrongCall(
            f"got an output of shape {tuple(tensor.shape)} and strides {tensor.stride()}, whose elements share memory, "
            "as expand() makes it; needed memory for each element: use clone()"
        )


def readable(tensor: Tensor) -> Tensor:
    """A tensor with the same elements that MPI can read.

    Raises:
        WrongCall: it is not strided.
    """
    if is_plain(tensor):
        return tensor
    check_strided(tensor)
    return as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())


def writable(tensor: Tensor, *, keeps: bool = False) -> tuple[Tensor, Finish | None]:
    """A tensor that MPI can write, and what brings its elements to where they belong.

    Args:
        keeps: the elements are needed: it is read, too.

    Raises:
        WrongCall: it is not strided, or its elements share memory.
    """
    if is_plain(tensor):
        return tensor, None
    check_output(tensor)
    whole = tensor.detach()
    if whole.is_contiguous() and not whole.is_conj() and not whole.is_neg():
        return as_bytes(whole), None
    if keeps:
        room = whole.resolve_conj().resolve_neg().contiguous()
    else:
        room = torch.empty(whole.shape, dtype=whole.dtype, device=whole.device)
    return as_bytes(room), lambda: write(tensor, room)


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor; of bytes if MPI does not know its type. Only for what moves elements."""
    return tensor if tensor.dtype in _PLAIN_TYPES else octets(tensor)


def octets(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor. One of a single element may have any stride, which would be kept by `view`."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def write(target: Tensor, source: Tensor) -> None:
    """Copy elements to where they belong, unseen by autograd."""
    if target.is_inference():
        with torch.inference_mode():
            target.copy_(source)
        return
    with torch.no_grad():
        target.copy_(source)


def one_behind_the_other(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors that fill contiguous memory in this order, as one flat tensor; None if they do not.

    Raises:
        WrongCall: there are none.
    """
    if not tensors:
        raise WrongCall("got an empty list of tensors; needed one at least")
    first = tensors[0]
    if first.requires_grad or not all(is_plain(tensor) for tensor in tensors):
        return None
    storage = first.untyped_storage().data_ptr()
    place = first.data_ptr()
    for tensor in tensors:
        if tensor.dtype is not first.dtype or tensor.untyped_storage().data_ptr() != storage:
            return None
        if tensor.numel() and tensor.data_ptr() != place:
            return None
        place += tensor.nbytes
    count = sum(tensor.numel() for tensor in tensors)
    return first.detach().as_strided((count,), (1,), first.storage_offset())


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of all, one behind the other, to be read."""
    whole = one_behind_the_other(tensors)
    if whole is not None:
        return whole
    check_together(tensors)
    return torch.cat([readable(tensor).detach().reshape(-1) for tensor in tensors])


def room_for(tensors: Sequence[Tensor]) -> tuple[Tensor, Finish | None]:
    """One flat tensor to be written, and what hands its elements out to these tensors.

    Raises:
        WrongCall: they are in several places, or one is not strided, or its elements share memory.
    """
    whole = one_behind_the_other(tensors)
    if whole is not None:
        return whole, None
    for tensor in tensors:
        check_output(tensor)
    check_together(tensors)
    first = tensors[0]
    dtype = first.dtype if first.dtype in _PLAIN_TYPES else torch.uint8
    scale = first.element_size() if dtype is not first.dtype else 1
    counts = [tensor.numel() * scale for tensor in tensors]
    flat = torch.empty(sum(counts), dtype=dtype, device=first.device)

    def hand_out() -> None:
        for tensor, part in zip(tensors, torch.split(flat, counts), strict=True):
            write(tensor, part.view(tensor.dtype).view(tensor.shape))

    return flat, hand_out
