"""Outputs: where backward enters the module, found in whatever its forward returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
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

    def enter_once(handles: list[Any], gradient: Tensor) -> None:
        handles.pop().remove()
        entered()

    is_watched = False
    for tensor in tensors_in(output):
        if not tensor.requires_grad:
            continue
        is_watched = True
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(lambda gradients: entered())
            continue

        # A leaf of the user's: the hook must not stay on it.
        handles: list[Any] = []
        hook = partial(enter_once, handles)
        handles.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]  # torch's stub
    return is_watched
