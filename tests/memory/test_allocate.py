"""Allocation: results have the library, type and device of the input."""

from __future__ import annotations

import array
import sys

import numpy as np
import pytest

from mpdist.errors import Unavailable, UnsupportedBuffer
from mpdist.memory import BY_NAME, ELEMENTS, accelerator, allocate, allocate_like, as_buffer

NUMPY_NAMES = [element.name for element in ELEMENTS if element.numpy is not None]


@pytest.mark.parametrize("name", NUMPY_NAMES)
def test_an_array_is_allocated_with_the_elements_dtype(name: str) -> None:
    x = allocate(BY_NAME[name], (2, 3))
    assert (x.dtype, x.shape) == (np.dtype(name), (2, 3))
    assert allocate(BY_NAME[name], 5).shape == (5,)


def test_bfloat16_cannot_be_allocated_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ml_dtypes", raising=False)
    with pytest.raises(UnsupportedBuffer, match="torch tensor"):
        allocate(BY_NAME["bfloat16"], 3)


@pytest.mark.parametrize("name", NUMPY_NAMES)
def test_like_numpy_is_numpy(name: str) -> None:
    out = allocate_like(np.ones(3, name), (2, 4))
    assert isinstance(out, np.ndarray)
    assert (out.dtype, out.shape) == (np.dtype(name), (2, 4))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_no_memory_is_a_memory_error_in_every_library(library: str) -> None:
    x = pytest.importorskip(library).ones(3)
    with pytest.raises(MemoryError, match=r"(?i)allocate"):
        allocate_like(x, (2**40, 2**10))


@pytest.mark.parametrize("name", [element.name for element in ELEMENTS])
def test_like_torch_is_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    out = allocate_like(torch.ones(3, dtype=getattr(torch, name)), (2, 4))
    assert isinstance(out, torch.Tensor)
    assert (out.dtype, tuple(out.shape)) == (getattr(torch, name), (2, 4))


def test_like_a_parameter_needs_no_gradient() -> None:
    torch = pytest.importorskip("torch")
    out = allocate_like(torch.nn.Parameter(torch.ones(3)), 3)
    assert as_buffer(out, writable=True).count == 3
    assert not getattr(out, "requires_grad", None)


@pytest.mark.parametrize("x", [b"abc", bytearray(3), memoryview(b"abc"), array.array("B", [1, 2, 3])])
def test_like_other_buffers_is_numpy(x: object) -> None:
    out = allocate_like(x, 4)
    assert isinstance(out, np.ndarray)
    assert (out.dtype, out.shape) == (np.uint8, (4,))


def test_like_a_gpu_array_needs_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(accelerator, "_known", {})

    class CudaArray:
        @property
        def __cuda_array_interface__(self) -> dict[str, object]:
            return {"shape": (2,), "typestr": "<f4", "data": (4096, False), "version": 3}

    with pytest.raises(Unavailable, match=r"pip install 'mpdist\[cuda13\]' or 'mpdist\[cuda12\]'"):
        allocate_like(CudaArray(), 2)


def test_like_something_that_is_no_array_is_refused() -> None:
    with pytest.raises(UnsupportedBuffer, match=r"np\.array"):
        allocate_like(3, 2)
