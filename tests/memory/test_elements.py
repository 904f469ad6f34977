"""Element types: the table, and what NumPy dtypes belong to."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from mpdist.errors import UnsupportedBuffer
from mpdist.memory import BY_CODE, BY_DTYPE, BY_NAME, ELEMENTS, element_of
from mpdist.memory.elements import numpy_dtype

# A copy of what travels on the wire: a change here breaks jobs whose ranks have different versions.
CODES = {
    "bool": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "uint8": 6,
    "uint16": 7,
    "uint32": 8,
    "uint64": 9,
    "float16": 10,
    "bfloat16": 11,
    "float32": 12,
    "float64": 13,
    "complex64": 14,
    "complex128": 15,
}


def test_codes_are_never_renumbered() -> None:
    assert {element.name: element.code for element in ELEMENTS} == CODES
    assert all(1 <= code <= 31 for code in BY_CODE)


def test_every_element_is_found_by_code_and_by_name() -> None:
    for element in ELEMENTS:
        assert BY_CODE[element.code] is element
        assert BY_NAME[element.name] is element
        assert element.storage.itemsize == element.itemsize


def test_only_the_16_bit_floats_are_half() -> None:
    assert {element.name for element in ELEMENTS if element.is_half} == {"float16", "bfloat16"}


def test_only_bfloat16_has_no_numpy_dtype_and_is_held_as_uint16() -> None:
    assert [element.name for element in ELEMENTS if element.numpy is None] == ["bfloat16"]
    assert BY_NAME["bfloat16"].storage == np.uint16


@pytest.mark.parametrize("alias", [np.longlong, np.ulonglong, np.intc, np.byte, "=f4", int, float, complex, bool])
def test_aliases_of_a_dtype_are_the_same_element(alias: object) -> None:
    dtype = np.dtype(alias)  # type: ignore[call-overload]
    element = element_of(dtype)
    assert element is not None
    assert element.numpy == dtype


@pytest.mark.parametrize("dtype", ["O", "U3", "S3", "V4", "M8[s]", "m8[s]", ">f4", "f4,i4", "g", "G"])
def test_other_dtypes_are_no_element(dtype: str) -> None:
    dtype = ">f4" if dtype == ">f4" and np.little_endian else "<f4" if dtype == ">f4" else dtype
    assert element_of(np.dtype(dtype)) is None


def test_a_new_bfloat16_array_needs_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ml_dtypes", raising=False)
    with pytest.raises(UnsupportedBuffer, match="torch tensor"):
        numpy_dtype(BY_NAME["bfloat16"])


def test_ml_dtypes_bfloat16_is_recognised() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(ml_dtypes.bfloat16)
    assert element_of(dtype) is BY_NAME["bfloat16"]
    assert BY_DTYPE[dtype] is BY_NAME["bfloat16"]
    assert numpy_dtype(BY_NAME["bfloat16"]) == dtype
