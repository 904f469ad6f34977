"""Change: parameters were frozen or thawed, which makes new buckets, and must happen on all ranks in the same step.

A rank on which nothing changed sends its buckets as ever, and has no other message in which it could be told. So one
with a change takes part in those messages once more, with zeros and a note; then each rank knows whether all changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from mpdist.errors import UsageError
from mpdist.memory import premul_sum
from mpdist.torch.data_parallel import sparse, start
from mpdist.torch.data_parallel.notes import Notes
from mpdist.torch.waiting import finish

if TYPE_CHECKING:
    from mpdist.comm import Communicator
    from mpdist.torch.data_parallel.bucket import Bucket
    from mpdist.torch.data_parallel.slot import Slot


class Former(NamedTuple):
    """The messages from before the change.

    Attributes:
        buckets: in their order.
        own_notes: the message of the notes, where they are not in the last bucket.
        parameters: how many were averaged.
    """

    buckets: list[Bucket]
    own_notes: torch.Tensor | None
    parameters: int


def tell(comm: Communicator, former: Former, divisor: float, is_hooked: bool) -> int:
    """Take part in the former messages; returns the number of ranks that have changed."""
    for bucket in former.buckets:
        bucket.begin(divisor, comm.size, is_hooked)
    # In other memory: gradients of the parameters may still be in the buckets.
    messages = [] if is_hooked else [(torch.zeros_like(bucket.flat), bucket.op) for bucket in former.buckets]
    if former.own_notes is not None:
        messages.append((torch.zeros_like(former.own_notes), "sum"))
    last, _ = messages[-1]
    room = last[-Notes.length(former.parameters, comm.size) :]
    notes = Notes(room, former.parameters, comm.rank, comm.size)
    notes.write_changed()
    for message, op in messages:
        finish(comm.all_reduce(message, op=op))
    return notes.changed()


def check(comm: Communicator, slots: Sequence[Slot], changed: int, is_hooked: bool) -> None:
    """Raise where not all ranks have changed, or not in the same way.

    Raises:
        CollectiveMismatch: it names the parameter and the ranks.
        UsageError: a communication hook runs, or the parameters are again what they were.
    """
    if changed == comm.size or not is_hooked:
        start.compare(comm, "parameters", [(slot.name, slot.parameter) for slot in slots])
    if changed != comm.size:
        raise UsageError(
            f"parameters of the DistributedDataParallel on '{comm.name}' were frozen or thawed on {changed} of "
            f"{comm.size} ranks; set requires_grad to the same on all ranks, between the same steps"
        )


def average_left(comm: Communicator, slots: Sequence[Slot], divisor: float, is_absent: bool) -> None:
    """Average gradients of no_sync() whose parameters were frozen since: they are in no bucket any more.

    Args:
        slots: those of which some rank has one.
        is_absent: this rank takes part with nothing.
    """
    for slot in slots:
        if slot.is_sparse:
            sparse.average(comm, slot, divisor, is_absent)
            continue
        gradient = None if is_absent else slot.parameter.grad
        if gradient is None:
            mean = torch.zeros_like(slot.parameter, memory_format=torch.contiguous_format)
        else:
            mean = gradient.clone(memory_format=torch.contiguous_format)
        finish(comm.all_reduce(mean, op=premul_sum(1 / divisor)))
        if gradient is not None:
            gradient.copy_(mean)
        elif not is_absent:
            slot.parameter.grad = mean
