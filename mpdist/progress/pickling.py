"""Pickling: an object as frames, the pickle first, then its arrays' memory without copy."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from mpdist.progress.interruption import is_of_handler


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
    try:
        return pickle.loads(frames[0], buffers=frames[1:])
    except Exception:
        raise
    except BaseException as error:  # sys.exit in its __setstate__ is no wish to end this rank
        if is_of_handler(error):
            raise
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error
