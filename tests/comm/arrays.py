"""Array libraries: the same values as an array of each, and back; and values that are exact in every element type."""

from __future__ import annotations

import array
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

Values = np.ndarray[Any, Any]

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
NUMPY_TYPES = ("bool", *INTEGERS, "float16", "float32", "float64", "complex64", "complex128")
TYPECODES = {
    "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint8": "B", "uint16": "H", "uint32": "I",
    "uint64": "Q", "float32": "f", "float64": "d",
}  # fmt: skip


def kind_of(dtype: str) -> str:
    return "f" if dtype == "bfloat16" else np.dtype(dtype).kind


def plain(dtype: str) -> np.dtype[Any]:
    """The NumPy type that holds the values; float32 for bfloat16."""
    return np.dtype("float32" if dtype == "bfloat16" else dtype)


def numbers(count: int, dtype: str, seed: int, *, top: int = 3) -> Values:
    """Small whole numbers, different for each seed, the same on every rank.

    Sums and products of four of them are exact in every type for the default `top`.
    """
    random = np.random.default_rng([seed, count])
    low = 0 if kind_of(dtype) in "bu" else -top
    values = random.integers(low, 1 if dtype == "bool" else top, count, endpoint=True)
    if kind_of(dtype) == "c":
        return (values + 1j * random.integers(-top, top, count, endpoint=True)).astype(dtype)
    return values.astype(plain(dtype))


@dataclass(frozen=True)
class Library:
    """One kind of array.

    Attributes:
        dtypes: what its arrays may hold.
        make: a new contiguous, writable array with these values.
        read: an array's values, 1-D.
        own_results: whether mpdist allocates results of this library's own kind.
    """

    name: str
    dtypes: tuple[str, ...]
    make: Callable[[Values, str], Any]
    read: Callable[[Any], Values]
    own_results: bool = False

    def __str__(self) -> str:
        return self.name


def read_numpy(x: Any) -> Values:
    assert isinstance(x, np.ndarray), type(x)
    return x.reshape(-1)


NUMPY = Library("numpy", NUMPY_TYPES, lambda values, dtype: np.array(values, dtype), read_numpy, True)
ARRAY = Library(
    "array",
    tuple(TYPECODES),
    lambda values, dtype: array.array(TYPECODES[dtype], values.reshape(-1).tolist()),
    lambda x: np.array(x) if len(x) else np.empty(0),
)
BYTEARRAY = Library(
    "bytearray",
    ("uint8",),
    lambda values, dtype: bytearray(values.tobytes()),
    lambda x: np.frombuffer(bytes(x), np.uint8),
)
MEMORYVIEW = Library(
    "memoryview",
    NUMPY_TYPES,
    lambda values, dtype: memoryview(np.array(values, dtype)),
    lambda x: np.array(x).reshape(-1),
)


@cache
def torch_library() -> Library | None:
    """torch on the CPU, where it is installed; bfloat16 is read as float32."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    def make(values: Values, dtype: str) -> Any:
        return torch.from_numpy(np.array(values)).to(getattr(torch, dtype))

    def read(x: Any) -> Values:
        assert isinstance(x, torch.Tensor), type(x)
        return np.array((x.float() if x.dtype == torch.bfloat16 else x).numpy()).reshape(-1)

    return Library("torch", (*NUMPY_TYPES, "bfloat16"), make, read, True)


def libraries() -> list[Library]:
    """All that are installed."""
    torch = torch_library()
    return [NUMPY, ARRAY, BYTEARRAY, MEMORYVIEW, *([torch] if torch else [])]


def assert_values(x: Values, wanted: Any, case: object) -> None:
    """Equal values, of any shape; the case is named if not."""
    got, wanted = np.asarray(x).reshape(-1), np.asarray(wanted).reshape(-1)
    if got.dtype.kind == "c":  # a division of complex numbers may round twice
        np.testing.assert_allclose(got, wanted, rtol=2 * np.finfo(got.dtype).eps, atol=0, err_msg=f"in case {case}")
        return
    if not np.array_equal(got, wanted):  # in a tenth of the time; to the assertion two NaN are equal
        np.testing.assert_array_equal(got, wanted, err_msg=f"in case {case}")
