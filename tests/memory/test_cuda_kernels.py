"""Kernels reduce as Folder does: their source, compiled for the host, where each thread runs after the other."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpdist.errors import UsageError
from mpdist.memory import BY_NAME, ELEMENTS, Element, Folder, as_op, check_op, premul_sum
from mpdist.memory import cuda_kernels as kernels
from mpdist.memory.elements import Array
from mpdist.memory.ops import OP_NAMES, ReduceOp

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

SOURCES, TARGETS = 3, 2

SHIM = """
#include <cstring>
#define __device__
#define __global__
#define __align__(bytes) alignas(bytes)
struct Dim { int x; };
static Dim blockIdx, blockDim, threadIdx, gridDim;
static inline float __uint_as_float(unsigned int x) { float y; memcpy(&y, &x, 4); return y; }
static inline unsigned int __float_as_uint(float x) { unsigned int y; memcpy(&y, &x, 4); return y; }
"""
FLOAT16 = """
inline float widened(unsigned short x) { _Float16 value; memcpy(&value, &x, 2); return value; }
inline unsigned short narrowed(float value) {
    _Float16 half = value; unsigned short x; memcpy(&x, &half, 2);
    return value != value ? 0x7E00 : x;
}
"""
CASE = """
namespace case{number} {{
{source}
}}
extern "C" void run{number}(void** x, void** y, long long count, int is_aligned, {real} terms, void* factors) {{
    using namespace case{number};
    Value* factor = (Value*)factors;
    gridDim.x = 3; blockDim.x = 5;
    for (blockIdx.x = 0; blockIdx.x < 3; blockIdx.x++) for (threadIdx.x = 0; threadIdx.x < 5; threadIdx.x++)
        fold({arguments});
}}
"""


def folder_of(op: str, element: Element) -> Folder | None:
    """None where the op does not fit the type."""
    named = premul_sum(3) if op == "premul_sum" else as_op(op)
    try:
        check_op(named, element)
    except UsageError:
        return None
    factors = [2, 3, 1] if op == "premul_sum" else None
    return Folder(ReduceOp(named.name, named.factor), element, SOURCES, factors)


CASES = [
    (op, element, folder)
    for op, element in itertools.product((*OP_NAMES, "premul_sum"), ELEMENTS)
    if (folder := folder_of(op, element)) is not None
]


def text_of(number: int, folder: Folder) -> str:
    source = kernels.source(folder, SOURCES, TARGETS).replace(kernels._FLOAT16, FLOAT16)
    source = source.replace(kernels._FLOAT32, kernels.operators("float"))
    source = source.replace(f'extern "C" __global__ void {kernels.NAME}', "void fold")
    arguments = [f"(Stored*)x[{index}]" for index in range(SOURCES)]
    arguments += [f"(Stored*)y[{index}]" for index in range(TARGETS)]
    arguments += ["count", "is_aligned", "terms"]
    arguments += [f"factor[{index}]" for index in range(SOURCES)] if folder.factors else []
    real = "double" if kernels.real_of(folder.element) is np.float64 else "float"
    return CASE.format(number=number, source=source, arguments=", ".join(arguments), real=real)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("kernels")
    code = SHIM + "".join(text_of(number, folder) for number, (_, _, folder) in enumerate(CASES))
    (folder / "kernels.cpp").write_text(code)
    flags = ["-O0", "-shared", "-fPIC", "-ffp-contract=off", "-w"]
    command = ["g++", *flags, "-o", str(folder / "kernels.so"), str(folder / "kernels.cpp")]
    subprocess.run(command, check=True, timeout=120)
    return ctypes.CDLL(str(folder / "kernels.so"))


def values_of(element: Element, count: int, seed: int) -> Array:
    """Of all bits but for bool; with NaNs and infinities where there are."""
    random = np.random.default_rng(seed)
    if element.kind == "bool":
        return random.integers(0, 2, count).astype(np.bool_)
    octets = random.integers(0, 256, count * element.itemsize, np.uint8)
    array: Array = octets.view(element.storage).copy()
    if element.kind == "complex":  # those of all sizes overflow in the order of operations, which NumPy chooses
        array = (random.integers(-9, 9, count) + 1j * random.integers(-9, 9, count)).astype(element.storage)
    return array


def aligned(values: Array, offset: int) -> Array:
    """A copy that begins so many elements after a multiple of 16 bytes."""
    room = np.empty(values.nbytes + 64, np.uint8)
    start = -room.__array_interface__["data"][0] % 16 + offset * values.itemsize
    copy: Array = room[start : start + values.nbytes].view(values.dtype)
    copy[:] = values
    return copy


def run(call: Any, folder: Folder, xs: list[Array], ys: list[Array]) -> None:
    addresses = [x.__array_interface__["data"][0] for x in [*xs, *ys]]
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    factors = np.array(folder.factors or [0]) if folder.factors else np.zeros(1)
    real = ctypes.c_double if kernels.real_of(folder.element) is np.float64 else ctypes.c_float
    call(
        pointers, ctypes.byref(pointers, len(xs) * ctypes.sizeof(ctypes.c_void_p)), ctypes.c_longlong(len(xs[0])),
        ctypes.c_int(kernels.are_aligned(addresses)), real(folder.terms), ctypes.c_void_p(factors.ctypes.data),
    )  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{CASES[i][1].name}")
def test_a_kernel_gives_what_the_host_gives(library: ctypes.CDLL, number: int) -> None:
    _, element, folder = CASES[number]
    for count, offset in itertools.product((1, 7, 16, 100, 259), (0, 1)):
        xs = [aligned(values_of(element, count, 10 * count + index), offset) for index in range(SOURCES)]
        before = [x.copy() for x in xs]
        expected = np.empty_like(xs[0])
        folder.fold(xs, [expected])
        ys = [aligned(np.zeros_like(xs[0]), offset), xs[1]]  # a target may be a source
        run(getattr(library, f"run{number}"), folder, xs, ys)
        for y in ys:
            assert_same(y, expected, element)
        np.testing.assert_array_equal(xs[0].view(np.uint8), before[0].view(np.uint8))


def assert_same(found: Array, expected: Array, element: Element) -> None:
    """The same bits; but for the bits of a NaN of 32 and 64, and which of 0 and -0 is the smaller."""
    if element.kind == "float" and not element.is_half:
        np.testing.assert_array_equal(found, expected)
        return
    if element.is_half:
        zeros = [(each & 0x7FFF) == 0 for each in (found.view(np.uint16), expected.view(np.uint16))]
        np.testing.assert_array_equal(*zeros)
        np.testing.assert_array_equal(found.view(np.uint16)[~zeros[0]], expected.view(np.uint16)[~zeros[0]])
        return
    np.testing.assert_array_equal(found, expected)


def test_products_are_not_contracted_into_sums() -> None:
    assert "--fmad=false" in kernels.FLAGS


def test_blocks_are_as_many_as_there_is_work_for() -> None:
    element = BY_NAME["float32"]
    assert [kernels.blocks(element, count) for count in (1, 1024, 1025, 10**9)] == [1, 1, 2, kernels.MAX_BLOCKS]
