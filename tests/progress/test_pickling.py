"""Pickling: arrays travel out of band, and come back writable and equal."""

from __future__ import annotations

import numpy as np
import pytest

from mpdist.progress.pickling import decode, encode


def received(frames: list[memoryview]) -> list[memoryview]:
    """The frames as they arrive: in other, writable memory."""
    return [memoryview(np.frombuffer(bytearray(frame), np.uint8)) for frame in frames]


ITEMS = {
    "none": None,
    "text": "é" * 1000,
    "nested": {"a": [1, (2.5, b"x")], "b": {3, 4}},
    "C order": np.arange(12.0).reshape(3, 4),
    "Fortran order": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "strided": np.arange(20)[::3],
    "transposed view": np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
    "empty": np.empty((0, 3)),
    "0-d": np.array(7),
    "structured": np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]),
    "object array": np.array([1, "two", None], object),
    "two arrays": [np.arange(3), np.arange(5.0)],
    "bytearray": bytearray(b"abc"),
}


@pytest.mark.parametrize("name", ITEMS)
def test_an_object_survives(name: str) -> None:
    item = ITEMS[name]
    again = decode(received(encode(item)))
    assert type(again) is type(item)
    np.testing.assert_equal(again, item)


def test_arrays_are_not_copied_into_the_pickle() -> None:
    x = np.arange(100_000.0)
    pickled, *rest = encode([x, x[:50_000]])
    assert pickled.nbytes < 1000
    assert [frame.nbytes for frame in rest] == [800_000, 400_000]
    assert np.shares_memory(np.frombuffer(rest[0], np.uint8), x)


def test_a_received_array_is_writable() -> None:
    again = decode(received(encode(np.arange(4.0))))
    again[:] = 1  # type: ignore[index]  # an array
