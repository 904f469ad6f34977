"""Buffer: an array reduced to what MPI needs: where its elements are, how many, of which type.

A Buffer copies nothing and owns nothing but a reference to the user's object.
It is made once per call on the hot path, so it has slots and computes the
address, the shape and the NumPy view only when they are asked for.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import numpy as np

from mpdist.errors import UsageError
from mpdist.memory.elements import Array, Element


@dataclass(frozen=True, slots=True)
class Device:
    """Where memory is."""

    kind: Literal["cpu", "cuda"]
    index: int = 0

    @property
    def is_host(self) -> bool:
        return self.kind == "cpu"

    def __str__(self) -> str:
        return self.kind if self.is_host else f"{self.kind}:{self.index}"


HOST = Device("cpu")


@cache
def cuda(index: int) -> Device:
    """The CUDA device with this index."""
    return Device("cuda", index)


# The types of torch's devices whose memory an Accelerator reaches, and what they are here.
TORCH_DEVICES: dict[str, Callable[[int], Device]] = {"cuda": cuda}


def device_of(name: str) -> Device:
    """`cpu`, `cuda` or `cuda:1` as a Device; raises UsageError."""
    if name == "cpu":
        return HOST
    kind, colon, index = name.partition(":") if isinstance(name, str) else ("", "", "")
    if kind != "cuda" or (colon and not index.isdecimal()):
        raise UsageError(f"device is {name!r}; it must be 'cpu', 'cuda' or 'cuda:1'")
    return cuda(int(index or 0))


class Buffer:
    """Contiguous memory of `count` elements of one type.

    Attributes:
        exporter: an object with the buffer protocol over exactly this memory; None where only the address is known.
        count: number of elements.
        nbytes: count * element.itemsize.
        element: the element type.
        device: where the memory is.
        readonly: whether it must not be written.
        owner: the user's object, kept alive.
    """

    __slots__ = (
        "_address",
        "_array",
        "_kept",
        "_shape",
        "count",
        "device",
        "element",
        "exporter",
        "nbytes",
        "owner",
        "readonly",
    )

    def __init__(
        self,
        exporter: object | None,
        count: int,
        nbytes: int,
        element: Element,
        device: Device,
        readonly: bool,
        owner: object,
        address: int | None = None,
        kept: object = None,
    ) -> None:
        """Take `address` where there is no exporter; `kept` is a further object that must live as long."""
        self.exporter = exporter
        self.count = count
        self.nbytes = nbytes
        self.element = element
        self.device = device
        self.readonly = readonly
        self.owner = owner
        self._address = address
        self._kept = kept
        self._array: Array | None = None
        self._shape: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """What was set, else the owner's shape, else (count,)."""
        if self._shape is not None:
            return self._shape
        shape = getattr(self.owner, "shape", None)
        return (self.count,) if shape is None else tuple(shape)

    @shape.setter
    def shape(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    @property
    def address(self) -> int:
        """Of the first byte; without meaning if nbytes is 0."""
        if self._address is None:
            self._address = address_of(self.exporter) if self.nbytes else 0
        return self._address

    place = address
    """What tells whether two overlap."""

    def array(self) -> Array:
        """A 1-D NumPy view of the storage dtype, writable if the Buffer is; host memory only."""
        if self._array is not None:
            return self._array
        assert self.device is HOST, f"{self!r} is not in host memory"
        exporter: Any = self.exporter
        if self.count == 0:
            array: Array = np.empty(0, self.element.storage)
        elif exporter is None:
            array = np.asarray(_Memory(self))
        else:
            array = np.frombuffer(exporter, self.element.storage)
            if type(exporter) is not np.ndarray:
                return array  # not kept: a bytearray, say, can't be resized as long as there is a view
        self._array = array
        return array

    def bare_array(self) -> Array:
        """As array(), in a quarter of the time; a tensor's memory is not kept: for who holds the Buffer as long."""
        exporter: Any = self.exporter
        if type(exporter) is np.ndarray and exporter.ndim == 1 and exporter.dtype is self.element.storage:
            return exporter.view()
        if exporter is not None or not self.count:
            return self.array()
        return np.ndarray(self.count, self.element.storage, _ALL_MEMORY, self.address - _FIRST_ADDRESS)

    def __repr__(self) -> str:
        access = ", read-only" if self.readonly else ""
        return f"<Buffer {self.element.name} x {self.count} on {self.device}{access}>"


# Of which NumPy makes an array at any address; one that begins at 0 would be taken for none.
_FIRST_ADDRESS = 1
_ALL_MEMORY: Any = (ctypes.c_char * (sys.maxsize // 2)).from_address(_FIRST_ADDRESS)


class _Memory:
    """A Buffer's memory as NumPy asks for it; what the Buffer keeps alive lives as long as the view."""

    __slots__ = ("__array_interface__", "_kept")

    def __init__(self, buffer: Buffer) -> None:
        self._kept = buffer.owner, buffer._kept
        self.__array_interface__ = {
            "version": 3,
            "data": (buffer.address, buffer.readonly),
            "typestr": buffer.element.storage.str,
            "shape": (buffer.count,),
        }


def address_of(exporter: object) -> int:
    """Of the first byte of something with the buffer protocol."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(cast(Any, exporter)))  # takes a fifth of the time
    except (TypeError, ValueError):  # read-only, or empty
        view = np.frombuffer(cast(Any, exporter), np.uint8)
        return int(view.__array_interface__["data"][0])


def overlap(a: Buffer, b: Buffer) -> bool:
    """Whether the two share at least one byte."""
    if a.device != b.device or not a.nbytes or not b.nbytes:
        return False
    return a.place < b.place + b.nbytes and b.place < a.place + a.nbytes


def is_same(a: Buffer, b: Buffer) -> bool:
    """Whether the two are the same bytes."""
    return a.device == b.device and a.place == b.place and a.nbytes == b.nbytes
