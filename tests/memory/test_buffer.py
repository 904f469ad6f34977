"""Buffer: address, view, overlap."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from mpdist.errors import UsageError
from mpdist.memory import BY_NAME, HOST, Buffer, Device, as_buffer, is_same, overlap
from mpdist.memory.buffer import device_of


def on_cuda(address: int, nbytes: int, index: int = 0) -> Buffer:
    return Buffer(None, nbytes, nbytes, BY_NAME["uint8"], Device("cuda", index), False, None, address)


@pytest.mark.parametrize("name", [None, 0, "gpu", "cuda:x"])
def test_what_names_no_device_is_told(name: object) -> None:
    with pytest.raises(UsageError, match="it must be 'cpu', 'cuda' or 'cuda:1'"):
        device_of(name)  # type: ignore[arg-type]


def test_the_address_is_that_of_the_first_byte() -> None:
    x = np.arange(10, dtype=np.int16)
    assert as_buffer(x).address == x.ctypes.data
    assert as_buffer(x[3:]).address == x.ctypes.data + 6


def test_the_view_shares_memory_and_is_one_dimensional() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    view = as_buffer(x).array()
    view[4] = 40
    assert view.shape == (6,)
    assert x[1, 1] == 40


def test_the_view_of_read_only_memory_is_read_only() -> None:
    x = np.arange(3)
    x.flags.writeable = False
    for source in (x, b"abc", memoryview(b"abc")):
        assert not as_buffer(source).array().flags.writeable
    assert as_buffer(bytearray(b"abc")).array().flags.writeable


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
def test_an_empty_array_has_an_empty_view(shape: tuple[int, ...]) -> None:
    buffer = as_buffer(np.empty(shape, np.complex64))
    assert (buffer.count, buffer.nbytes, buffer.shape) == (0, 0, shape)
    assert buffer.array().shape == (0,)
    assert buffer.array().dtype == np.complex64


def test_the_view_keeps_the_memory_alive() -> None:
    views = [as_buffer(np.full(1000, i)).array() for i in range(50)]
    gc.collect()
    assert [int(view[-1]) for view in views] == list(range(50))


def test_the_view_of_a_tensor_keeps_its_memory_alive() -> None:
    torch = pytest.importorskip("torch")
    views = [as_buffer(torch.full((1000,), i)).array() for i in range(50)]
    gc.collect()
    assert [int(view[-1]) for view in views] == list(range(50))


@pytest.mark.parametrize("name", ["float64", "int8", "bfloat16"])
def test_the_bare_view_of_a_tensor_is_its_memory(name: str) -> None:
    torch = pytest.importorskip("torch")
    whole = torch.arange(12).to(getattr(torch, name))
    for x in (whole, whole[5:], whole.reshape(3, 4), whole[:0]):
        buffer = as_buffer(x)
        bare, kept = buffer.bare_array(), buffer.array()
        assert bare.dtype == kept.dtype
        assert (bare == kept).all()
        assert bare.shape == (x.numel(),)
        bare[...] = 0
        assert not x.any()


def test_ranges_overlap_if_they_share_a_byte() -> None:
    x = np.zeros(10)
    assert overlap(as_buffer(x), as_buffer(x))
    assert overlap(as_buffer(x[:6]), as_buffer(x[5:]))
    assert not overlap(as_buffer(x[:5]), as_buffer(x[5:]))
    assert not overlap(as_buffer(x), as_buffer(np.zeros(10)))


def test_what_is_empty_overlaps_nothing() -> None:
    x = np.zeros(10)
    assert not overlap(as_buffer(x), as_buffer(x[3:3]))
    assert not overlap(as_buffer(x[:0]), as_buffer(x[:0]))


def test_the_same_number_on_another_device_is_another_address() -> None:
    assert overlap(on_cuda(100, 10), on_cuda(105, 10))
    assert not overlap(on_cuda(100, 10), on_cuda(105, 10, index=1))
    host = Buffer(None, 10, 10, BY_NAME["uint8"], HOST, False, None, 100)
    assert not overlap(host, on_cuda(100, 10))
    assert not is_same(host, on_cuda(100, 10))


def test_the_same_bytes_are_the_same_whatever_their_type() -> None:
    x = np.zeros(4, np.float32)
    assert is_same(as_buffer(x), as_buffer(x.view(np.int32)))
    assert not is_same(as_buffer(x), as_buffer(x[:3]))


def test_a_part_of_a_buffer_can_be_given_its_own_shape() -> None:
    buffer = as_buffer(np.zeros(6))
    buffer.shape = (2, 3)
    assert buffer.shape == (2, 3)


def test_the_repr_shows_type_count_device_and_access() -> None:
    assert repr(as_buffer(np.zeros(3, np.float32))) == "<Buffer float32 x 3 on cpu>"
    assert repr(as_buffer(b"ab")) == "<Buffer uint8 x 2 on cpu, read-only>"
    assert repr(on_cuda(0, 4, index=1)) == "<Buffer uint8 x 4 on cuda:1>"
