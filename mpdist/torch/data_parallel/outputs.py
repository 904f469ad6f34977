"""Outputs: where backward enters the module, found in whatever its forward returned."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpdist.torch.compiling import leave_alone

# What holds no tensor.
PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, type, Enum, np.generic, np.ndarray, torch.dtype,
               torch.device)  # fmt: skip

# What may hold tensors where attributes don't show them; a module holds many that are no output.
CLOSED_TYPES = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial, torch.nn.Module)

# The attributes of so many objects are looked at: some lead to half of the program.
LOOKED_AT = 1000


# Under this a node of the graph keeps what is called when backward enters by it.
WATCHERS = "mpdist_watchers"


class Entrance(Enum):
    """Where backward enters."""

    WATCHED = "by a tensor of the output, which is watched"
    NONE = "nowhere: nothing in the output requires grad"
    UNKNOWN = "the output has parts that cannot be looked into"


class Search:
    """The tensors in an output: in nested containers, dataclasses and attributes of objects.

    Attributes:
        is_complete: nothing was met that may hold tensors out of sight.
    """

    def __init__(self, output: Any) -> None:
        self.is_complete = True
        self._output = output
        self._seen: dict[int, Any] = {}
        self._looked_at = 0

    def __iter__(self) -> Iterator[Tensor]:
        stack = [iter((self._output,))]
        while stack:
            for value in stack[-1]:
                if isinstance(value, Tensor):
                    yield value
                elif not isinstance(value, PLAIN_TYPES) and id(value) not in self._seen:
                    self._seen[id(value)] = value  # kept: else another one may get its id
                    stack.append(iter(self._inside(value)))
                    break
            else:
                stack.pop()

    def _inside(self, value: Any) -> Iterable[Any]:
        if isinstance(value, Mapping):
            return value.values()
        if isinstance(value, list | tuple | set | frozenset | deque):
            return value
        if is_dataclass(value):
            return [getattr(value, field.name, None) for field in fields(value)]
        self._looked_at += 1
        attributes = None if isinstance(value, CLOSED_TYPES) else getattr(value, "__dict__", None)
        if attributes is None or self._looked_at > LOOKED_AT:
            self.is_complete = False
            return ()
        return list(attributes.values())


def tensors_in(output: Any) -> Iterator[Tensor]:
    """All tensors that can be found in it."""
    return iter(Search(output))


def watch(output: Any, entered: Callable[[], object]) -> Entrance:
    """Call `entered()` when a backward enters by one of the output's tensors.

    Nothing of the output is changed: the node that made the tensor is watched, so that it may be modified in place.
    """
    search = Search(output)
    entrance = Entrance.NONE
    for tensor in search:
        if not tensor.requires_grad:
            continue
        entrance = Entrance.WATCHED
        if tensor.grad_fn is None:
            _watch_leaf(tensor, entered)
            continue
        _watch_node(tensor.grad_fn, entered)
        # A view that is changed in place gets another node, and backward comes to that of its base.
        base = tensor._base if tensor._is_view() else None
        if base is not None and base.grad_fn is not None:
            _watch_node(base.grad_fn, entered)
    return entrance if search.is_complete or entrance is Entrance.WATCHED else Entrance.UNKNOWN


def _watch_node(node: Any, entered: Callable[[], object]) -> None:
    """Once: a module may return a tensor of a graph that it keeps, in each forward."""
    watchers = node.metadata.setdefault(WATCHERS, [])
    if entered in watchers:
        return
    watchers.append(entered)
    node.register_prehook(lambda gradients: entered())


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

    @leave_alone
    def __call__(self, tensor: Tensor) -> None:
        self.handle.remove()
        self.entered()
