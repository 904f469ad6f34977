"""Slot: what the reducer knows of one parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.utils.hooks import RemovableHandle

    from mpdist.torch.data_parallel.bucket import Bucket


class Slot:
    """A parameter whose gradient is averaged.

    Attributes:
        index: its number among all of them, the same on all ranks.
        bucket: where its gradient travels; None before the first step, and where it is sparse.
        view: its part of the bucket, in the parameter's shape; `parameter.grad` between two steps.
        fired: how often its hook ran in this backward.
        due: how often it runs until the gradient is complete.
        is_sparse: it has sparse gradients.
        is_large: its gradient goes to its place as soon as it is there.
        is_placed: in this backward a linear layer has computed its gradient in its place.
        is_mixed: once autograd did not leave one in its place, so none is computed there any more.
        handle: of its hook; None where none is registered.
    """

    __slots__ = ("_implementation", "bucket", "due", "fired", "handle", "index", "is_large", "is_mixed", "is_placed",
                 "is_sparse", "name", "parameter", "view")  # fmt: skip

    def __init__(self, index: int, name: str, parameter: Parameter, is_sparse: bool) -> None:
        self.index = index
        self.name = name
        self.parameter = parameter
        self.is_sparse = is_sparse
        self.bucket: Bucket | None = None
        self.view: Tensor | None = None
        self.handle: RemovableHandle | None = None
        self._implementation = 0
        self.fired = 0
        self.due = 1
        self.is_large = self.is_placed = self.is_mixed = False

    def register(self, hook: Callable[[Tensor], None]) -> None:
        """Have it called when the gradient is complete."""
        hooks = self.parameter._post_accumulate_grad_hooks
        if hooks is not None:  # torch knows of them no more if the tensor was swapped
            self.parameter._post_accumulate_grad_hooks = hooks
        self.handle = self.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._implementation = self.parameter._cdata

    def unregister(self) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    def was_swapped(self) -> bool:
        """Whether the tensor has become another one since, as by torch.utils.swap_tensors(), and lost its hook."""
        return self.handle is not None and self.parameter._cdata != self._implementation

    def has_later_hooks(self) -> bool:
        """Whether hooks have been registered on the parameter after this one's, and so would run after it."""
        hooks = self.parameter._post_accumulate_grad_hooks
        return bool(self.handle is not None and next(reversed(hooks)) != self.handle.id)

    def has_other_hooks(self) -> bool:
        """Whether hooks besides this one's run where the gradient is complete."""
        return has_other_hooks(self.parameter)

    def __repr__(self) -> str:
        return f"<Slot {self.index} {self.name}>"


def has_other_hooks(parameter: Tensor) -> bool:
    """Whether hooks besides the one of a slot run where the gradient of a parameter is complete."""
    return len(parameter._post_accumulate_grad_hooks or ()) > 1
