"""From any array to a Buffer: one dictionary look-up by type, then a short function for that type.

Turning an array into a Buffer is part of every call's latency, so the plain
path asks each array only for what costs nanoseconds (not `x.ctypes`, not
`__array_interface__`, not torch's `x.device`). Whatever does not fit goes to
`refusals`, which finds out why. Libraries are recognised by the names of their
types and never imported.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Callable
from math import prod
from typing import Any, TypeAlias

import numpy as np

from mpdist.errors import UnsupportedBuffer
from mpdist.memory import dlpack, refusals
from mpdist.memory.buffer import HOST, TORCH_DEVICES, Buffer, cuda
from mpdist.memory.elements import BY_DTYPE, BY_NAME, ELEMENTS, Element, element_of

Maker: TypeAlias = Callable[[Any], Buffer]

_UINT8 = BY_NAME["uint8"]


def as_buffer(x: object, *, writable: bool = False) -> Buffer:
    """Describe the memory of an array; nothing is copied.

    Args:
        x: a NumPy array or scalar, torch tensor, `array.array`, bytes-like, memoryview, or anything that speaks
            `__cuda_array_interface__`, DLPack or the buffer protocol. Contiguous in C order.
        writable: the memory will be written to.

    Raises:
        UnsupportedBuffer: its memory or its element type cannot be communicated; the text says what to do.
    """
    make = MAKERS.get(type(x))
    if make is None:
        make = _learn(x)
    buffer = make(x)
    if writable and buffer.readonly:
        raise refusals.read_only(x)
    return buffer


# ---------------------------------------------------------------------- NumPy


def from_numpy(x: np.ndarray[Any, Any]) -> Buffer:
    element = BY_DTYPE.get(x.dtype) or element_of(x.dtype)
    flags = x.flags
    if element is None or not flags.c_contiguous:
        raise refusals.numpy_array(x)
    # ml_dtypes' bfloat16 has no buffer format, so NumPy exports it only under another dtype.
    exporter = x if element.numpy is not None else x.view(element.storage)
    return Buffer(exporter, x.size, x.nbytes, element, HOST, not flags.writeable, x)


def _from_numpy_scalar(x: np.generic) -> Buffer:
    copy = np.array(x)
    copy.flags.writeable = False
    buffer = from_numpy(copy)
    buffer.owner = x
    return buffer


# ---------------------------------------------------------------------- torch

_TORCH_ELEMENTS: dict[object, Element] = {}


def from_torch(x: Any) -> Buffer:
    element = _TORCH_ELEMENTS.get(x.dtype)
    if element is None or not x.is_cpu:
        return _from_torch_checked(x)
    try:
        is_odd = x.is_nested or not x.is_contiguous() or x.is_neg() or (element.kind == "complex" and x.is_conj())
        count = x.numel()
        address = x.data_ptr()
    except (ValueError, RuntimeError) as error:
        raise refusals.tensor_that_raised(x, error) from error
    if is_odd or (not address and count):
        raise refusals.torch_tensor(x)
    return Buffer(None, count, count * element.itemsize, element, HOST, False, x, address)


def _from_torch_checked(x: Any) -> Buffer:
    """A tensor on a GPU, of a dtype met for the first time, or of one that cannot be communicated."""
    element = BY_NAME.get(str(x.dtype).removeprefix("torch."))
    if element is None:
        raise refusals.torch_tensor(x)
    _TORCH_ELEMENTS[x.dtype] = element
    if x.is_cpu:
        return from_torch(x)
    device_of = TORCH_DEVICES.get(x.device.type)
    try:
        is_odd = x.is_nested or not x.is_contiguous() or x.is_neg() or x.is_conj()
        count, address, index = x.numel(), x.data_ptr(), x.get_device()
    except (ValueError, RuntimeError) as error:
        raise refusals.tensor_that_raised(x, error) from error
    if device_of is None or is_odd or (not address and count):
        raise refusals.torch_tensor(x)
    return Buffer(None, count, count * element.itemsize, element, device_of(index), False, x, address)


# ---------------------------------------------------------------------- the standard library's


def _from_bytes(x: bytes) -> Buffer:
    return Buffer(x, len(x), len(x), _UINT8, HOST, True, x)


def _from_buffer(x: Buffer) -> Buffer:
    return x


def _from_bytearray(x: bytearray) -> Buffer:
    return Buffer(x, len(x), len(x), _UINT8, HOST, False, x)


def _from_array(x: array.array[Any]) -> Buffer:
    element = _element_of_format(x.typecode, x.itemsize)
    if element is None:
        raise refusals.buffer_format(x, x.typecode)
    return Buffer(x, len(x), len(x) * x.itemsize, element, HOST, False, x)


def _from_memoryview(x: memoryview) -> Buffer:
    try:
        element = _element_of_format(x.format, x.itemsize)
        if element is None or not x.c_contiguous:
            raise refusals.memory_view(x, element)
    except UnsupportedBuffer:
        raise
    except ValueError as error:
        raise UnsupportedBuffer("got a memoryview that was released; needed one that is open") from error
    return Buffer(x, x.nbytes // x.itemsize, x.nbytes, element, HOST, x.readonly, x)


def _from_exporter(x: Any) -> Buffer:
    """Anything else with the buffer protocol, mmap and ctypes arrays among it."""
    try:
        view = memoryview(x)
    except (BufferError, ValueError, TypeError) as error:
        raise UnsupportedBuffer(f"got {refusals.named(x)} that does not give its memory away: {error}") from error
    buffer = _from_memoryview(view)
    buffer.owner, buffer.shape = x, view.shape or ()
    return buffer


_KIND_OF_FORMAT = {
    **dict.fromkeys("bhilqn", "int"),
    **dict.fromkeys("BHILQNc", "uint"),
    **dict.fromkeys("efd", "float"),
    **dict.fromkeys(("Zf", "Zd"), "complex"),
    "?": "bool",
}
_BY_KIND_AND_SIZE: dict[tuple[str, int], Element] = {
    (element.kind, element.itemsize): element for element in ELEMENTS if element.numpy is not None
}
_NATIVE_PREFIXES = "@=" + ("<" if np.little_endian else ">")


def _element_of_format(text: str, itemsize: int) -> Element | None:
    """The element type of a native buffer format, as `struct` and NumPy write it."""
    kind = _KIND_OF_FORMAT.get(text[1:] if text[:1] in _NATIVE_PREFIXES else text)
    return None if kind is None else _BY_KIND_AND_SIZE.get((kind, itemsize))


# ---------------------------------------------------------------------- protocols


def _from_cupy(x: Any) -> Buffer:
    """What `_from_cuda_array` gives, by attributes that take less time."""
    element = element_of(x.dtype)
    if element is None or not x.flags.c_contiguous:
        return _from_cuda_array(x)
    return Buffer(None, x.size, x.nbytes, element, cuda(x.device.id), False, x, x.data.ptr)


def _from_cuda_array(x: Any) -> Buffer:
    """Anything with `__cuda_array_interface__`."""
    interface = getattr(x, "__cuda_array_interface__", None)
    if interface is None and hasattr(x, "__dlpack__"):  # JAX's have one type, those of the host and bfloat16 none of it
        return _from_dlpack(x)
    if interface is None:
        raise refusals.not_an_array(x)
    element = _cuda_element(x, interface["typestr"])
    shape = tuple(interface["shape"])
    if element is None:
        raise refusals.element_type(refusals.named(x), interface["typestr"])
    if interface.get("mask") is not None:
        raise UnsupportedBuffer(
            f"got {refusals.named(x)} with a mask; needed plain memory. Fill the masked elements first"
        )
    strides = interface.get("strides")
    if strides is not None and not is_c_contiguous(shape, tuple(strides), element.itemsize):
        raise refusals.strided(refusals.named(x), shape, "cupy.ascontiguousarray(x)")
    address, readonly = interface["data"]
    count = prod(shape)
    nbytes = count * element.itemsize
    buffer = Buffer(None, count, nbytes, element, cuda(_device_index(x)), bool(readonly), x, int(address or 0))
    buffer.shape = shape
    return buffer


def _device_index(x: Any) -> int:
    """As this process counts its GPUs; `device.id` of JAX counts those of all processes."""
    if hasattr(x, "__dlpack_device__"):
        return int(x.__dlpack_device__()[1])
    return int(getattr(getattr(x, "device", None), "id", 0))


def _cuda_element(x: Any, typestr: str) -> Element | None:
    dtype = getattr(x, "dtype", None)
    return element_of(dtype if isinstance(dtype, np.dtype) else np.dtype(typestr))


def _from_dlpack(x: Any) -> Buffer:
    """An array of another library (JAX, MLX): read only, since whether it may be written is not said reliably."""
    tensor = dlpack.read(x)
    if tensor.element is None:
        raise refusals.element_type(refusals.named(x), tensor.dtype)
    if tensor.strides is not None and not is_c_contiguous(tensor.shape, tensor.strides, 1):
        raise refusals.strided(refusals.named(x), tensor.shape, "np.ascontiguousarray(x)")
    count = prod(tensor.shape)
    nbytes = count * tensor.element.itemsize
    buffer = Buffer(None, count, nbytes, tensor.element, tensor.device, True, x, tensor.address, tensor.capsule)
    buffer.shape = tensor.shape
    return buffer


def is_c_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], unit: int) -> bool:
    """Whether strides, of which `unit` is one element, are those of C order; axes of length 1 do not count."""
    if 0 in shape:
        return True
    expected = unit
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


# ---------------------------------------------------------------------- the table

MAKERS: dict[type, Maker] = {
    Buffer: _from_buffer,
    np.ndarray: from_numpy,
    array.array: _from_array,
    bytes: _from_bytes,
    bytearray: _from_bytearray,
    memoryview: _from_memoryview,
}


def _learn(x: object) -> Maker:
    """Find the maker for a type met for the first time, and remember it.

    Raises:
        UnsupportedBuffer: there is none.
    """
    make = _maker_for(x)
    if make is None:
        raise refusals.not_an_array(x)
    MAKERS[type(x)] = make
    return make


def _maker_for(x: object) -> Maker | None:
    kind = type(x)
    if isinstance(x, type):  # a class has its arrays' protocols, but no memory
        return None
    if isinstance(x, Buffer):
        return _from_buffer
    if isinstance(x, np.ndarray):
        return None if isinstance(x, np.ma.MaskedArray) else from_numpy
    if isinstance(x, np.generic):
        return _from_numpy_scalar
    if (base := refusals.torch_base(kind)) is not None:
        return from_torch if refusals.is_plain_tensor(kind, base) else None
    if kind is getattr(sys.modules.get("cupy"), "ndarray", None) and hasattr(x, "flags"):
        return _from_cupy
    # Before the buffer protocol: JAX and MLX offer both, and MLX exports bfloat16 as something else there.
    if hasattr(x, "__cuda_array_interface__"):
        return _from_cuda_array
    if hasattr(kind, "__dlpack__"):
        return _from_dlpack
    return _from_exporter if _has_buffer_protocol(x) else None


def _has_buffer_protocol(x: object) -> bool:
    try:
        memoryview(x)  # type: ignore[arg-type]  # whether it fits is the question
    except TypeError:
        return False
    except (BufferError, ValueError):
        return True
    return True
