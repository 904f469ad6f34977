"""Outputs: where backward enters the module, found in whatever its forward returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors_in(output: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, dicts, dataclasses and plain objects of one level."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, list | tuple | set | frozenset):
        for value in output:
            yield from tensors_in(value)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield from tensors_in(getattr(output, field.name, None))
    else:
        for value in getattr(output, "__dict__", {}).values():
            if isinstance(value, Tensor):
                yield value


def watch(output: Any, entered: Callable[[], object]) -> bool:
    """Call `entered()` when a backward enters by one of the output's tensors; False if none can.

    Nothing of the output is changed: the node that made the tensor is watched, so that it may be modified in place.
    """
    is_watched = False
    for tensor in tensors_in(output):
        if not tensor.requires_grad:
            continue
        is_watched = True
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(lambda gradients: entered())
        else:
            _watch_leaf(tensor, entered)
    return is_watched


def _watch_leaf(tensor: Tensor, entered: Callable[[], object]) -> None:
    """The same for a leaf of the user's, once: no hook must stay on it, and autograd.grad() does not run this one."""
    hooks: dict[int, Any] = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
    if any(isinstance(hook, LeafEntry) and hook.entered == entered for hook in hooks.values()):
        return
    hook = LeafEntry(entered)
    hook.handle = tensor.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's stub


class LeafEntry:
    """A hook that takes itself away when it runs."""

    def __init__(self, entered: Callable[[], object]) -> None:
        self.entered = entered
        self.handle: Any = None

    def __call__(self, tensor: Tensor) -> None:
        self.handle.remove()
        self.entered()
