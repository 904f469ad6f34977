"""First: where the gradients of a first backward go, which comes before there are buckets.

Buckets are made from the order in which gradients come. If each stayed in memory of its own until then, a first
backward would need more memory than any after it. So large ones go at once to where they will be, should the ranks
agree on the order that this one sees, as they mostly do: then the buckets are made around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpdist.torch.data_parallel.bucket import aligned, empty, is_large, view_of
from mpdist.torch.data_parallel.notes import Notes

if TYPE_CHECKING:
    from mpdist.comm import Communicator
    from mpdist.torch.data_parallel.reducer import Reducer
    from mpdist.torch.data_parallel.slot import Slot


def places(reducer: Reducer) -> First | None:
    """Places for its gradients; None where they don't stay in buckets, or these are on a device."""
    if reducer.hook is None and reducer.streams is None and reducer.bucket_type.keeps_gradients:
        return First(reducer.comm, reducer.slots)
    return None


class First:
    """Places for the gradients of these slots, which are on the CPU, in the order in which they come."""

    def __init__(self, comm: Communicator, slots: Sequence[Slot]) -> None:
        self._comm = comm
        self._slots = slots
        self._whole: dict[torch.dtype, Tensor] = {}
        self._ends: dict[torch.dtype, int] = {}
        self._places: dict[Slot, tuple[int, tuple[int, ...]]] = {}  # where they begin, and their strides

    @torch.no_grad()
    def take(self, slot: Slot) -> None:
        """A gradient has come; it may come in several parts."""
        parameter, gradient = slot.parameter, slot.parameter.grad
        if slot.is_sparse or slot in self._places:
            return
        start = self._ends.get(parameter.dtype, 0)
        self._places[slot] = start, parameter.stride()
        self._ends[parameter.dtype] = aligned(start + parameter.numel(), parameter.dtype)
        if gradient is None or gradient.layout is not torch.strided or not is_large(parameter):
            return
        with torch.enable_grad():  # as the places in buckets
            place = view_of(self._memory(parameter.dtype), start, parameter)
        place.copy_(gradient)
        parameter.grad = place

    def rooms(
        self,
        wanted: Sequence[tuple[int, torch.dtype]],
        members: Sequence[Sequence[Slot]],
        starts: Sequence[Sequence[int]],
    ) -> list[Tensor] | None:
        """Memory for buckets in which what has come lies in its place; None if they are others than these.

        Args:
            wanted, members, starts: of each bucket its elements and their type, and where which gradient is in it.
        """
        ends: dict[torch.dtype, int] = {}
        begins = []
        for (count, dtype), slots, places in zip(wanted, members, starts, strict=True):
            begin = ends.get(dtype, 0)
            ends[dtype] = begin + count
            begins.append(begin)
            for slot, place in zip(slots, places, strict=False):
                expected = begin + place, slot.parameter.stride()
                if self._places.get(slot, expected) != expected:
                    return None
        return [
            self._memory(dtype)[begin : begin + count] for begin, (count, dtype) in zip(begins, wanted, strict=True)
        ]

    def _memory(self, dtype: torch.dtype) -> Tensor:
        """Of all gradients of a type, and what else the last bucket may hold."""
        whole = self._whole.get(dtype)
        if whole is None:
            dense = [slot.parameter for slot in self._slots if not slot.is_sparse]
            counts = [parameter.numel() for parameter in dense if parameter.dtype is dtype]
            count = sum(aligned(count, dtype) for count in counts) + Notes.length(len(self._slots), self._comm.size)
            with torch.enable_grad():
                self._whole[dtype] = whole = empty(self._comm, count, dtype, torch.device("cpu"))
        return whole
