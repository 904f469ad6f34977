"""A torch device whose kernels run late, in a thread, over memory that torch takes for a device's.

    install()       once per process: the device "simgpu", in Python only
    opened(comm)    while it is open, mpdist's accelerator for its tensors is the simulated GPU

Tensors are torch's own, with an address and with autograd, whose hooks run on a thread of the device's. A kernel is
queued on the current stream and computes on the CPU when its turn comes; until then its output holds 0xAB. So whoever
does not wait for the stream sees wrong numbers. What needs a value on the host waits for the stream, as with CUDA.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from comm.devices import forget
from memory.simulated import DEVICE, Simulated, SimulatedMark, simulated
from memory.simulated import Stream as Queue
from torch import Tensor
from torch import library as kernels
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import mpdist
from mpdist.memory.buffer import TORCH_DEVICES, cuda
from mpdist.torch import devices, futures, registration, work

NAME = "simgpu"

# In DLPack kDLCPU, and kDLExtDev, which torch takes for its device type PrivateUse1.
ON_CPU, ON_DEVICE = 1, 12

COPIES = ("aten::_copy_from", "aten::_copy_from_and_resize")

# What neither meta nor schema tells: that a value is asked for, or that the result is sparse.
AT_ONCE = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::_embedding_bag_backward")

# Of sparse tensors: their parts, which the CPU's kernels only put together.
SPARSE_FORMS = (
    "_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors", "_indices", "_values", "indices",
    "values", "_nnz", "sparse_dim", "dense_dim", "is_coalesced", "_coalesced_", "copy_sparse_to_sparse_",
    "sparse_resize_", "sparse_resize_and_clear_",
)  # fmt: skip

_libraries: list[kernels.Library] = []


class Head(ctypes.Structure):
    """How a DLTensor begins."""

    _fields_ = (("data", ctypes.c_void_p), ("kind", ctypes.c_int32), ("index", ctypes.c_int32))


_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def moved(tensor: Tensor, kind: int) -> Tensor:
    """The same memory as a tensor elsewhere."""
    capsule = torch.utils.dlpack.to_dlpack(tensor)
    head = Head.from_address(_pointer(capsule, b"dltensor"))
    head.kind, head.index = kind, 0
    return torch.utils.dlpack.from_dlpack(capsule)


# ---------------------------------------------------------------------- streams


class Stream:
    """As torch.cuda.Stream."""

    def __init__(self, queue: Queue | None = None) -> None:
        self.queue = queue or Queue(0.001)

    def wait_event(self, event: Event) -> None:
        self.queue.follow(event.mark)

    def wait_stream(self, other: Stream) -> None:
        self.queue.follow(other.queue.mark())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        assert self.queue.mark().event.wait(30)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.queue is self.queue

    def __hash__(self) -> int:
        return id(self.queue)


class Event:
    """As torch.cuda.Event."""

    mark: SimulatedMark

    def record(self, stream: Stream | None = None) -> None:
        self.mark = (stream or current_stream()).queue.mark()

    def query(self) -> bool:
        return self.mark.event.is_set()


class Gpu(Simulated):
    """The accelerator of the device's tensors: it follows the stream that is current in torch."""

    def __init__(self, **options: Any) -> None:
        self._current = threading.local()
        self._default: Queue | None = None
        super().__init__(**options)

    @property
    def program(self) -> Any:
        return getattr(self._current, "queue", self._default)

    @program.setter
    def program(self, queue: Queue) -> None:
        self._default = queue

    @contextmanager
    def current(self, queue: Queue) -> Iterator[None]:
        before = self.program
        self._current.queue = queue
        try:
            yield
        finally:
            self._current.queue = before


_gpu = Gpu(seconds=0.0)


def current_stream(device: object = None) -> Stream:
    return Stream(_gpu.program)


def synchronize(device: object = None) -> None:
    current_stream().synchronize()


def _module() -> ModuleType:
    """What torch.cuda is for CUDA."""
    module = ModuleType(f"torch.{NAME}")
    answers = {
        "is_initialized": True, "is_available": True, "current_device": 0, "device_count": 1, "_is_in_bad_fork": False,
        "manual_seed_all": None, "get_amp_supported_dtype": [torch.bfloat16, torch.float16], "set_device": None,
        "is_current_stream_capturing": False,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(module, name, lambda *_, answer=answer: answer)
    own = {
        "Stream": Stream, "Event": Event, "current_stream": current_stream, "synchronize": synchronize,
        "stream": lambda stream: _gpu.current(stream.queue),
    }  # fmt: skip
    for name, value in own.items():
        setattr(module, name, value)
    return module


# ---------------------------------------------------------------------- kernels


def is_there(x: object) -> bool:
    return isinstance(x, Tensor) and x.device.type == NAME


@cache
def is_view(op: Any) -> bool:
    alias = op._schema.returns[0].alias_info if op._schema.returns else None
    return alias is not None and not alias.is_write


def kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation of torch on the device."""
    name = op._schema.name
    if name in COPIES:
        return _copy(*args, **kwargs)
    if name == "aten::set_" or is_view(op):  # the CPU's kernels look at sizes and strides only
        return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
    if not any(map(is_there, tree_leaves((args, kwargs)))):
        return _made(op, args, kwargs)
    if any(map(is_number_for_tensor, args, op._schema.arguments)):
        op = op.overloadpacket
    outputs = None if name in AT_ONCE else _outputs(op, args, kwargs)
    if outputs is None:
        return _at_once(op, args, kwargs)
    _queue(op, args, kwargs, outputs)
    return outputs


def is_number_for_tensor(x: Any, argument: Any) -> bool:
    """Whether a number has become Python's on the way, and fits another form of the operation only."""
    return isinstance(x, bool | int | float | complex) and isinstance(argument.type, torch.TensorType)


def _made(op: Any, args: Any, kwargs: Any) -> Tensor:
    """A new tensor."""
    made = op(*args, **{**kwargs, "device": "cpu", "pin_memory": False})
    if op._schema.name in ("aten::empty", "aten::empty_strided") and made.numel():
        ctypes.memset(made.data_ptr(), 0xAB, made.untyped_storage().nbytes())
    return moved(made, ON_DEVICE)


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if is_there(source) and is_there(target):
        _run(partial(on_cpu(target).copy_, on_cpu(source)))
    elif is_there(target):
        _run(partial(on_cpu(target).copy_, source.clone()))
    else:
        synchronize()
        target.copy_(on_cpu(source))
    return target


@dataclass(frozen=True)
class New:
    """An output that is made."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def like(cls, tensor: Tensor) -> New:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=NAME)


@dataclass(frozen=True)
class Own:
    """An output that is an argument: the tensor at this place among them."""

    place: int


class Plan(NamedTuple):
    """What an operation gives, and which arguments get another size before."""

    outputs: Any
    resized: list[tuple[int, New]]


# torch computes them in Python, which takes longer than all else; a training repeats the same few.
_plans: dict[tuple[Any, ...], Plan | None] = {}


def _outputs(op: Any, args: Any, kwargs: Any) -> Any:
    """What the operation gives, not computed yet; None where that depends on values."""
    own: list[Tensor] = []
    try:
        key = op, torch.get_default_dtype(), _form((args, kwargs), own)
    except RuntimeError:  # one has no strides
        return None
    if key not in _plans:
        _plans[key] = _plan(op, args, kwargs, own)
    plan = _plans[key]
    if plan is None:
        return None
    for place, size in plan.resized:
        _resize(own[place], size)

    def made(x: Any) -> Any:
        if isinstance(x, Own):
            return own[x.place]
        return x.make() if isinstance(x, New) else x

    return tree_map(made, plan.outputs)


def _form(x: Any, tensors: list[Tensor]) -> Any:
    """All of the arguments that decides on sizes and types; collects the tensors."""
    if isinstance(x, Tensor):
        tensors.append(x)
        return x.shape, x.stride(), x.dtype
    if isinstance(x, dict):
        return tuple((name, _form(value, tensors)) for name, value in x.items())
    if isinstance(x, list | tuple):
        return tuple(_form(each, tensors) for each in x)
    return type(x), x


def _plan(op: Any, args: Any, kwargs: Any, own: list[Tensor]) -> Plan | None:
    """Found by torch itself, from tensors without values."""
    metas: list[Tensor] = []
    places: dict[int, int] = {}

    def meta(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        metas.append(made)
        places[id(made)] = next(place for place, tensor in enumerate(own) if tensor is x)
        return made

    try:
        found = op(*tree_map(meta, args), **_without_device(tree_map(meta, kwargs), "meta"))
    except (NotImplementedError, RuntimeError):
        return None

    def planned(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return Own(places[id(x)]) if id(x) in places else New.like(x)

    resized = [(places[id(each)], New.like(each)) for each in metas if each.shape != own[places[id(each)]].shape]
    return Plan(tree_map(planned, found), resized)


def _resize(tensor: Tensor, size: New) -> None:
    """New memory for an output that had another size."""
    set_storage = torch.ops.aten.set_.source_Storage_storage_offset
    set_storage(tensor, size.make().untyped_storage(), 0, size.shape, size.stride)


def _queue(op: Any, args: Any, kwargs: Any, outputs: Any) -> None:
    given = tree_map(_argument, args), _without_device(tree_map(_argument, kwargs), "cpu")
    own = {id(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
    targets = [None if id(x) in own else on_cpu(x) for x in tree_leaves(outputs) if isinstance(x, Tensor)]

    def compute() -> None:
        found = [x for x in tree_leaves(op(*given[0], **given[1])) if isinstance(x, Tensor)]
        for value, target in zip(found, targets, strict=True):
            if target is not None and value.shape == target.shape:  # some by-products have another on the CPU
                target.copy_(value)

    _run(compute)


def _argument(x: Any) -> Any:
    if is_there(x):
        return on_cpu(x)
    return x.clone() if isinstance(x, Tensor) else x  # a number of the host is read when the kernel is queued


def _at_once(op: Any, args: Any, kwargs: Any) -> Any:
    """For operations whose output depends on values."""
    synchronize()
    mine: dict[int, Tensor] = {}

    def here(x: Any) -> Any:
        if not is_there(x):
            return x
        there = on_cpu(x)
        mine[id(there)] = x
        kept.append(there)
        return there

    kept: list[Tensor] = []
    found = op(*tree_map(here, args), **_without_device(tree_map(here, kwargs), "cpu"))
    return tree_map(lambda x: mine[id(x)] if id(x) in mine else _there(x), found)


def sparse_form(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What only puts the parts of a sparse tensor together."""
    return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCPU), *args, **kwargs)


def sparse_kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation on sparse tensors of the device."""
    if op._schema.name == "aten::_copy_from":
        source, target, *_ = args
        return sparse_form(torch.ops.aten.copy_sparse_to_sparse_.default, target, source)
    synchronize()
    here = {"device": "cpu"} if kwargs.get("device") is not None else {}
    found = op(*tree_map(_sparse_on_cpu, args), **tree_map(_sparse_on_cpu, kwargs) | here)
    return tree_map(_there, found)


def _sparse_on_cpu(x: Any) -> Any:
    if not is_there(x) or not x.is_sparse:
        return on_cpu(x) if is_there(x) else x
    made = torch.sparse_coo_tensor(on_cpu(x._indices()), on_cpu(x._values()), x.shape, check_invariants=False)
    return made._coalesced_(x.is_coalesced())


def _there(x: Any) -> Any:
    if not isinstance(x, Tensor) or not x.is_sparse:
        return moved(x, ON_DEVICE) if isinstance(x, Tensor) else x
    made = torch.sparse_coo_tensor(
        moved(x._indices(), ON_DEVICE), moved(x._values(), ON_DEVICE), x.shape, check_invariants=False
    )
    return made._coalesced_(x.is_coalesced())


def _without_device(kwargs: Any, device: str) -> Any:
    return {**kwargs, "device": device} if kwargs.get("device") is not None else kwargs


def _run(compute: Callable[[], object]) -> None:
    def computed() -> None:
        with torch._C._AutoDispatchBelowAutograd():
            compute()

    _gpu.program.run(computed)


def on_cpu(tensor: Tensor) -> Tensor:
    """The device's memory, as the device sees it."""
    if tensor.is_conj():
        return on_cpu(tensor.conj()).conj()
    if tensor.is_neg():
        return torch._neg_view(on_cpu(torch._neg_view(tensor)))
    return moved(tensor, ON_CPU)


# ---------------------------------------------------------------------- for tests


@cache
def install() -> None:
    """Make the device known to torch, and to mpdist."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_module())
    library = kernels.Library("_", "IMPL")
    library.fallback(kernel, "PrivateUse1")
    library.fallback(sparse_kernel, "SparsePrivateUse1")
    forms = kernels.Library("aten", "IMPL")
    for name in SPARSE_FORMS:
        forms.impl(name, partial(sparse_form, getattr(torch.ops.aten, name).default), "SparsePrivateUse1")
    for key in ("Conjugate", "Negative"):  # a copy resolves them
        forms.impl("_copy_from", kernels.fallthrough_kernel, key)
    _libraries.extend((library, forms))
    TORCH_DEVICES[NAME] = cuda
    registration.DEVICES.append(NAME)
    # A Future that knows its devices asks the backend for streams, which one in Python cannot give.
    work.devices_of = futures.devices_of = lambda tensors: []
    devices.tensor_of = lambda array: moved(torch.from_numpy(array._values), ON_DEVICE)


@contextmanager
def opened(comm: mpdist.Communicator, **options: Any) -> Iterator[Gpu]:
    """A simulated GPU with its tensors."""
    global _gpu
    forget(comm)
    _gpu = Gpu(**options)
    with simulated(device=_gpu):
        yield _gpu
    synchronize()
    forget(comm)
    _gpu = Gpu(seconds=0.0)


def moved_module(module: torch.nn.Module) -> torch.nn.Module:
    """A module brought there; parameters that it shares stay shared, as with CUDA."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return module.to(NAME)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def late(values: Tensor | Sequence[Any], **options: Any) -> Tensor:
    """A tensor there that gets its values late; until then it holds others."""
    values = torch.as_tensor(values, **options)
    return torch.empty_like(values, device=NAME).copy_(values)


__all__ = ["DEVICE", "NAME", "Event", "Gpu", "Stream", "install", "late", "on_cpu", "opened", "synchronize"]
