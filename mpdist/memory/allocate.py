"""New arrays for results that the caller did not bring: of the input's library where it has one, else NumPy's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpdist.memory.accelerator import accelerator_of
from mpdist.memory.elements import Array, Element, numpy_dtype
from mpdist.memory.sources import as_buffer


def allocate(element: Element, shape: int | Sequence[int]) -> Array:
    """A NumPy array, not initialised.

    Raises:
        UnsupportedBuffer: bfloat16 without ml_dtypes.
    """
    return np.empty(shape, numpy_dtype(element))


def allocate_like(x: object, shape: int | Sequence[int]) -> object:
    """An array of x's library, type and device, not initialised; NumPy's where x's library has no writable ones.

    Raises:
        UnsupportedBuffer: bfloat16 without ml_dtypes.
        Unavailable: x is on a GPU, and CuPy, which is needed for that, is not installed.
        MemoryError: there is none, whatever x's library raises then.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if isinstance(x, np.ndarray):
        return np.empty(shape, x.dtype)
    new_empty = getattr(x, "new_empty", None)
    if new_empty is not None:
        try:
            return new_empty(shape)
        except RuntimeError as error:  # torch's
            raise MemoryError(str(error)) from error
    buffer = as_buffer(x)
    if buffer.device.is_host:
        return allocate(buffer.element, shape)
    return accelerator_of(buffer.device).empty(shape, numpy_dtype(buffer.element))
