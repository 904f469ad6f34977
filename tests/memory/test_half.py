"""Half precision: conversions are exact upwards and round to the nearest downwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mpdist.memory import BY_NAME, narrow_into, widen
from mpdist.memory.scratch import BLOCK_COUNT

BFLOAT16 = BY_NAME["bfloat16"]
FLOAT16 = BY_NAME["float16"]
EVERY_16_BITS = np.arange(2**16, dtype=np.uint16)


def narrow(values: npt.NDArray[np.float32], element: Any) -> npt.NDArray[Any]:
    out = np.empty(values.shape, element.storage)
    narrow_into(values, out, element)
    return out


def floats(bits: list[int]) -> npt.NDArray[np.float32]:
    return np.array(bits, np.uint32).view(np.float32)


def nearest_bfloat16(bits: int) -> int:
    """Round to nearest even in exact integer arithmetic; not for NaN."""
    upper, rest = divmod(bits, 2**16)
    return upper + (rest > 2**15 or (rest == 2**15 and upper % 2 == 1))


def test_every_bfloat16_widens_to_the_float32_with_the_same_upper_half() -> None:
    wide = widen(EVERY_16_BITS, BFLOAT16)
    assert wide.dtype == np.float32
    assert np.array_equal(wide.view(np.uint32), EVERY_16_BITS.astype(np.uint32) << np.uint32(16))


@pytest.mark.parametrize("element", [BFLOAT16, FLOAT16])
def test_every_value_survives_widening_and_narrowing(element: Any) -> None:
    stored = EVERY_16_BITS.view(element.storage)
    wide = widen(stored, element)
    back = narrow(wide, element)
    is_nan = np.isnan(wide)
    assert np.array_equal(back.view(np.uint16)[~is_nan], EVERY_16_BITS[~is_nan])
    assert np.array_equal(np.isnan(widen(back, element)), is_nan)


@given(arrays(np.uint32, st.integers(0, 50), elements=st.integers(0, 2**32 - 1)))
def test_bfloat16_rounds_to_the_nearest_even(bits: npt.NDArray[np.uint32]) -> None:
    values = bits.view(np.float32)
    result = narrow(values, BFLOAT16)
    for value, before, after in zip(values, bits.tolist(), result.tolist(), strict=True):
        if np.isnan(value):
            assert np.isnan(floats([after << 16]))[0]
        else:
            assert after == nearest_bfloat16(before)


@given(arrays(np.uint32, st.integers(1, 50), elements=st.integers(0, 2**32 - 1)))
def test_bfloat16_rounds_as_torch_does(bits: npt.NDArray[np.uint32]) -> None:
    torch = pytest.importorskip("torch")
    values = bits.view(np.float32)
    number = ~np.isnan(values)
    theirs = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(narrow(values, BFLOAT16)[number], theirs[number])


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x00000000, 0x0000),
        (0x80000000, 0x8000),
        (0x3F800000, 0x3F80),
        (0x3F808000, 0x3F80),  # half way, below is even
        (0x3F818000, 0x3F82),  # half way, above is even
        (0x3F808001, 0x3F81),
        (0x00000001, 0x0000),  # the smallest denormal
        (0x00018000, 0x0002),  # denormals round too
        (0x7F7FFFFF, 0x7F80),  # the largest float32 becomes infinite
        (0x7F800000, 0x7F80),
        (0xFF800000, 0xFF80),
        (0x7F800001, 0x7FC0),  # a NaN whose payload is cut off stays a NaN
        (0xFFFFFFFF, 0x7FC0),  # there is one NaN
    ],
)
def test_bfloat16_at_the_edges(bits: int, expected: int) -> None:
    assert hex(int(narrow(floats([bits]), BFLOAT16)[0])) == hex(expected)


@pytest.mark.filterwarnings("error")
def test_a_float16_overflow_is_infinite_without_a_warning() -> None:
    assert narrow(np.array([1e6, -1e6, np.nan], np.float32), FLOAT16)[:2].tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize("element", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("count", [0, 1, BLOCK_COUNT - 1, BLOCK_COUNT, 2 * BLOCK_COUNT + 3])
def test_any_count_is_converted_whole(element: Any, count: int) -> None:
    values = (np.arange(count) % 200).astype(np.float32)
    assert np.array_equal(widen(narrow(values, element), element), values)


def test_the_input_is_not_changed() -> None:
    values = floats([0x3F808001, 0x7F800001])
    before = values.tobytes()
    narrow(values, BFLOAT16)
    assert values.tobytes() == before
