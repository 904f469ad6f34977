"""Uneven: blocks whose sizes differ from rank to rank.

torch gives each rank the sizes of all blocks that it sends or receives, so that nothing has to be exchanged first:
each of these is one call of MPI, posted as a collective of the group. Sizes count bytes or elements, the same
everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpdist.comm.staged_calls import through
from mpdist.comm.staging import Staging
from mpdist.memory import HOST, Buffer, as_buffer
from mpdist.progress.collective import Collective, Steps, single_step
from mpdist.torch.devices import check_together
from mpdist.torch.errors import WrongCall
from mpdist.torch.staging import Finish, as_bytes, check_strided, is_known, joined, readable, room_for, writable, write

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work as TorchWork

    from mpdist.torch.group import Group
    from mpdist.transport.mpi import Transport

Tensors = Sequence[Tensor]


# What tells it from the operation that it is where a rank gives no sizes, which must be so on all.
_DETAILS: dict[str, Callable[[], str]] = {"all_to_all": lambda: "with split sizes"}

# Some MPIs count with 32 bits.
MAX_COUNT = 2**31 - 1


def all_gather(group: Group, outs: Tensors, tensor: Tensor, opts: Any) -> TorchWork:
    """Each rank's block to all; each rank knows all sizes."""
    room, finish = room_for(outs)
    x = _buffer(as_bytes(apart(readable(tensor), room)))
    return _post(group, "all_gather", _all_gather, opts, outs, finish, [tensor], x, _buffer(room), _counts(outs))


def gather(group: Group, outs: Tensors, tensor: Tensor, root: int, opts: Any) -> TorchWork:
    """Each rank's block to the root."""
    source = readable(tensor)
    x = _buffer(as_bytes(source))
    unit = x.element.itemsize
    if group._rank != root:
        return _post(group, "gather", _gather, opts, [], None, [tensor], x, None, (), unit, root)
    check_block(outs[root], tensor, root)
    room, finish = room_for(outs)
    x = _buffer(as_bytes(apart(source, room)))
    return _post(group, "gather", _gather, opts, outs, finish, [tensor], x, _buffer(room), _counts(outs), unit, root)


def scatter(group: Group, out: Tensor, blocks: Tensors, root: int, opts: Any) -> TorchWork:
    """The root's blocks to all."""
    room, finish = writable(out)
    target = _buffer(room)
    unit = target.element.itemsize
    if group._rank != root:
        return _post(group, "scatter", _scatter, opts, [out], finish, [], None, target, (), unit, root)
    check_block(out, blocks[root], root)
    x = _buffer(as_bytes(apart(joined(blocks), room)))
    return _post(group, "scatter", _scatter, opts, [out], finish, blocks, x, target, _counts(blocks), unit, root)


def all_to_all(
    group: Group, received: Tensors, sent: Tensors, opts: Any, outputs: Tensors, inputs: Tensors
) -> TorchWork:
    """Block r of each rank to rank r."""
    check_block(received[group._rank], sent[group._rank], group._rank)
    room, finish = room_for(received)
    x = apart(joined(sent), room)
    return _post(
        group,
        "all_to_all",
        _all_to_all,
        opts,
        outputs,
        finish,
        inputs,
        _buffer(as_bytes(x)),
        _buffer(room),
        _counts(sent),
        _counts(received),
    )


def apart(x: Tensor, room: Tensor) -> Tensor:
    """x, or a copy where the results would be written over it: MPI takes no such memory."""
    return x.clone() if overlaps(x, room) else x


def slices(tensor: Tensor, sizes: Sequence[int], ranks: int, what: str) -> Tensors:
    """The tensor cut along axis 0; evenly where no sizes are given.

    Raises:
        WrongCall: the sizes do not fit it, or it is not strided.
    """
    if not sizes:
        length = even_length(tensor, ranks, what)
        return torch.split(tensor.detach(), length) if length else [tensor] * ranks
    check_strided(tensor)
    length = tensor.shape[0] if tensor.dim() else 0
    if len(sizes) != ranks:
        raise WrongCall(f"Number of tensor splits not equal to group size: {len(sizes)} of {what}, {ranks} ranks")
    if sum(sizes) != length:
        raise WrongCall(
            f"Split sizes doesn't match total dim 0 size: {what} has {length}, the splits {sum(sizes)} in all"
        )
    return torch.split(tensor.detach(), list(sizes))


def even_length(tensor: Tensor, ranks: int, what: str) -> int:
    """How long a slice is along axis 0 if it is cut evenly; raises as `slices`."""
    check_strided(tensor)
    length = tensor.shape[0] if tensor.dim() else 0
    if length % ranks:
        raise WrongCall(f"Tensor's dim 0 does not divide equally across group size: {what} {length}, {ranks} ranks")
    return length // ranks


def check_block(out: Tensor, own: Tensor, rank: int) -> None:
    """What this rank sends to itself must fit where it receives it.

    Raises:
        WrongCall: it does not.
    """
    if out.dtype != own.dtype:
        raise WrongCall(f"Invalid usage of tensors with different dtypes: {out.dtype} and {own.dtype} on rank {rank}")
    if out.numel() != own.numel():
        raise WrongCall(
            f"Tensor list input to a collective must match in size: rank {rank} has {own.numel()} elements for "
            f"itself, and room for {out.numel()}"
        )


def overlaps(x: Tensor, out: Tensor) -> bool:
    """Whether a result would be written over its input."""
    return (
        bool(x.numel() and out.numel())
        and x.data_ptr() < out.data_ptr() + out.nbytes
        and out.data_ptr() < x.data_ptr() + x.nbytes
    )


def bringing(source: Tensor, target: Tensor) -> Finish:
    """What copies a result to where it belongs."""
    return lambda: write(target, source.view(target.shape))


def _buffer(tensor: Tensor) -> Buffer:
    return as_buffer(tensor)


def _counts(tensors: Tensors) -> list[int]:
    return [tensor.numel() if is_known(tensor.dtype) else tensor.nbytes for tensor in tensors]


def in_larger_units(unit: int, *blocks: Sequence[int]) -> tuple[int, list[list[int]]]:
    """Blocks of so many units of so many bytes, counted in larger units where 32 bits do not suffice."""
    if max(map(sum, blocks), default=0) <= MAX_COUNT:
        return unit, [list(counts) for counts in blocks]
    common = gcd(*(count for counts in blocks for count in counts))
    factor = next(common // k for k in range(1, common + 1) if common % k == 0 and common // k * unit <= MAX_COUNT)
    return unit * factor, [[count // factor for count in counts] for counts in blocks]


def _post(
    group: Group,
    op: str,
    program: Any,
    opts: Any,
    outputs: Tensors,
    finish: Finish | None,
    inputs: Tensors,
    x: Buffer | None,
    out: Buffer | None,
    *arguments: Any,
) -> TorchWork:
    if all(buffer is None or buffer.device is HOST for buffer in (x, out)):
        posted: Collective[Any] = group._channel.post(op, program, _DETAILS.get(op, str), x, out, *arguments)
    else:
        posted = _post_staged(group, op, program, x, out, *arguments)
    return group._hand(posted, opts, outputs, finish, inputs)


def _post_staged(
    group: Group, op: str, program: Any, x: Buffer | None, out: Buffer | None, *arguments: Any
) -> Collective[Any]:
    """The same with arrays on a device, through host memory."""
    check_together([buffer.owner for buffer in (x, out) if buffer is not None])  # type: ignore[misc]  # all are tensors
    device = next(buffer.device for buffer in (x, out) if buffer is not None)
    staging = Staging(group._engine, device, is_even=False)
    source = None if x is None else staging.mirrored(x, is_source=True)
    target = None if out is None else staging.mirrored(out, is_result=True)
    channel = through(group._comm, staging)._channel
    posted: Collective[Any] = channel.post(
        op, partial(_with_result, program), _DETAILS.get(op, str), source, target, *arguments
    )
    return posted


def _with_result(program: Any, transport: Transport, x: Any, out: Any, *arguments: Any) -> Steps[Any]:
    """What the program has written is its result, which is copied to the device."""
    yield from program(transport, x, out, *arguments)
    return out


# ---------------------------------------------------------------------- one call of MPI each


@single_step
def _all_gather(transport: Transport, x: Buffer, out: Buffer, counts: Sequence[int]) -> Steps[None]:
    unit, (counts,) = in_larger_units(x.element.itemsize, counts)
    yield transport.iall_gatherv(x, out, counts, unit)


@single_step
def _gather(
    transport: Transport, x: Buffer, out: Buffer | None, counts: Sequence[int], unit: int, dst: int
) -> Steps[None]:
    unit, (counts,) = in_larger_units(unit, counts)
    yield transport.igatherv(x, out, counts, unit, dst)


@single_step
def _scatter(
    transport: Transport, x: Buffer | None, out: Buffer, counts: Sequence[int], unit: int, src: int
) -> Steps[None]:
    unit, (counts,) = in_larger_units(unit, counts)
    yield transport.iscatterv(x, counts, unit, out, src)


@single_step
def _all_to_all(
    transport: Transport, x: Buffer, out: Buffer, sent: Sequence[int], received: Sequence[int]
) -> Steps[None]:
    unit, (sent, received) = in_larger_units(x.element.itemsize, sent, received)
    yield transport.iall_to_allv(x, sent, out, received, unit)
