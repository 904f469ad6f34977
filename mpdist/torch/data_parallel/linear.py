"""Linear: layers whose backward computes the weight's gradient in its place in the bucket.

Else autograd puts each gradient into memory of its own, from which it is copied: for a layer that has many weights and
gets few rows, that costs as much as to compute it. So, while a forward of the wrapper runs, `forward` of each large
`torch.nn.Linear` is one that makes a node of our own in the graph, whose backward writes where the gradient is to be,
divided as the bucket's others are. Autograd takes what it returns for `parameter.grad`, as it does with any fresh
gradient that nothing else is added to.

Where anything is not as usual (transforms, modes, autocast, hooks that would see the gradient, checkpoints, which
count what a forward saves, a compiler), forward is that of `torch.nn.Linear`. Whether the place is free is known in
backward only: where it is not, this node, too, returns a gradient in memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Linear
from torch.nn.functional import linear

from mpdist.torch.compiling import is_compiled, is_tracing_calls, leave_alone
from mpdist.torch.data_parallel import running
from mpdist.torch.data_parallel.ending import current_task, is_in_backward, is_whole_backward

if TYPE_CHECKING:
    from mpdist.torch.data_parallel.bucket import Bucket
    from mpdist.torch.data_parallel.reducer import Reducer
    from mpdist.torch.data_parallel.slot import Slot

# From this number of weights on a copy costs more than a node in Python.
PLACED_COUNT = 64 * 1024

# Older versions of torch cannot tell whether hooks see what a forward saves: there it is always that of torch.nn.
_saving_hooks: Callable[[bool], object] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


class Linears:
    """The large linear layers of a wrapped module; `with linears:` around a forward whose backward averages."""

    def __init__(self, module: torch.nn.Module, reducer: Reducer) -> None:
        self._module = module
        self._reducer = reducer
        self._buckets: list[Bucket] | None = None
        self._forwards: list[tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = []

    @leave_alone
    def __enter__(self) -> None:
        if self._buckets is not self._reducer.buckets:
            self._buckets = self._reducer.buckets
            self._forwards = list(self._made())
        if not self._forwards or not torch.is_grad_enabled() or is_in_backward() or is_tracing_calls():
            return
        for attributes, forward in self._forwards:
            attributes.setdefault("forward", forward)

    @leave_alone
    def __exit__(self, *_: object) -> None:
        for attributes, forward in self._forwards:
            if attributes.get("forward") is forward:
                del attributes["forward"]

    def _made(self) -> Iterator[tuple[dict[str, Any], Callable[[Tensor], Tensor]]]:
        """For each layer its attributes, and what is to be `forward` among them."""
        places = [slot for bucket in self._buckets or () if bucket.keeps_gradients for slot in bucket.slots]
        large = {slot.parameter: slot for slot in places if slot.is_large and slot.parameter.numel() >= PLACED_COUNT}
        if not large or _saving_hooks is None:
            return
        for layer in dict.fromkeys(_of_this_type(self._module)):
            slot = large.get(cast(torch.nn.Parameter, layer._parameters.get("weight")))
            if slot is not None and slot.parameter.is_floating_point() and slot.parameter.is_contiguous():
                yield layer.__dict__, _forward_of(layer, slot, self._reducer)


def _of_this_type(module: torch.nn.Module) -> Iterator[Linear]:
    """The linear layers in a module that run as torch has them: not derived ones, and nothing that is compiled."""
    if is_compiled(module):
        return
    if type(module) is Linear:
        yield module
    for child in module.children():
        yield from _of_this_type(child)


def _forward_of(layer: Linear, slot: Slot, reducer: Reducer) -> Callable[[Tensor], Tensor]:
    """What is called in place of the layer's forward."""

    def forward(input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or layer.weight is not slot.parameter or not _is_usual(input, slot.parameter):
            return Linear.forward(layer, input)
        apply = cast(Callable[..., Tensor], _PlacedLinear.apply)
        return apply(input, layer.weight, layer.bias, slot, reducer)

    return forward


def _is_usual(input: Tensor, weight: Tensor) -> bool:
    """Whether a node in Python does here what torch's own does."""
    return (
        type(input) is Tensor
        and input.dtype is weight.dtype
        and input.layout is torch.strided
        and input.is_cpu
        and not input.is_nested
        and weight.requires_grad
        and torch.is_grad_enabled()
        and torch.nn.functional.linear is linear
        and _saving_hooks is not None
        and _saving_hooks(True) is None
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._is_tracing()
        and forward_ad._current_level < 0
    )


class _PlacedLinear(torch.autograd.Function):
    """`torch.nn.functional.linear`, whose backward puts the weight's gradient into its place, where that is free."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, slot: Slot, reducer: Reducer) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, weight if ctx.needs_input_grad[0] else None)
        ctx.slot, ctx.reducer = slot, reducer
        return linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None, None
        input, weight = ctx.saved_tensors
        is_whole = is_whole_backward()
        of_input, of_weight, of_bias = (
            needed and (is_whole or _is_asked_for(ctx.next_functions[index][0]))
            for index, needed in enumerate(ctx.needs_input_grad[:3])
        )
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            gradient @ weight if of_input else None,
            _of_weight(rows.t(), input.reshape(-1, input.shape[-1]), ctx.slot, ctx.reducer) if of_weight else None,
            rows.sum(0) if of_bias else None,
            None,
            None,
        )


def _is_asked_for(node: Any) -> bool:
    """Whether a backward for some tensors only comes to this node, or returns what would come there."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch does not tell of a leaf that autograd.grad() was asked for, which it is then
        return True


def _of_weight(columns: Tensor, input: Tensor, slot: Slot, reducer: Reducer) -> Tensor:
    """The gradient of the weight, in its place if that is free."""
    bucket = slot.bucket
    if bucket is None or not _is_free(slot, reducer):
        return columns.mm(input)
    slot.is_placed = True
    # Another tensor than the slot's, which nobody else knows: one that others know autograd would copy.
    place = cast(Tensor, slot.view).detach()
    if bucket.scale == 1.0:
        return torch.mm(columns, input, out=place)
    return torch.addmm(place, columns, input, beta=0, alpha=bucket.scale, out=place)


def _is_free(slot: Slot, reducer: Reducer) -> bool:
    """Whether this backward averages, nothing is or will be in the gradient's place, and nobody sees it before us."""
    parameter = slot.parameter
    return (
        running.task_of(reducer) == current_task()
        and parameter.grad is None
        and not (slot.is_placed or slot.is_mixed or slot.fired)
        and slot.due == 1
        and not torch.is_grad_enabled()
        and not parameter._backward_hooks
        and not slot.has_other_hooks()
    )
