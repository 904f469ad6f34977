"""Aside: a rank's own gradients, while it takes part in steps of others without inputs of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpdist.torch.data_parallel.slot import Slot


class Aside:
    """What the gradients were when it was made; their tensors get the means of the others meanwhile."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        gradients = [(slot.parameter, slot.parameter.grad) for slot in slots]
        self._kept = [(parameter, each, None if each is None else each.clone()) for parameter, each in gradients]

    @torch.no_grad()
    def put_back(self) -> None:
        """Each parameter has the gradient that it had, or none."""
        for parameter, gradient, values in self._kept:
            if gradient is not None and values is not None:
                gradient.copy_(values)
            parameter.grad = gradient
