"""Slot: what the reducer knows of one parameter."""

from __future__ import annotations

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
    """

    __slots__ = ("bucket", "due", "fired", "handle", "index", "is_large", "is_sparse", "name", "parameter",
                 "view")  # fmt: skip

    def __init__(self, index: int, name: str, parameter: Parameter, is_sparse: bool) -> None:
        self.index = index
        self.name = name
        self.parameter = parameter
        self.is_sparse = is_sparse
        self.bucket: Bucket | None = None
        self.view: Tensor | None = None
        self.handle: RemovableHandle | None = None
        self.fired = 0
        self.due = 1
        self.is_large = False

    def has_later_hooks(self) -> bool:
        """Whether hooks have been registered on the parameter after this one's, and so would run after it."""
        hooks = self.parameter._post_accumulate_grad_hooks
        return bool(self.handle is not None and next(reversed(hooks)) != self.handle.id)

    def has_other_hooks(self) -> bool:
        """Whether hooks besides this one's run where the gradient is complete."""
        return len(self.parameter._post_accumulate_grad_hooks) > 1

    def __repr__(self) -> str:
        return f"<Slot {self.index} {self.name}>"
