"""Own gradients: the parameters keep tensors of their own, as torch's class has it without gradient_as_bucket_view.

The result is copied from the bucket into the tensor that was `parameter.grad`, so that one that the user has made or
kept holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from mpdist.torch.data_parallel.bucket import Bucket

if TYPE_CHECKING:
    from mpdist.torch.data_parallel.slot import Slot


class PassingBucket(Bucket):
    """A bucket that gradients only pass through."""

    keeps_gradients = False

    def __init__(self, slots: Sequence[Slot], starts: Sequence[int], flat: Tensor) -> None:
        super().__init__(slots, starts, flat)
        self._own: list[Tensor] = []
        self._passed: list[Tensor] = []

    def begin(self, divisor: float, size: int, is_hooked: bool) -> None:
        super().begin(divisor, size, is_hooked)
        self._own.clear()
        self._passed.clear()

    def enter(self, slot: Slot) -> None:
        gradient = slot.parameter.grad
        super().enter(slot)
        if slot.is_large:
            self._keep(slot, gradient)

    def _enter_late(self) -> None:
        gradients = [(slot, slot.parameter.grad) for slot in self.late]
        super()._enter_late()
        for slot, gradient in gradients:
            self._keep(slot, gradient)

    def _keep(self, slot: Slot, gradient: Tensor | None) -> None:
        view = cast(Tensor, slot.view)
        slot.parameter.grad = own = torch.empty_like(view) if gradient is None else gradient
        self._own.append(own)
        self._passed.append(view)

    def leave(self) -> None:
        if self._own:
            torch._foreach_copy_(self._own, self._passed)

    def give(self, slot: Slot) -> None:
        slot.parameter.grad = cast(Tensor, slot.view).clone()
