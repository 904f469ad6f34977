"""Bucket: memory in which the gradients of several parameters travel as one message.

Gradients enter by a copy that divides by the number of ranks on the way; large
ones as soon as they are there, small ones together when the bucket starts,
because a call into torch costs more than copying them. Then `parameter.grad` is
the place in the bucket, and the result needs no copy.

To communication hooks it looks like torch's GradBucket, which has no constructor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from mpdist.errors import UsageError
from mpdist.memory import premul_sum
from mpdist.memory.buffer import TORCH_DEVICES
from mpdist.torch import devices

if TYPE_CHECKING:
    from mpdist.comm import Communicator
    from mpdist.progress import Work
    from mpdist.torch.data_parallel.slot import Slot

# From this number of elements on a gradient is copied by its own hook, while it is in the cache; on a device one call
# copies all.
LARGE_COUNT = 32 * 1024

# Gradients begin on cache lines.
ALIGNED_BYTES = 64

HALF_TYPES = (torch.float16, torch.bfloat16)


class Bucket:
    """Gradients that travel together.

    Attributes:
        slots: in the order in which they became ready in the first step.
        flat: the whole message: the gradients, then `tail` further elements.
        missing: gradients that are not there yet in this step.
        work: the reduction, once it has started.
        scale: gradients are multiplied with it on their way here.
        op: by which this step reduces it.
        late: small gradients that are there, and go to their places when it starts.
        future: what a communication hook returned.
        started_at, done_at: `perf_counter()` of its message in this step.
    """

    # `parameter.grad` is a place in here after backward, so one that is computed there need not be copied.
    keeps_gradients = True

    @torch.enable_grad()  # a view made without is one that nobody may write with
    def __init__(self, slots: Sequence[Slot], starts: Sequence[int], flat: Tensor) -> None:
        """Take memory for gradients that begin at these elements, the last of which is their end; see `starts_of`."""
        self.slots = list(slots)
        self.flat = flat
        self.dtype = flat.dtype
        # A hook may resize what it gets (batched PowerSGD does), which a part of something larger can't.
        self._gradients = flat if flat.numel() == starts[-1] else flat[: starts[-1]]
        self._hooks_own: Tensor | None = None  # what the hook has put in its place
        self.tail = self.flat[starts[-1] :]
        self._starts = starts
        self._views = [view_of(flat, start, slot.parameter) for slot, start in zip(slots, starts, strict=False)]
        self._places = [view.data_ptr() for view in self._views]
        with torch.no_grad():
            for slot, (start, end) in zip(self.slots, pairwise(starts), strict=True):
                flat[start + slot.parameter.numel() : end].zero_()  # what lies in the place may be a gradient
        for slot, view in zip(self.slots, self._views, strict=True):
            slot.bucket = self
            slot.view = view
            slot.is_large = is_large(slot.parameter)
        self.nbytes = self.flat.numel() * self.flat.itemsize
        self.missing = len(self.slots)
        self.work: Work[Any] | None = None
        self.future: torch.futures.Future[Any] | None = None
        self.started_at = self.done_at = 0.0
        self.scale = 1.0
        self.op: Any = "sum"
        self.late: list[Slot] = []
        self._index, self._is_last = 0, False

    # ------------------------------------------------------------------ a step

    def begin(self, divisor: float, size: int, is_hooked: bool) -> None:
        """Be empty for a new step, whose sum is to be divided."""
        self._return_views()
        self.missing = len(self.slots)
        self.work = self.future = self._hooks_own = None
        self.started_at = self.done_at = 0.0
        self.late.clear()
        self.scale = 1.0
        self.op = "sum"
        if is_hooked:  # the hook divides
            return
        # Halves are summed in float32: dividing first would cost digits. On a device what sums divides, too.
        if self.dtype in HALF_TYPES or not self.flat.is_cpu:
            self.op = "avg" if divisor == size else premul_sum(1 / divisor)
        else:
            self.scale = 1 / divisor

    def _return_views(self) -> None:
        """`p.grad.data = ...`, which modules do when they are converted, takes a view to other memory."""
        if list(map(Tensor.data_ptr, self._views)) == self._places:
            return
        for position, (slot, place) in enumerate(zip(self.slots, self._places, strict=True)):
            if self._views[position].data_ptr() == place:
                continue
            with torch.enable_grad():
                view = view_of(self.flat, self._starts[position], slot.parameter)
            # Where a hook has resized the memory the place is a new one.
            self._views[position], self._places[position] = view, view.data_ptr()
            # Buckets of before, too, take part in a change of them, and their slots have other views.
            if slot.bucket is self:
                slot.view = view

    def enter(self, slot: Slot) -> None:
        """The gradient is complete: a large one goes to its place now, a small one with the others."""
        self.missing -= 1
        if not slot.is_large:
            self.late.append(slot)
            return
        parameter, view = slot.parameter, cast(Tensor, slot.view)
        gradient = parameter.grad
        if gradient is view:  # autograd has added to it in its place
            if self.scale != 1.0:
                view.mul_(self.scale)
            return
        if gradient is None:
            self._enter_undefined(slot)
            return
        if gradient.layout is not torch.strided:
            raise _explained(slot)
        if slot.is_placed:
            self._enter_placed(slot, gradient)
            return
        if self.scale != 1.0:
            torch.mul(gradient, self.scale, out=view)
        else:
            view.copy_(gradient)
        parameter.grad = view

    def _enter_placed(self, slot: Slot, gradient: Tensor) -> None:
        """It lies in its place, scaled, or autograd has made `gradient` of that and of what else uses the parameter.

        So that is scale * a + b, where scale * a is in the place, and scale * (a + b) is to be there.
        """
        view = cast(Tensor, slot.view)
        if gradient.data_ptr() != view.data_ptr():
            slot.is_mixed = True
            if self.scale == 1.0:
                view.copy_(gradient)
            else:
                view.mul_(1 - self.scale).add_(gradient, alpha=self.scale)
        slot.parameter.grad = view

    def enter_nothing(self, slot: Slot) -> None:
        """The parameter has no gradient on this rank."""
        self.missing -= 1
        cast(Tensor, slot.view).zero_()

    def _enter_undefined(self, slot: Slot) -> None:
        """A function's backward gave None for the parameter, which is zero; raises where somebody took it away."""
        if slot.has_other_hooks():
            raise _explained(slot)
        cast(Tensor, slot.view).zero_()
        slot.parameter.grad = slot.view

    def _enter_late(self) -> None:
        """Copy the small gradients; those that lie there already are copied onto themselves."""
        late = self.late
        if not late:
            return
        views: list[Any] = [slot.view for slot in late]
        parameters = [slot.parameter for slot in late]
        gradients = [parameter.grad for parameter in parameters]
        try:
            torch._foreach_copy_(views, cast("list[Tensor]", gradients))
        except (RuntimeError, TypeError) as error:
            for slot, gradient in zip(late, gradients, strict=True):
                if gradient is not None and gradient.layout is not torch.strided:
                    raise _explained(slot) from error
            undefined = [slot for slot, gradient in zip(late, gradients, strict=True) if gradient is None]
            if not undefined:
                raise
            for slot in undefined:
                self._enter_undefined(slot)
            self._enter_late()
            return
        if self.scale != 1.0:
            if len(late) == len(self.slots):
                self._gradients.mul_(self.scale)
            else:
                torch._foreach_mul_(views, self.scale)
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view
        late.clear()

    def start(self, comm: Communicator) -> None:
        """Post the reduction."""
        self._enter_late()
        self.started_at = perf_counter()
        self.work = comm.all_reduce(self.flat, op=self.op)

    def start_hook(self, hook: Any, state: object) -> None:
        """Let a communication hook reduce it."""
        self._enter_late()
        self.started_at = perf_counter()
        self.future = hook(state, self)

    def note_end(self, work: Work[Any] | None = None) -> None:
        """Its message is over; whoever found that may come to tell only in a later step, where it does not count."""
        if work is None or work is self.work:
            self.done_at = perf_counter()

    def take(self, result: Any) -> None:
        """Copy the result of a hook into its place, if it is elsewhere."""
        self._hooks_own = None
        if isinstance(result, list | tuple):
            result = result[0]
        if result.data_ptr() != self._gradients.data_ptr():
            self._gradients.copy_(result.reshape(-1))

    def leave(self) -> None:
        """All is averaged: the gradients are in their places already."""

    def give(self, slot: Slot) -> None:
        """The mean goes to a parameter that has no gradient here."""
        slot.parameter.grad = slot.view

    # ------------------------------------------------------------------ as torch's GradBucket

    def number(self, index: int, is_last: bool) -> None:
        """Its place in the order of buckets."""
        self._index, self._is_last = index, is_last

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> Tensor:
        return self._gradients if self._hooks_own is None else self._hooks_own

    def set_buffer(self, buffer: Tensor) -> None:
        self._hooks_own = buffer

    def gradients(self) -> list[Tensor]:
        own = self._hooks_own
        if own is None:
            return list(self._views)
        return [view_of(own, start, slot.parameter) for slot, start in zip(self.slots, self._starts, strict=False)]

    def parameters(self) -> list[Tensor]:
        return [slot.parameter for slot in self.slots]

    def __repr__(self) -> str:
        state = "not started" if not self.started_at else "started"
        return f"<Bucket {self._index} of {len(self.slots)} gradients, {self.nbytes} bytes, {state}>"


def is_large(parameter: Tensor) -> bool:
    """Whether its gradient goes to its place as soon as it is there."""
    return parameter.is_cpu and parameter.numel() >= LARGE_COUNT


def starts_of(slots: Sequence[Slot]) -> list[int]:
    """The element at which each gradient of a bucket begins, and where the last one ends."""
    dtype = slots[0].parameter.dtype
    starts = [0]
    for slot in slots:
        starts.append(aligned(starts[-1] + slot.parameter.numel(), dtype))
    return starts


def aligned(count: int, dtype: torch.dtype) -> int:
    """So many elements, up to where the next gradient may begin."""
    unit = ALIGNED_BYTES // dtype.itemsize
    return -(-count // unit) * unit


@torch.enable_grad()  # as the views in it
def rooms(comm: Communicator, wanted: Sequence[tuple[int, torch.dtype]], device: torch.device) -> list[Tensor]:
    """Memory of so many elements for each bucket.

    On the CPU that of all buckets of a type is one array, for small ones lie on huge pages only together.
    """
    if device.type != "cpu":
        return [empty(comm, count, dtype, device) for count, dtype in wanted]
    ends: dict[torch.dtype, int] = {}
    spans = []
    for count, dtype in wanted:
        start = aligned(ends.get(dtype, 0), dtype)
        ends[dtype] = start + count
        spans.append((dtype, start, count))
    whole = {dtype: empty(comm, count, dtype, device) for dtype, count in ends.items()}
    return [whole[dtype][start : start + count] for dtype, start, count in spans]


def empty(comm: Communicator, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 1-D tensor in memory that communicates best."""
    element = np.dtype(np.int16 if dtype is torch.bfloat16 else str(dtype).removeprefix("torch."))
    if device.type == "cpu":
        return torch.from_numpy(comm.empty(count, element)).view(dtype)
    array = comm._exported(TORCH_DEVICES[device.type](device.index or 0), [count], element)
    if array is None:  # then memory whose use torch knows is better
        return torch.empty(count, dtype=dtype, device=device)
    return devices.tensor_of(array).view(dtype)


def _explained(slot: Slot) -> UsageError:
    """Why a gradient cannot be averaged."""
    if slot.parameter.grad is None:
        return UsageError(
            f"the gradient of {slot.name} was taken away before it was averaged, by a hook or in another thread; "
            "do that after backward"
        )
    return UsageError(
        f"the gradient of {slot.name} is sparse, which is averaged for the weights of embeddings with sparse=True "
        "only; make it dense, or sum it yourself"
    )


def view_of(flat: Tensor, start: int, parameter: Tensor) -> Tensor:
    """A part of the bucket in the shape and, where they have no holes, with the strides of the parameter."""
    part = flat[start : start + parameter.numel()]
    if _is_dense(parameter):
        return part.as_strided(parameter.size(), parameter.stride())
    return part.view(parameter.size())


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a piece of memory, in whatever order of axes."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
