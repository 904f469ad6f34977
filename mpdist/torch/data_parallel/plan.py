"""Plan: the ranks agree on the order of gradients, and make their buckets from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mpdist.gradients.buckets import (
    DEVICE_SMALLEST_BYTES,
    SMALLEST_BYTES,
    agreed_order,
    assign_buckets,
    positions_of,
)
from mpdist.gradients.talk import Talk
from mpdist.torch.data_parallel.bucket import Bucket, empty
from mpdist.torch.data_parallel.notes import Notes

if TYPE_CHECKING:
    from mpdist.comm import Communicator
    from mpdist.torch.data_parallel.slot import Slot

# Types whose sums hold the notes.
NOTED_TYPES = (torch.float32, torch.float64)


class Agreement(NamedTuple):
    """What all ranks have seen in their first backward.

    Attributes:
        order: indices of the slots, as their gradients become ready on the mean of the ranks.
        used: for each slot, how many ranks had a gradient.
    """

    order: list[int]
    used: list[int]


def agree(comm: Communicator, slots: Sequence[Slot], seen: Sequence[int] | None) -> Talk[Agreement]:
    """Join the orders that the ranks have seen; None is a rank that has seen nothing, and only listens."""
    count = len(slots)
    numbers = np.zeros(2 * count, np.int64)
    if seen is not None:
        lasts = list(dict.fromkeys(reversed(seen)))[::-1]  # complete when it fired for the last time
        numbers[:count] = positions_of(lasts, count)
        numbers[[count + index for index in lasts]] = 1
    yield comm.all_reduce(numbers)
    return Agreement(agreed_order(numbers[:count].tolist()), numbers[count:].tolist())


def make_buckets(
    comm: Communicator,
    slots: Sequence[Slot],
    order: Sequence[int],
    bucket_bytes: int,
    is_hooked: bool,
    make: type[Bucket] = Bucket,
) -> tuple[list[Bucket], Notes, torch.Tensor | None]:
    """The buckets in their order, the notes, and the memory of the notes where they are a message of their own."""
    dense = [index for index in order if not slots[index].is_sparse]
    sizes = [slot.parameter.numel() * slot.parameter.itemsize for slot in slots]
    smallest = SMALLEST_BYTES if slots[0].parameter.is_cpu else DEVICE_SMALLEST_BYTES
    groups = assign_buckets(sizes, [slot.parameter.dtype for slot in slots], dense, bucket_bytes, smallest)
    length = Notes.length(len(slots), comm.size)
    # A sparse gradient may come after the last bucket has started, a hook may change what is in it, and a device would
    # have to be waited for to read it.
    has_room = len(dense) == len(slots) and not is_hooked and _holds_notes(slots[groups[-1][-1]].parameter)
    buckets = []
    for number, group in enumerate(groups):
        is_last = number == len(groups) - 1
        tail = length if is_last and has_room else 0
        buckets.append(make(comm, [slots[index] for index in group], tail, is_hooked))
        buckets[-1].number(number, is_last)
    own = None if has_room else empty(comm, length, torch.float32, torch.device("cpu"))
    return buckets, Notes(buckets[-1].tail if own is None else own, len(slots), comm.rank, comm.size), own


def _holds_notes(parameter: torch.nn.Parameter) -> bool:
    return parameter.is_cpu and parameter.dtype in NOTED_TYPES
