"""Packing: arrays go into a bucket and come out of it again.

The mean is folded into the copy that is made anyway. 16-bit types are left as
they are: their sum is accumulated in float32, and dividing first would cost
digits. Compression writes float32 and float64 as 16 bits, after the division.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpdist.errors import UsageError
from mpdist.memory import BY_NAME, HOST, Buffer, Element, ReduceOp, as_buffer, check_op, narrow_into, widen
from mpdist.memory.elements import Array, numpy_dtype
from mpdist.memory.quiet import QUIET
from mpdist.memory.refusals import named

COMPRESSED = {"float16": BY_NAME["float16"], "bfloat16": BY_NAME["bfloat16"]}


class Packing:
    """How arrays of one element type travel.

    Attributes:
        element: of the arrays.
        wire: element in the bucket.
        op: with which the bucket is reduced.
    """

    def __init__(
        self, element: Element, op: ReduceOp, size: int, compress: str | None, *, on_device: bool = False
    ) -> None:
        """Decide it; `on_device`: the copies between device and bucket can't change anything."""
        check_op(op, element)
        self.element = element
        self.wire = wire_element(element, compress)
        if on_device and self.is_compressed:
            raise UsageError(
                f"compress is {compress!r}, which is for arrays in host memory; "
                "on a device convert them there, and give the 16-bit arrays"
            )
        folds_mean = op.name == "avg" and not element.is_half and not on_device
        self.op = "sum" if folds_mean else op
        self._scale = 1.0 / size if folds_mean else 1.0

    @property
    def is_compressed(self) -> bool:
        return self.wire is not self.element

    def enter(self, source: Array, room: Array) -> None:
        """Copy an array into its place in the bucket; both 1-D, of `element.storage` and `wire.storage`."""
        if self.is_compressed:
            scaled = QUIET.call(np.multiply, source, self._scale)
            narrow_into(QUIET.call(scaled.astype, np.float32, copy=False), room, self.wire)
        elif self._scale != 1.0:
            if self.element.kind == "complex":  # times a complex number, infinity would become inf + nan j
                source, room = (each.view(each.real.dtype) for each in (source, room))
            QUIET.call(np.multiply, source, source.dtype.type(self._scale), out=room)
        else:
            np.copyto(room, source)

    def leave(self, room: Array, out: Array) -> None:
        """Copy the result from its place in the bucket."""
        np.copyto(out, widen(room, self.wire) if self.is_compressed else room)


def wire_element(element: Element, compress: str | None) -> Element:
    """The element type that travels: compressed where that is asked for and makes it smaller.

    Raises:
        UsageError: no such compression.
    """
    if compress is None:
        return element
    if not isinstance(compress, str) or compress not in COMPRESSED:
        raise UsageError(f"compress is {compress!r}; it must be 'float16', 'bfloat16' or None")
    return COMPRESSED[compress] if element.name in ("float32", "float64") else element


def as_wire(memory: Array, element: Element) -> Buffer:
    """Memory of an element's storage type, described as what it holds: NumPy has no bfloat16."""
    return Buffer(memory, memory.size, memory.nbytes, element, HOST, False, memory)


# Array types, with the names of element types, of which arrays have been made.
_made: set[tuple[type, str]] = set()


def check_maker(x: object, element: Element) -> None:
    """Make an empty array of the library of `x`, which itself can't be written, once.

    Raises:
        UsageError: it can't be made.
    """
    if (type(x), element.name) in _made:
        return
    try:
        maker_like(x)(np.empty(0, element.storage), (0,))
    except Exception as error:  # each library has its own way to say no
        raise UsageError(
            f"got {named(x)}, which can't be written, and none can be made for the result: {error}. Give np.array(x)"
        ) from error
    _made.add((type(x), element.name))


def maker_like(x: Any) -> Callable[[Array, tuple[int, ...]], Any]:
    """A function from values and a shape to a new array of the library of `x`, which itself can't be written."""
    element = as_buffer(x).element

    def values_of(values: Array, shape: tuple[int, ...]) -> Array:
        return values.view(element.storage if element.numpy is not None else numpy_dtype(element)).reshape(shape)

    if isinstance(x, np.ndarray | np.generic):
        return values_of
    namespace = getattr(x, "__array_namespace__", None)
    make: Callable[[Array], Any] = type(x) if namespace is None else namespace().asarray
    return lambda values, shape: make(values_of(values, shape))
