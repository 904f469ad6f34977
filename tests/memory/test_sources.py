"""as_buffer: what every kind of array becomes, and what is refused in which words."""

from __future__ import annotations

import array
import ctypes
import enum
import mmap
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from pickle import PickleBuffer
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpdist.errors import UnsupportedBuffer, UsageError
from mpdist.memory import ELEMENTS, as_buffer, sources
from mpdist.memory.buffer import TORCH_DEVICES, cuda

NUMPY_NAMES = [element.name for element in ELEMENTS if element.numpy is not None]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (5,), (2, 3), (1, 4, 1), (3, 0, 2)]


def other_endian(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("S")


# ---------------------------------------------------------------------- NumPy


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NUMPY_NAMES)
def test_a_numpy_array_is_described_without_a_copy(name: str, shape: tuple[int, ...]) -> None:
    x = np.ones(shape, name)
    buffer = as_buffer(x, writable=True)
    assert (buffer.element.name, buffer.count, buffer.nbytes, buffer.shape) == (name, x.size, x.nbytes, shape)
    assert buffer.owner is x
    assert not buffer.readonly
    assert buffer.device.is_host
    if x.size:
        assert buffer.address == x.ctypes.data
        assert np.shares_memory(buffer.array(), x)
    assert buffer.array().tolist() == x.ravel().tolist()


@pytest.mark.parametrize("name", NUMPY_NAMES)
def test_the_exporter_gives_exactly_the_memory(name: str) -> None:
    x = np.ones((2, 3), name)
    exporter: Any = as_buffer(x).exporter
    assert memoryview(exporter).nbytes == x.nbytes


@pytest.mark.parametrize("name", NUMPY_NAMES)
def test_a_numpy_scalar_is_a_read_only_source(name: str) -> None:
    scalar = np.ones((), name)[()]
    buffer = as_buffer(scalar)
    assert (buffer.element.name, buffer.count, buffer.shape) == (name, 1, ())
    assert buffer.array().tolist() == [scalar.item()]
    with pytest.raises(UnsupportedBuffer, match="read-only"):
        as_buffer(scalar, writable=True)


def test_an_array_of_zero_dimensions_can_be_written() -> None:
    x = np.array(1.5)
    as_buffer(x, writable=True).array()[0] = 2.5
    assert x == 2.5


@given(st.lists(st.integers(0, 3), max_size=4), st.permutations(range(4)), st.sampled_from([1, 2]))
def test_contiguity_is_what_numpy_says(shape: list[int], order: list[int], step: int) -> None:
    axes = [axis for axis in order if axis < len(shape)]
    x = np.zeros(shape).transpose(axes)[..., ::step] if shape else np.zeros(())
    if x.flags.c_contiguous:
        assert as_buffer(x).count == x.size
    else:
        with pytest.raises(UnsupportedBuffer, match="ascontiguousarray"):
            as_buffer(x)


def test_subclasses_that_are_plain_memory_are_taken(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "x", np.float64, "w+", shape=(4,))
    assert as_buffer(mapped, writable=True).nbytes == 32
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix([[1.0, 2.0]])
    assert as_buffer(matrix).array().shape == (2,)


def test_more_than_two_billion_elements_are_counted() -> None:
    count = 2**31 + 5
    buffer = as_buffer(np.empty(count, np.uint8))  # never touched, so it costs no memory
    assert (buffer.count, buffer.nbytes, buffer.array().size) == (count, count, count)


def test_ml_dtypes_bfloat16_is_bfloat16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.ones(3, ml_dtypes.bfloat16)
    buffer = as_buffer(x, writable=True)
    exporter: Any = buffer.exporter
    assert buffer.element.name == "bfloat16"
    assert buffer.array().tolist() == [0x3F80] * 3
    assert memoryview(exporter).nbytes == 6


# ---------------------------------------------------------------------- torch


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [element.name for element in ELEMENTS])
def test_a_torch_tensor_is_described_without_a_copy(name: str, shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    x: Any = torch.ones(shape, dtype=getattr(torch, name))
    buffer = as_buffer(x, writable=True)
    assert (buffer.element.name, buffer.count, buffer.shape) == (name, x.numel(), shape)
    assert buffer.nbytes == x.numel() * x.element_size()
    assert buffer.device.is_host
    if x.numel():
        assert buffer.address == x.data_ptr()
        buffer.array()[:] = 0
        assert not any(x.flatten().tolist())
    assert buffer.owner is x


def test_a_tensor_that_requires_grad_is_taken_as_its_memory() -> None:
    torch = pytest.importorskip("torch")
    for x in (torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(3))):
        assert as_buffer(x, writable=True).address == x.data_ptr()


def torch_refusals() -> dict[str, tuple[Callable[[Any], Any], str]]:
    return {
        "strided": (lambda torch: torch.ones(4, 4)[:, 1], r"x\.contiguous\(\)"),
        "transposed": (lambda torch: torch.ones(2, 3).T, r"x\.contiguous\(\)"),
        "expanded": (lambda torch: torch.ones(1).expand(3), r"x\.contiguous\(\)"),
        "sparse": (lambda torch: torch.eye(3).to_sparse(), r"to_dense"),
        "sparse rows": (lambda torch: torch.eye(3).to_sparse_csr(), r"to_dense"),
        "meta": (lambda torch: torch.ones(3, device="meta"), r"device meta"),
        "nested": (lambda torch: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"unbind\(\)"),
        "jagged": (
            lambda torch: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            r"unbind\(\)",
        ),
        "conjugated": (lambda torch: torch.ones(3, dtype=torch.complex64).conj(), r"resolve_conj"),
        "negated": (lambda torch: torch.ones(1, dtype=torch.complex64).conj().imag, r"resolve_neg"),
        "float8": (lambda torch: torch.ones(3).to(torch.float8_e4m3fn), r"torch\.float8_e4m3fn"),
        "quantized": (lambda torch: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8), r"torch\.qint8"),
        "freed": (freed_tensor, r"without memory"),
        "lazy": (lambda torch: torch.nn.UninitializedParameter(), r"on a batch first"),
        "fake": (fake_tensor, r"unwrap"),
    }


def freed_tensor(torch: Any) -> Any:
    x = torch.ones(3)
    x.untyped_storage().resize_(0)
    return x


def fake_tensor(torch: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", torch_refusals())
def test_a_tensor_without_plain_memory_is_refused(case: str) -> None:
    torch = pytest.importorskip("torch")
    make, words = torch_refusals()[case]
    with pytest.raises(UnsupportedBuffer, match=words):
        as_buffer(make(torch))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda torch: torch.ones(3, device="meta"), r"without memory"),
        (lambda torch: torch.nn.UninitializedParameter(device="meta"), r"on a batch first"),
        (lambda torch: torch.ones(4, 4, device="meta")[:, 1], r"x\.contiguous\(\)"),
    ],
    ids=["freed", "lazy", "strided"],
)
def test_a_tensor_of_a_device_without_plain_memory_is_refused(
    make: Callable[[Any], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(TORCH_DEVICES, "meta", cuda)  # whose tensors have no memory, as freed ones of a GPU
    with pytest.raises(UnsupportedBuffer, match=words):
        as_buffer(make(torch))


def test_a_tensor_of_a_device_under_vmap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(TORCH_DEVICES, "meta", cuda)

    def identity(x: Any) -> Any:
        with pytest.raises(UnsupportedBuffer, match="without memory"):
            as_buffer(x)
        return x

    assert torch.vmap(identity)(torch.ones(2, 3, device="meta")).shape == (2, 3)


def test_a_tensor_under_vmap_is_refused() -> None:
    torch = pytest.importorskip("torch")

    def identity(x: Any) -> Any:
        with pytest.raises(UnsupportedBuffer, match="without memory"):
            as_buffer(x)
        return x

    assert torch.vmap(identity)(torch.ones(2, 3)).shape == (2, 3)


# ---------------------------------------------------------------------- the standard library


@pytest.mark.parametrize("code", "bBhHiIlLqQfd")
def test_an_array_array_is_taken_by_its_type_code(code: str) -> None:
    x = array.array(code, [1, 2, 3])
    buffer = as_buffer(x, writable=True)
    assert buffer.element.numpy == np.dtype(code)
    assert buffer.array().tolist() == [1, 2, 3]
    assert buffer.shape == (3,)


def test_bytes_are_a_source_and_bytearrays_a_target_too() -> None:
    assert as_buffer(b"abc").array().tolist() == list(b"abc")
    target = bytearray(3)
    as_buffer(target, writable=True).array()[:] = 7
    assert target == b"\7\7\7"
    assert as_buffer(b"").count == 0


@pytest.mark.parametrize("name", NUMPY_NAMES)
def test_a_memoryview_has_the_type_of_its_format(name: str) -> None:
    if name.startswith("complex") and sys.version_info >= (3, 14):
        pytest.skip("memoryview formats of complex numbers are changing")
    x = np.ones((2, 3), name)
    buffer = as_buffer(x.data, writable=True)
    assert (buffer.element.name, buffer.count, buffer.shape) == (name, 6, (2, 3))
    assert buffer.address == x.ctypes.data


def test_a_mapped_file_is_memory() -> None:
    with mmap.mmap(-1, 4096) as mapped:
        buffer = as_buffer(mapped, writable=True)
        buffer.array()[5] = 1
        assert buffer.nbytes == 4096
        assert mapped[5] == 1
        del buffer


def test_a_ctypes_array_is_memory() -> None:
    x = (ctypes.c_double * 3)(1, 2, 3)
    buffer = as_buffer(x, writable=True)
    assert buffer.element.name == "float64"
    assert buffer.owner is x
    assert buffer.array().tolist() == [1, 2, 3]


# ---------------------------------------------------------------------- protocols


class CudaArray:
    """Speaks `__cuda_array_interface__`; the address is never followed."""

    def __init__(self, shape: tuple[int, ...], typestr: str = "<f4", readonly: bool = False, **more: object) -> None:
        self.shape = shape
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (4096, readonly),
            "version": 3,
            **more,
        }


def test_a_cuda_array_is_described_by_its_interface() -> None:
    x = CudaArray((2, 3), strides=(12, 4))
    buffer = as_buffer(x, writable=True)
    assert (buffer.element.name, buffer.count, buffer.nbytes, buffer.shape) == ("float32", 6, 24, (2, 3))
    assert (buffer.device.kind, buffer.device.index, buffer.address) == ("cuda", 0, 4096)
    assert buffer.exporter is None


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (CudaArray((2, 3), strides=(4, 8)), "contiguous"),
        (CudaArray((2, 3), mask=object()), "mask"),
        (CudaArray((2,), "<M8[s]"), "dtype <M8"),
    ],
)
def test_a_cuda_array_that_is_not_plain_memory_is_refused(x: CudaArray, words: str) -> None:
    with pytest.raises(UnsupportedBuffer, match=words):
        as_buffer(x)


def test_a_read_only_cuda_array_is_only_a_source() -> None:
    x = CudaArray((2,), readonly=True)
    assert as_buffer(x).readonly
    with pytest.raises(UnsupportedBuffer, match="read-only"):
        as_buffer(x, writable=True)


class JaxArray:
    """One type for arrays of the host and of GPUs, which has the interface for some elements only."""

    def __init__(self, values: np.ndarray[Any, Any], is_on_gpu: bool) -> None:
        self._values, self._is_on_gpu = values, is_on_gpu
        self.shape, self.dtype = values.shape, values.dtype
        self.device = SimpleNamespace(id=9)  # among the GPUs of all processes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if not self._is_on_gpu:
            raise AttributeError("__cuda_array_interface__ is only defined for GPU buffers.")
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (4096, True), "version": 2}

    def __dlpack__(self, **options: Any) -> object:
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 1) if self._is_on_gpu else (1, 0)


def test_arrays_of_one_type_may_have_the_interface_or_not() -> None:
    values = np.arange(3.0)
    assert as_buffer(JaxArray(values, is_on_gpu=True)).device.kind == "cuda"
    buffer = as_buffer(JaxArray(values, is_on_gpu=False))
    assert (str(buffer.device), buffer.readonly) == ("cpu", True)
    np.testing.assert_array_equal(buffer.array(), values)


def test_a_gpu_is_counted_as_this_process_counts_it() -> None:
    assert str(as_buffer(JaxArray(np.arange(3.0), is_on_gpu=True)).device) == "cuda:1"


# ---------------------------------------------------------------------- refusals


class Colour(enum.Enum):
    RED = 1


class Wrapper:
    def __array__(self) -> np.ndarray[Any, Any]:
        return np.zeros(3)


class Awaitable(Wrapper):
    def __await__(self) -> Iterator[None]:
        return iter(())


# what is given -> the words that say what to do
REFUSED: dict[str, tuple[object, str]] = {
    "None": (None, r"got None.*NumPy array"),
    "int": (3, r"Python int 3.*np\.array\(v\)"),
    "float": (2.5, r"Python float 2\.5.*np\.array\(v\)"),
    "complex": (1j, r"Python complex 1j.*np\.array\(v\)"),
    "huge int": (10**5000, r"Python int; .*np\.array\(v\)"),
    "bool": (True, r"Python bool True.*np\.array\(v\)"),
    "str": ("text", r"a str.*send_object"),
    "list": ([1, 2], r"a list.*np\.array"),
    "tuple": ((1.0, 2.0), r"a tuple.*np\.array"),
    "dict": ({}, r"a dict.*send_object"),
    "enum": (Colour.RED, r"Colour.*send_object"),
    "wrapper": (Wrapper(), r"Wrapper.*np\.asarray"),
    "awaitable": (Awaitable(), r"Awaitable.*its result: `await x`"),
    "object dtype": (np.array([None, 1]), r"dtype object.*send_object"),
    "datetime": (np.zeros(2, "M8[s]"), r"datetime64.*view\(np\.int64\)"),
    "timedelta": (np.zeros(2, "m8[s]"), r"timedelta64.*view\(np\.int64\)"),
    "datetime scalar": (np.datetime64(0, "s"), r"datetime64"),
    "structured": (np.zeros(2, "f4,i4"), r"view\(np\.uint8\)"),
    "record": (np.zeros(2, "f4,i4").view(np.recarray), r"view\(np\.uint8\)"),
    "void": (np.zeros(2, "V4"), r"dtype \|V4"),
    "text dtype": (np.array(["a"]), r"<U1.*send_object"),
    "bytes dtype": (np.array([b"a"]), r"\|S1.*view\(np\.uint8\)"),
    "other byte order": (np.zeros(2, other_endian("f4")), r"x\.astype\(x\.dtype\.newbyteorder\('='\)\)"),
    "longdouble": (np.zeros(2, np.longdouble), r"astype\(np\.float64\)"),
    "clongdouble": (np.zeros(2, np.clongdouble), r"astype\(np\.complex128\)"),
    "strided": (np.zeros(8)[::2], r"not contiguous.*np\.ascontiguousarray"),
    "reversed": (np.zeros(8)[::-1], r"not contiguous.*np\.ascontiguousarray"),
    "broadcast": (np.broadcast_to(np.zeros(1), (3,)), r"np\.ascontiguousarray"),
    "Fortran": (np.zeros((2, 3), order="F"), r"Fortran order.*np\.ascontiguousarray"),
    "masked": (np.ma.masked_array([1.0, 2.0], [False, True]), r"x\.filled"),
    "array of text": (array.array("u", "ab"), r"buffer format"),
    "strided memoryview": (memoryview(b"abcd")[::2], r"not contiguous"),
    "memoryview of another byte order": (np.zeros(2, other_endian("f4")).data, r"buffer format"),
    "memoryview of pointers": (memoryview((ctypes.c_void_p * 2)()), r"buffer format"),
}


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_plain_array_is_refused_with_a_remedy(case: str, writable: bool) -> None:
    x, words = REFUSED[case]
    for _ in range(2):  # a refusal is not remembered as an acceptance
        with pytest.raises(UnsupportedBuffer, match=words):
            as_buffer(x, writable=writable)


def test_a_released_memoryview_is_refused() -> None:
    view = memoryview(b"ab")
    view.release()
    with pytest.raises(UnsupportedBuffer, match="released"):
        as_buffer(view)


def test_a_closed_map_is_refused() -> None:
    mapped = mmap.mmap(-1, 4096)
    mapped.close()
    with pytest.raises(UnsupportedBuffer, match="closed"):
        as_buffer(mapped)


@pytest.mark.parametrize("x", [b"ab", memoryview(b"ab"), np.broadcast_to(np.zeros(()), (1,)), np.float32(1)])
def test_read_only_memory_is_a_source_and_no_target(x: object) -> None:
    assert as_buffer(x).readonly
    with pytest.raises(UnsupportedBuffer, match=r"written|writable"):
        as_buffer(x, writable=True)


@given(st.one_of(st.none(), st.text(), st.floats(), st.integers(), st.lists(st.floats()), st.sets(st.integers())))
def test_python_objects_are_a_usage_error_whatever_they_hold(x: object) -> None:
    with pytest.raises(UsageError, match=r"^got .*; needed "):
        as_buffer(x)


def test_describing_arrays_loads_no_library() -> None:
    program = (
        "import sys, numpy, mpdist.memory as m; m.as_buffer(numpy.ones(3)); m.as_buffer(b'a');"
        "print([name for name in ('torch', 'cupy', 'mpi4py', 'ml_dtypes', 'jax') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


class Exporting:
    """Speaks DLPack, and nothing else."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack__(self, **options: Any) -> object:
        return self.values.__dlpack__()


class Interface:
    """Has `__cuda_array_interface__`, and nothing else; the address is never followed."""

    def __init__(self, values: np.ndarray) -> None:
        self.__cuda_array_interface__ = {"shape": values.shape, "typestr": "<f8", "data": (4096, False), "version": 3}


@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4), (1, 5)])
@pytest.mark.parametrize("make", [Exporting, Interface, PickleBuffer])
def test_the_shape_is_what_the_protocol_says(make: Callable[[np.ndarray], object], shape: tuple[int, ...]) -> None:
    """Few classes that are no arrays tell it themselves: it was lost, and all_gather's result was flat."""
    assert as_buffer(make(np.zeros(shape))).shape == shape


def test_an_array_of_arrays_of_c_has_two_axes() -> None:
    assert as_buffer(((ctypes.c_int * 3) * 2)()).shape == (2, 3)


@pytest.mark.parametrize("x", [np.ndarray, array.array, Exporting, bytes])
def test_a_class_is_no_array(x: type) -> None:
    """Of one with protocols the maker was kept for all classes, and failed with whatever it found there."""
    with pytest.raises(UnsupportedBuffer, match="got a type; needed an array"):
        as_buffer(x)


def test_the_class_of_arrays_on_a_gpu_is_no_array() -> None:
    with pytest.raises(UnsupportedBuffer, match="got a type; needed an array"):
        as_buffer(JaxArray)


class CupyArray:
    """As much of CuPy's as is asked; what it says of itself to others is asked where something is wrong."""

    def __init__(self, shape: tuple[int, ...], dtype: str, is_plain: bool = True) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.size = int(np.prod(shape))
        self.nbytes = self.size * self.dtype.itemsize
        self.flags = SimpleNamespace(c_contiguous=is_plain)
        self.device, self.data = SimpleNamespace(id=2), SimpleNamespace(ptr=4096)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        strides = None if self.flags.c_contiguous else (8,)
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (4096, False), "strides": strides, "version": 3}


def test_cupys_arrays_are_asked_by_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = ModuleType("cupy")
    cupy.ndarray = CupyArray  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    x = CupyArray((3, 5), "float16")
    buffer = as_buffer(x, writable=True)
    assert (buffer.address, buffer.count, buffer.nbytes, buffer.element.name) == (4096, 15, 30, "float16")
    assert (str(buffer.device), buffer.readonly, buffer.owner is x) == ("cuda:2", False, True)
    assert sources.MAKERS[CupyArray] is sources._from_cupy
    with pytest.raises(UnsupportedBuffer, match="contiguous"):
        as_buffer(CupyArray((3,), "float32", is_plain=False))
    with pytest.raises(UnsupportedBuffer, match=r"longdouble|float128|<f16|c32"):
        as_buffer(CupyArray((3,), "longdouble"))
