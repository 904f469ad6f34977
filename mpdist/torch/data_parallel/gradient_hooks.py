"""Gradient hooks: by which each parameter that is trained tells that its gradient is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import TypeAlias

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from mpdist.torch.data_parallel.slot import Slot

Ready: TypeAlias = Callable[[Slot, Tensor], None]

# Whether it is trained, which tensor it is (torch.utils.swap_tensors() makes it another one), and of which type. One
# after the other for all parameters takes less than a tuple for each.
_STATE = [attrgetter(name) for name in ("requires_grad", "_cdata", "dtype")]


class GradientHooks:
    """The hooks of these parameters, which run after those of the program; none are there before `follow`.

    What they call, with the slot of the parameter, is known to them alone: without them it is not kept.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._parameters = [slot.parameter for slot in slots]
        self._known: list[object] = []
        # torch numbers the hooks of a process; those up to this one run before ours.
        self._seen = -1

    def have_news(self) -> bool:
        """Whether one of the parameters has changed since this was last asked, or it never was; see `_STATE`."""
        state: list[object] = [list(map(read, self._parameters)) for read in _STATE]
        if state == self._known:
            return False
        self._known = state
        return True

    def follow(self, ready: Ready) -> bool:
        """See to it that each parameter with `requires_grad` has one, and no other; whether that was not so."""
        has_changed = False
        for slot in self._slots:
            is_trained = slot.parameter.requires_grad
            if is_trained is not (slot.handle is not None) or slot.was_swapped():
                has_changed = True
                slot.unregister()
                if is_trained:
                    slot.register(partial(ready, slot))
        return has_changed

    def be_last(self, ready: Ready) -> None:
        """Hooks of the program, which may change gradients, run before ours."""
        if self._seen == RemovableHandle.next_id:
            return
        for slot in self._slots:
            if slot.handle is not None and slot.has_later_hooks():
                slot.unregister()
                slot.register(partial(ready, slot))
        self._seen = RemovableHandle.next_id

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Hooks that are made within are of no parameter."""
        has_seen_all = self._seen == RemovableHandle.next_id
        yield
        if has_seen_all:
            self._seen = RemovableHandle.next_id

    def remove(self) -> None:
        self._known.clear()
        for slot in self._slots:
            slot.unregister()
