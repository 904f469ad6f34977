"""Pickling: an object as frames, the pickle first, then its arrays' memory without copy."""

from __future__ import annotations

import pickle
from collections.abc import Sequence


def encode(item: object) -> list[memoryview]:
    """The pickle and its out-of-band buffers, as byte views of the object's own memory.

    A buffer that is not contiguous stays in the pickle.
    """
    buffers: list[memoryview] = []

    def out_of_band(buffer: pickle.PickleBuffer) -> bool:
        try:
            buffers.append(buffer.raw())
        except BufferError:
            return True
        return False

    return [memoryview(pickle.dumps(item, protocol=5, buffer_callback=out_of_band)), *buffers]


def decode(frames: Sequence[memoryview]) -> object:
    """Inverse of encode; arrays live in the frames' memory."""
    return pickle.loads(frames[0], buffers=frames[1:])
