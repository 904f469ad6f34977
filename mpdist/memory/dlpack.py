"""DLPack: read where another library's array lies, without copying and without taking it over.

A capsule is only looked at, never consumed: it stays in the Buffer, and when
that is dropped, the capsule's own destructor gives the memory back, as the
DLPack protocol promises for capsules nobody took. `np.from_dlpack` would do for
most arrays, but knows no bfloat16.

See https://dmlc.github.io/dlpack/latest/c_api.html and python_spec.html.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from mpdist.errors import UnsupportedBuffer
from mpdist.memory import refusals
from mpdist.memory.buffer import HOST, Device, cuda
from mpdist.memory.elements import BY_NAME, ELEMENTS, Element

MAX_VERSION = (1, 0)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned; the older DLManagedTensor begins with its DLTensor."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


@dataclass(frozen=True, slots=True)
class Tensor:
    """What a capsule says.

    Attributes:
        element: None if the type is unknown; `dtype` says it in words.
        strides: in elements; None for C order.
        capsule: keeps the memory alive.
    """

    address: int
    device: Device
    element: Element | None
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    capsule: object


# DLDataTypeCode -> our kinds. bfloat16 has a code of its own.
_KINDS = {0: "int", 1: "uint", 2: "float", 5: "complex", 6: "bool"}
_BFLOAT = 4
_BY_KIND_AND_BITS: dict[tuple[str, int], Element] = {
    (e.kind, 8 * e.itemsize): e for e in ELEMENTS if e.numpy is not None
}

# DLDeviceType: kDLCPU 1, kDLCUDA 2, kDLCUDAHost 3 (pinned), kDLCUDAManaged 13.
_HOST_DEVICES = (1, 3)
_CUDA_DEVICES = (2, 13)

_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))


def read(x: Any) -> Tensor:
    """Ask x for a capsule and read it.

    Raises:
        UnsupportedBuffer: x does not export itself, or lies on a device that is neither host nor CUDA.
    """
    capsule = _export(x)
    tensor = _tensor_in(capsule)
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    address = (tensor.data or 0) + tensor.byte_offset
    device = _device(x, tensor.device_type, tensor.device_id)
    element = _element(tensor.code, tensor.bits, tensor.lanes)
    dtype = str(getattr(x, "dtype", f"(DLPack code {tensor.code}, {tensor.bits} bits x {tensor.lanes})"))
    return Tensor(address, device, element, dtype, shape, strides, capsule)


def _export(x: Any) -> object:
    try:
        try:
            return x.__dlpack__(max_version=MAX_VERSION)
        except TypeError:  # a library of before DLPack 1.0
            return x.__dlpack__()
    except Exception as error:  # each library has its own way to say no
        raise UnsupportedBuffer(
            f"got {refusals.named(x)} that does not export itself by DLPack: {error}. Give np.asarray(x)"
        ) from error


def _tensor_in(capsule: object) -> _DLTensor:
    if _is_valid(capsule, b"dltensor"):
        return _DLTensor.from_address(_get_pointer(capsule, b"dltensor"))
    if not _is_valid(capsule, b"dltensor_versioned"):
        raise UnsupportedBuffer(f"got a {type(capsule).__name__} where a DLPack capsule was needed; give np.asarray(x)")
    versioned = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
    if versioned.major != MAX_VERSION[0]:
        raise UnsupportedBuffer(f"got a DLPack {versioned.major} capsule; needed version 1. Give np.asarray(x)")
    tensor: _DLTensor = versioned.tensor
    return tensor


def _device(x: object, kind: int, index: int) -> Device:
    if kind in _HOST_DEVICES:
        return HOST
    if kind in _CUDA_DEVICES:
        return cuda(index)
    raise UnsupportedBuffer(
        f"got {refusals.named(x)} on DLPack device type {kind}; needed host or CUDA memory. Give np.asarray(x)"
    )


def _element(code: int, bits: int, lanes: int) -> Element | None:
    if lanes != 1:
        return None
    if (code, bits) == (_BFLOAT, 16):
        return BY_NAME["bfloat16"]
    kind = _KINDS.get(code)
    return None if kind is None else _BY_KIND_AND_BITS.get((kind, bits))
