"""Linear: layers whose backward computes the weight's gradient in its place in the bucket.

Else autograd puts each gradient into memory of its own, from which it is copied: for a layer that has many weights and
gets few rows, that costs as much as to compute it. So, while a forward of the wrapper runs, each large
`torch.nn.Linear` is of a class whose forward makes a node of our own in the graph. The node's backward writes where the
gradient is to be, multiplied as the bucket's others are, and autograd takes that for `parameter.grad`, as it does with
any fresh gradient that nothing else is added to.

Where anything is not as usual (transforms, modes, autocast, checkpoints, which count what a forward saves, a compiler),
forward is torch's. Whether the place is free, and no hook of the program would see what is there, is known in backward
only: where it is not, the node returns a gradient in memory of its own. Hooks on nodes of the graph cannot be seen:
those of AccumulateGrad get a gradient that is divided already, and must not change a weight where a thread drives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Linear, Parameter

from mpdist.torch.compiling import is_compiled, is_tracing_calls, leave_alone
from mpdist.torch.data_parallel import running
from mpdist.torch.data_parallel.ending import current_task, is_in_backward, is_whole_backward
from mpdist.torch.data_parallel.slot import has_other_hooks

if TYPE_CHECKING:
    from mpdist.torch.data_parallel.bucket import Bucket
    from mpdist.torch.data_parallel.reducer import Reducer
    from mpdist.torch.data_parallel.slot import Slot

# From this number of weights on a copy costs more than a node in Python, which reads some 100 us of cold code in each
# direction; where a thread has the gradient under way meanwhile, it is worth that from a smaller one on.
PLACED_COUNT = 512 * 1024
EARLY_COUNT = 64 * 1024

_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = torch._C._nn.linear
_forward = Linear.forward
# Older versions of torch cannot tell whether hooks see what a forward saves: there forward is always torch's.
_saving_hooks: Callable[[bool], object] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)

# The parameters of the forwards that run, by id: whose places they have.
_places: dict[int, tuple[Slot, Reducer]] = {}


class Linears:
    """The large linear layers of a wrapped module; `with linears:` around a forward whose backward averages."""

    def __init__(self, module: torch.nn.Module, reducer: Reducer) -> None:
        self._module = module
        self._reducer = reducer
        # Of the buckets of which it knows the layers. They are not kept: they may be made anew, and go.
        self._first: Callable[[], Bucket | None] = lambda: None
        self._layers: list[tuple[Linear, Slot]] = []

    @leave_alone
    def __enter__(self) -> None:
        buckets = self._reducer.buckets
        if self._first() is not (buckets[0] if buckets else None):
            self.__exit__()
            self._layers = list(self._found(buckets or []))
            self._first = ref(buckets[0]) if buckets else lambda: None
        if not self._layers or not _is_torchs() or is_in_backward() or is_tracing_calls():
            return
        for layer, slot in self._layers:
            if type(layer) is Linear:
                _places[id(slot.parameter)] = slot, self._reducer
                object.__setattr__(layer, "__class__", PlacedLinear)

    @leave_alone
    def __exit__(self, *_: object) -> None:
        for layer, slot in self._layers:
            if type(layer) is PlacedLinear:
                object.__setattr__(layer, "__class__", Linear)
            _places.pop(id(slot.parameter), None)

    def _found(self, buckets: list[Bucket]) -> Iterator[tuple[Linear, Slot]]:
        places = [slot for bucket in buckets if bucket.keeps_gradients for slot in bucket.slots]
        least = EARLY_COUNT if self._reducer.overlap.has_thread else PLACED_COUNT
        large = {slot.parameter: slot for slot in places if slot.is_large and slot.parameter.numel() >= least}
        if not large:
            return
        for layer in dict.fromkeys(_linear_layers(self._module)):
            weight = cast(Parameter, layer._parameters.get("weight"))
            if weight in large:
                yield layer, large[weight]


def _linear_layers(module: torch.nn.Module) -> Iterator[Linear]:
    """Those in a module that are torch's, and not in something that is compiled."""
    if is_compiled(module):
        return
    if type(module) in (Linear, PlacedLinear):
        yield cast(Linear, module)
    for child in module.children():
        yield from _linear_layers(child)


def _is_torchs() -> bool:
    """Whether nobody has put something else in the place of torch's functions."""
    return (
        torch.nn.functional.linear is _linear
        and Linear.forward is _forward
        and _forward.__code__.co_filename == torch.nn.modules.linear.__file__
    )


class PlacedLinear(Linear):
    """What a layer is while a forward of the wrapper runs; copies that are made of it meanwhile are torch's."""

    def forward(self, input: Tensor) -> Tensor:
        place = None if torch.compiler.is_compiling() else _places.get(id(self.weight))
        if place is None or not _is_usual(input, self.weight, self.bias):
            return _forward(self, input)
        if input.dim() == 2:
            return _multiplied(input, self.weight, self.bias, *place)
        # As torch has it. A view made in the node would be one that nobody may change.
        output = _multiplied(input.reshape(-1, input.shape[-1]), self.weight, self.bias, *place)
        return output.view(*input.shape[:-1], output.shape[1])

    def _get_name(self) -> str:
        return Linear.__name__

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        return object.__new__, (Linear,), *state


def _is_usual(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a node in Python does here what torch's own does."""
    return (
        type(weight) is Parameter
        and weight.is_floating_point()
        and weight.is_contiguous()
        and type(input) is Tensor
        and input.layout is torch.strided
        and not input.is_nested
        and input.dim() > 0
        and (bias is None or (type(bias) is Parameter and bias.shape == weight.shape[:1]))
        and _saving_hooks is not None
        and _saving_hooks(True) is None
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._is_tracing()
        and forward_ad._current_level < 0
    )


def _multiplied(rows: Tensor, weight: Tensor, bias: Tensor | None, slot: Slot, reducer: Reducer) -> Tensor:
    """Rows by a weight, as a node of our own; two where a thread could have the weight's gradient under way."""
    later = None
    if reducer.overlap.has_thread and rows.requires_grad and weight.requires_grad:
        later = cast(Callable[..., Tensor], _Later.apply)(rows, weight.detach())
    return cast(Callable[..., Tensor], _Multiply.apply)(rows, weight, bias, later, slot, reducer)


class _Multiply(torch.autograd.Function):
    """Rows by a weight, whose gradient backward puts into its place, where that is free.

    That of the rows is left to `_Later`, whose output is an input here; where there is none, it is made here.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, later: Tensor | None, slot: Slot, reducer: Reducer
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, weight if ctx.needs_input_grad[0] else None)
        ctx.slot, ctx.reducer, ctx.bias = slot, reducer, bias
        return _linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None, None, None
        rows, weight = ctx.saved_tensors
        is_whole = is_whole_backward()
        of_rows, of_weight, of_bias, is_later = (
            needed and (is_whole or _is_asked_for(ctx.next_functions[index][0]))
            for index, needed in enumerate(ctx.needs_input_grad[:4])
        )
        # Derivatives need the weight itself, and hooks, which run before, might change it.
        is_later = is_later and not (torch.is_grad_enabled() or _has_hooks(ctx.slot.parameter) or _has_hooks(ctx.bias))
        return (
            gradient.mm(weight) if of_rows and not is_later else None,
            _of_weight(gradient.t(), rows, ctx.slot, ctx.reducer) if of_weight else None,
            gradient.sum(0) if of_bias else None,
            gradient if is_later else None,
            None,
            None,
        )


class _Later(torch.autograd.Function):
    """The rows of a multiplication, whose gradient is made when the weight's is there, and may be under way.

    Backward comes to the node that was made last before others, and to a parameter before all of them.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        """A tensor of the output's shape without memory, which gets the output's gradient."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight)
        return rows.new_empty(()).expand(len(rows), len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        (weight,) = ctx.saved_tensors
        return None if gradient is None else gradient.mm(weight), None


def _has_hooks(parameter: Tensor | None) -> bool:
    """Whether hooks of the program run where the gradient of a parameter comes or is complete."""
    return parameter is not None and (bool(parameter._backward_hooks) or has_other_hooks(parameter))


def _is_asked_for(node: Any) -> bool:
    """Whether a backward for some tensors only comes to this node, or returns what would come there."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch does not tell of a leaf that autograd.grad() was asked for, which it is then
        return True


def _of_weight(columns: Tensor, rows: Tensor, slot: Slot, reducer: Reducer) -> Tensor:
    """The gradient of the weight, in its place if that is free."""
    bucket = slot.bucket
    if bucket is None or not _is_free(slot, reducer):
        return columns.mm(rows)
    slot.is_placed = True
    # Another tensor than the slot's, which nobody else knows: one that others know autograd would copy.
    place = cast(Tensor, slot.view).detach()
    if bucket.scale == 1.0:
        return torch.mm(columns, rows, out=place)
    return torch.addmm(place, columns, rows, beta=0, alpha=bucket.scale, out=place)


def _is_free(slot: Slot, reducer: Reducer) -> bool:
    """Whether this backward averages, nothing is or will be in the place, and no hook on the parameter sees it."""
    parameter = slot.parameter
    return (
        running.task_of(reducer) == current_task()
        and parameter.grad is None
        and not (slot.is_placed or slot.is_mixed or slot.fired)
        and slot.due == 1
        and not torch.is_grad_enabled()
        and not _has_hooks(parameter)
    )
