"""New arrays for results that the caller did not bring: of the input's library where it has one, else NumPy's."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import numpy as np
import numpy.typing as npt

from mpdist.errors import UsageError
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


def shape_and_type(shape: int | Sequence[int], dtype: npt.DTypeLike) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    """What NumPy makes of the shape and the type of an array that is to be shared.

    Raises:
        UsageError: the shape is no shape, or none that an array can have; there is no such type, or the elements are
            Python objects.
    """
    try:
        dims = _dims(shape)
    except TypeError:
        raise UsageError(f"shape is {shape!r}; it must be an integer or a sequence of integers") from None
    try:
        of = np.dtype(dtype)
    except TypeError as error:
        raise UsageError(f"dtype is {dtype!r}; it must be a type of NumPy: {error}") from None
    if of.hasobject or min(dims, default=0) < 0:
        raise UsageError(
            f"shared memory for an array of shape {dims} and type {of} was asked for; lengths are >= 0, and "
            "elements cannot be Python objects, which mean nothing to another process"
        )
    try:  # one element for all of them, so that NumPy tells without the memory
        np.ndarray(dims, of, np.empty(1, of), strides=(0,) * len(dims))
    except ValueError as error:
        raise UsageError(f"an array of shape {dims} and type {of} is impossible, make it smaller: {error}") from error
    return dims, of


def _dims(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        return (index(shape),)  # type: ignore[arg-type]  # most are no integers
    except TypeError:  # also from an array of lengths, which has __index__ all the same
        return tuple(index(length) for length in shape)  # type: ignore[union-attr]  # nor is it one here
