"""Plan: the ranks agree on the order of gradients, and make their buckets from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mpdist.gradients.buckets import (
    BUCKET_BYTES,
    DEVICE_BUCKET_BYTES,
    DEVICE_SMALLEST_BYTES,
    FIRST_BYTES,
    SMALLEST_BYTES,
    UNHIDDEN_BUCKET_BYTES,
    agreed_order,
    assign_buckets,
    positions_of,
)
from mpdist.gradients.talk import Talk
from mpdist.torch.data_parallel.bucket import Bucket, empty, rooms, starts_of
from mpdist.torch.data_parallel.notes import Notes

if TYPE_CHECKING:
    from mpdist.comm import Communicator
    from mpdist.torch.data_parallel.first import First
    from mpdist.torch.data_parallel.slot import Slot

# Types whose sums hold the notes.
NOTED_TYPES = (torch.float32, torch.float64)


class Agreement(NamedTuple):
    """What all ranks have seen in their first backward.

    Attributes:
        order: indices of the slots, as their gradients become ready on the mean of the ranks.
        used: for each slot, how many ranks had a gradient.
        left: for each parameter, how many ranks have a gradient that is left over, see `change.average_left`.
        is_hidden: on some rank a thread moves buckets while backward computes.
    """

    order: list[int]
    used: list[int]
    left: list[int]
    is_hidden: bool


def agree(
    comm: Communicator, slots: Sequence[Slot], seen: Sequence[int] | None, left: Sequence[bool], is_hidden: bool
) -> Talk[Agreement]:
    """Join what the ranks have seen; None is a rank that has seen no order, and only listens to the others'."""
    count = len(slots)
    numbers = np.zeros(2 * count + len(left) + 1, np.int64)
    numbers[2 * count : -1] = left
    numbers[-1] = is_hidden
    if seen is not None:
        lasts = list(dict.fromkeys(reversed(seen)))[::-1]  # complete when it fired for the last time
        numbers[:count] = positions_of(lasts, count)
        numbers[[count + index for index in lasts]] = 1
    yield comm.all_reduce(numbers)
    positions, used, lefts = np.split(numbers[:-1], [count, 2 * count])
    return Agreement(agreed_order(positions.tolist()), used.tolist(), lefts.tolist(), bool(numbers[-1]))


class Sizes(NamedTuple):
    """Of buckets, in bytes, as `assign_buckets` takes them."""

    most: int
    smallest: int
    first: int | None = None


def sizes_of_buckets(is_on_cpu: bool, asked: int | None, is_hidden: bool) -> Sizes:
    """How large buckets get; `asked` for by the user, or None."""
    if not is_on_cpu:
        return Sizes(asked or DEVICE_BUCKET_BYTES, DEVICE_SMALLEST_BYTES)
    if is_hidden:
        return Sizes(asked or BUCKET_BYTES, SMALLEST_BYTES, FIRST_BYTES)
    most = asked or UNHIDDEN_BUCKET_BYTES
    return Sizes(most, most)


def make_buckets(
    comm: Communicator,
    slots: Sequence[Slot],
    agreement: Agreement,
    asked: int | None,
    is_hooked: bool,
    make: type[Bucket] = Bucket,
    first: First | None = None,
) -> tuple[list[Bucket], Notes, torch.Tensor | None]:
    """The buckets in their order, the notes, and the memory of the notes where they are a message of their own."""
    dense = [index for index in agreement.order if not slots[index].is_sparse]
    nbytes = [slot.parameter.numel() * slot.parameter.itemsize for slot in slots]
    sizes = sizes_of_buckets(slots[0].parameter.is_cpu, asked, agreement.is_hidden)
    groups = assign_buckets(nbytes, [slot.parameter.dtype for slot in slots], dense, *sizes)
    length = Notes.length(len(slots), comm.size)
    # A sparse gradient may come after the last bucket has started, a hook may change what is in it, and a device would
    # have to be waited for to read it.
    has_room = len(dense) == len(slots) and not is_hooked and _holds_notes(slots[groups[-1][-1]].parameter)
    members = [[slots[index] for index in group] for group in groups]
    starts = [starts_of(each) for each in members]
    counts = [each[-1] for each in starts]
    if has_room:
        counts[-1] += length
    device = slots[0].parameter.device
    wanted = [(count, each[0].parameter.dtype) for count, each in zip(counts, members, strict=True)]
    if is_hooked:  # only torch's own memory can be resized, as a hook may do
        flats = [torch.empty(count, dtype=dtype, device=device) for count, dtype in wanted]
    else:
        flats = (first and first.rooms(wanted, members, starts)) or rooms(comm, wanted, device)
    buckets = [make(*each) for each in zip(members, starts, flats, strict=True)]
    for number, bucket in enumerate(buckets):
        bucket.number(number, is_last=number == len(buckets) - 1)
    own = None if has_room else empty(comm, length, torch.float32, torch.device("cpu"))
    return buckets, Notes(buckets[-1].tail if own is None else own, len(slots), comm.rank, comm.size), own


def _holds_notes(parameter: torch.nn.Parameter) -> bool:
    return parameter.is_cpu and parameter.dtype in NOTED_TYPES
