"""Element types: the one table of what an array may hold, with the codes that travel in messages.

The type always comes from the array's own dtype, never from a buffer format:
some libraries export bfloat16 as plain bytes. NumPy has no bfloat16, so those
elements are kept as uint16 (`storage`) and computed with in float32.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from mpdist.errors import UnsupportedBuffer

Array: TypeAlias = npt.NDArray[Any]
Kind: TypeAlias = Literal["bool", "int", "uint", "float", "complex"]


@dataclass(frozen=True, slots=True, eq=False)
class Element:
    """One element type; there is exactly one object per type, compared by identity.

    Attributes:
        code: 1 to 31, part of a message's wire tag; never renumbered.
        numpy: its dtype; None only for bfloat16, which NumPy does not have.
        storage: the dtype in which NumPy holds the bytes: `numpy`, or uint16.
        is_half: 16-bit floating point; reduced with float32 accumulation.
    """

    name: str
    code: int
    itemsize: int
    kind: Kind
    numpy: np.dtype[Any] | None
    storage: np.dtype[Any]
    is_half: bool

    def __repr__(self) -> str:
        return f"<Element {self.name}>"


# (name, code, kind). Codes are on the wire: a new type takes a new code, an old one keeps its own.
_TABLE: tuple[tuple[str, int, Kind], ...] = (
    ("bool", 1, "bool"),
    ("int8", 2, "int"),
    ("int16", 3, "int"),
    ("int32", 4, "int"),
    ("int64", 5, "int"),
    ("uint8", 6, "uint"),
    ("uint16", 7, "uint"),
    ("uint32", 8, "uint"),
    ("uint64", 9, "uint"),
    ("float16", 10, "float"),
    ("bfloat16", 11, "float"),
    ("float32", 12, "float"),
    ("float64", 13, "float"),
    ("complex64", 14, "complex"),
    ("complex128", 15, "complex"),
)


def _element(name: str, code: int, kind: Kind) -> Element:
    dtype = None if name == "bfloat16" else np.dtype(name)
    storage = np.dtype(np.uint16) if dtype is None else dtype
    return Element(name, code, storage.itemsize, kind, dtype, storage, kind == "float" and storage.itemsize == 2)


ELEMENTS: tuple[Element, ...] = tuple(_element(*row) for row in _TABLE)
BY_CODE: dict[int, Element] = {element.code: element for element in ELEMENTS}
BY_NAME: dict[str, Element] = {element.name: element for element in ELEMENTS}
# Native byte order only; ml_dtypes' bfloat16 joins when it is first seen.
BY_DTYPE: dict[np.dtype[Any], Element] = {element.numpy: element for element in ELEMENTS if element.numpy is not None}

ELEMENT_NAMES = "bool, int8 to int64, uint8 to uint64, float16, bfloat16, float32, float64, complex64 or complex128"


def element_of(dtype: np.dtype[Any]) -> Element | None:
    """The element type of a NumPy dtype; None for one that cannot be communicated."""
    element = BY_DTYPE.get(dtype)
    if element is None and dtype.name == "bfloat16" and dtype.itemsize == 2 and dtype.isnative:
        element = BY_DTYPE[dtype] = BY_NAME["bfloat16"]
    return element


def numpy_dtype(element: Element) -> np.dtype[Any]:
    """The dtype of a new NumPy array of this type.

    Raises:
        UnsupportedBuffer: bfloat16, while ml_dtypes, which gives it to NumPy, is not loaded.
    """
    if element.numpy is not None:
        return element.numpy
    if "ml_dtypes" in sys.modules:
        bfloat16: np.dtype[Any] = np.dtype(sys.modules["ml_dtypes"].bfloat16)
        return bfloat16
    raise UnsupportedBuffer(
        "NumPy has no bfloat16, so no array can be allocated for it; "
        "give the target as a torch tensor (recv: x, else out=), or import ml_dtypes first"
    )
