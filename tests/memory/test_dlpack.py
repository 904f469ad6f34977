"""DLPack: arrays of libraries that mpdist does not know by name."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from mpdist.errors import UnsupportedBuffer
from mpdist.memory import ELEMENTS, as_buffer

NUMPY_NAMES = [element.name for element in ELEMENTS if element.numpy is not None]


class Foreign:
    """Another library's array: nothing but DLPack, in the form of before or after version 1."""

    def __init__(self, inner: Any, *, versioned: bool) -> None:
        self.inner = inner
        self.versioned = versioned
        self.shape = inner.shape

    def __dlpack__(self, **options: object) -> object:
        if options and not self.versioned:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        return self.inner.__dlpack__(**options)


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (1, 3, 1), (2, 3)])
@pytest.mark.parametrize("name", NUMPY_NAMES)
def test_an_array_is_read_in_place(name: str, shape: tuple[int, ...], versioned: bool) -> None:
    inner = np.ones(shape, name)
    x = Foreign(inner, versioned=versioned)
    buffer = as_buffer(x)
    assert (buffer.element.name, buffer.count, buffer.shape) == (name, inner.size, shape)
    assert buffer.owner is x
    assert buffer.array().tolist() == inner.ravel().tolist()
    if inner.size:
        assert buffer.address == inner.ctypes.data


@pytest.mark.parametrize("versioned", [False, True])
def test_bfloat16_is_known_to_dlpack(versioned: bool) -> None:
    torch = pytest.importorskip("torch")
    inner = torch.ones(3, dtype=torch.bfloat16)
    buffer = as_buffer(Foreign(inner, versioned=versioned))
    assert buffer.element.name == "bfloat16"
    assert buffer.array().tolist() == [0x3F80] * 3


def test_a_foreign_array_is_only_a_source() -> None:
    x = Foreign(np.ones(3), versioned=True)
    assert not as_buffer(x).array().flags.writeable
    with pytest.raises(UnsupportedBuffer, match="read-only"):
        as_buffer(x, writable=True)


class Traced(np.ndarray[Any, Any]):
    """An array whose end can be observed."""


def test_the_memory_lives_as_long_as_a_view_and_is_given_back_then() -> None:
    inner = np.arange(5.0).view(Traced)
    end = weakref.ref(inner)
    view = as_buffer(Foreign(inner, versioned=True)).array()
    del inner
    gc.collect()
    assert end() is not None
    assert view.tolist() == [0, 1, 2, 3, 4]
    del view
    gc.collect()
    assert end() is None


@pytest.mark.parametrize("x", [np.ones((2, 3)).T, np.ones(6)[::2]])
def test_strided_memory_is_refused(x: np.ndarray[Any, Any]) -> None:
    with pytest.raises(UnsupportedBuffer, match="ascontiguousarray"):
        as_buffer(Foreign(x, versioned=True))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_an_unknown_type_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(UnsupportedBuffer, match="DLPack code"):
        as_buffer(Foreign(torch.ones(2, dtype=torch.complex32), versioned=True))


class Silent:
    """A tracer or a sharded array: it has the method, and refuses."""

    def __dlpack__(self, **options: object) -> object:
        raise RuntimeError("no memory here")


class Liar:
    def __dlpack__(self, **options: object) -> object:
        return 3


def test_an_array_that_does_not_export_itself_is_refused_with_its_reason() -> None:
    with pytest.raises(UnsupportedBuffer, match="no memory here"):
        as_buffer(Silent())
    with pytest.raises(UnsupportedBuffer, match="capsule"):
        as_buffer(Liar())


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int32", "bool", "complex64"])
def test_a_jax_array_is_a_source(name: str) -> None:
    jnp = pytest.importorskip("jax.numpy")
    x = jnp.ones((2, 3), name)
    buffer = as_buffer(x)
    assert (buffer.element.name, buffer.count, buffer.shape) == (name, 6, (2, 3))
    assert buffer.array().tobytes() == np.asarray(x).tobytes()
    with pytest.raises(UnsupportedBuffer, match="read-only"):
        as_buffer(x, writable=True)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int32", "bool_", "complex64"])
def test_an_mlx_array_is_a_source(name: str) -> None:
    mx = pytest.importorskip("mlx.core")
    x = mx.ones((2, 3), getattr(mx, name))
    buffer = as_buffer(x)
    assert (buffer.element.name, buffer.count) == (name.removesuffix("_"), 6)
    assert buffer.array()[0] == (0x3F80 if name == "bfloat16" else 1)
