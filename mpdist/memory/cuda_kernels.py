"""CUDA kernels: the source of what reduces arrays of a GPU, element by element, as Folder does on the host.

The source is made for one op, element type and number of arrays, and needs no
header: 16-bit types are computed in float32 and rounded once, by an instruction
(float16) or by their bits (bfloat16); a NaN becomes the one quiet NaN of its type.
Products and sums must be rounded one by one: compile with FLAGS.

What lies at multiples of 16 bytes is read and written so many bytes at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpdist.memory.elements import Element
    from mpdist.memory.folding import Folder

FLAGS = ("--fmad=false",)
NAME = "mpdist_fold"
PACK_BYTES = 16
THREADS = 256
# Enough for every GPU to be busy; more blocks than that take turns.
MAX_BLOCKS = 2048

# How an element is kept, and in what it is computed. Signed integers are added as unsigned ones: they may overflow.
_STORED = {
    "bool": "unsigned char", "int8": "signed char", "int16": "short", "int32": "int", "int64": "long long",
    "uint8": "unsigned char", "uint16": "unsigned short", "uint32": "unsigned int", "uint64": "unsigned long long",
    "float16": "unsigned short", "bfloat16": "unsigned short", "float32": "float", "float64": "double",
}  # fmt: skip
_PARTS = {"complex64": "float", "complex128": "double"}
_HALF = ("float16", "bfloat16")

_TYPES = """
typedef {stored} Stored;
typedef {value} Value;
struct __align__({align}) Pack {{ Stored at[{pack}]; }};
"""

_COMPLEX = """
struct __align__({align}) Complex {{ {part} re, im; }};
"""

_FLOAT16 = """
__device__ inline float widened(unsigned short x) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x));
    return value;
}
__device__ inline unsigned short narrowed(float value) {
    unsigned short x;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x) : "f"(value));
    return value != value ? 0x7E00 : x;
}
"""

_BFLOAT16 = """
__device__ inline float widened(unsigned short x) { return __uint_as_float((unsigned int)x << 16); }
__device__ inline unsigned short narrowed(float value) {
    unsigned int bits = __float_as_uint(value);
    return value != value ? 0x7FC0 : (unsigned short)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
"""

# CuPy has kernels compiled so that subnormal numbers of float32 become 0: instructions that are written out do not.
_STEP = """
__device__ inline float {name}(float a, float b) {{
    float c;
    asm("{instruction}.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}}
"""
_FLOAT32 = (
    "".join(
        _STEP.format(name=name, instruction=instruction)
        for name, instruction in (("plus", "add"), ("minus", "sub"), ("times", "mul"), ("over", "div"))
    )
    + """
__device__ inline bool is_less(float a, float b) {
    int is;
    asm("{ .reg .pred p; setp.lt.f32 p, %1, %2; selp.s32 %0, 1, 0, p; }" : "=r"(is) : "f"(a), "f"(b));
    return is;
}
"""
)

_OPERATORS = """
__device__ inline {real} plus({real} a, {real} b) {{ return a + b; }}
__device__ inline {real} minus({real} a, {real} b) {{ return a - b; }}
__device__ inline {real} times({real} a, {real} b) {{ return a * b; }}
__device__ inline {real} over({real} a, {real} b) {{ return a / b; }}
__device__ inline bool is_less({real} a, {real} b) {{ return a < b; }}
"""

_PLAIN = """
__device__ inline Value widened(Stored x) { return x; }
__device__ inline Stored narrowed(Value value) { return value; }
"""

# One step, a op b. As NumPy: min and max give a NaN where there is one.
_REAL = {
    "sum": "return plus(a, b);",
    "prod": "return times(a, b);",
    "min": "return is_less(a, b) || a != a ? a : b;",
    "max": "return is_less(b, a) || a != a ? a : b;",
}
_INTEGER = {
    "sum": "return (Value)((Unsigned)a + (Unsigned)b);",
    "prod": "return (Value)((Unsigned)a * (Unsigned)b);",
    "min": "return a < b ? a : b;",
    "max": "return a > b ? a : b;",
    "band": "return a & b;",
    "bor": "return a | b;",
    "bxor": "return a ^ b;",
    "land": "return a && b;",
    "lor": "return a || b;",
    "lxor": "return !a != !b;",
}
_OF_COMPLEX = {
    "sum": "Value c; c.re = plus(a.re, b.re); c.im = plus(a.im, b.im); return c;",
    "prod": "Value c; c.re = minus(times(a.re, b.re), times(a.im, b.im)); "
    "c.im = plus(times(a.re, b.im), times(a.im, b.re)); return c;",
}
_SAME = {"avg": "sum", "premul_sum": "sum"}

_KERNEL = """
__device__ inline Value step(Value a, Value b) {{ {step} }}
__device__ inline Value scaled(Value a, Value b) {{ {scale} }}
__device__ inline Value finished(Value a, {terms_type} terms) {{ {finish} }}
__device__ inline Stored folded({stored_arguments}, {constants}) {{
    Value total = {first};
{steps}
    return narrowed(finished(total, terms));
}}
extern "C" __global__ void {name}({pointers}, long long count, int is_aligned, {constants}) {{
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    long long width = (long long)gridDim.x * blockDim.x;
    long long packs = is_aligned ? count / {pack} : 0;
    for (long long i = at; i < packs; i += width) {{
        Pack total;
{loads}
        for (int k = 0; k < {pack}; k++) total.at[k] = folded({pack_values}, {constant_names});
{pack_stores}
    }}
    for (long long i = packs * {pack} + at; i < count; i += width) {{
        Stored total = folded({values}, {constant_names});
{stores}
    }}
}}
"""


def source(folder: Folder, sources: int, targets: int) -> str:
    """CUDA C++ of the kernel NAME.

    Its arguments: the addresses of all sources, then of all targets; the number of elements; whether all addresses
    are multiples of PACK_BYTES; what avg divides by, 1 otherwise; and each source's factor where there are factors.
    """
    element = folder.element
    op = _SAME.get(folder.op.name, folder.op.name)
    steps = _OF_COMPLEX if element.kind == "complex" else _REAL if element.kind == "float" else _INTEGER
    has_factors = folder.factors is not None
    names = range(sources)
    real = "double" if real_of(element) is np.float64 else "float"
    constants = [f"{real} terms", *([f"Value factor{i}" for i in names] if has_factors else [])]
    taken = [f"scaled(widened(x{i}), factor{i})" if has_factors else f"widened(x{i})" for i in names]
    pointers = [*(f"const Stored* x{i}" for i in names), *(f"Stored* y{i}" for i in range(targets))]
    return _preamble(element) + _KERNEL.format(
        name=NAME,
        step=steps[op],
        scale=steps["prod"],
        finish=_finish(element) if divides(folder) else "return a;",
        terms_type=real,
        stored_arguments=", ".join(f"Stored x{i}" for i in names),
        constants=", ".join(constants),
        constant_names=", ".join(each.split()[-1] for each in constants),
        first=taken[0],
        steps="\n".join(f"    total = step(total, {each});" for each in taken[1:]),
        pointers=", ".join(pointers),
        pack=pack_of(element),
        loads="\n".join(f"        Pack p{i} = ((const Pack*)x{i})[i];" for i in names),
        pack_values=", ".join(f"p{i}.at[k]" for i in names),
        pack_stores="\n".join(f"        ((Pack*)y{i})[i] = total;" for i in range(targets)),
        values=", ".join(f"x{i}[i]" for i in names),
        stores="\n".join(f"        y{i}[i] = total;" for i in range(targets)),
    )


def blocks(element: Element, count: int) -> int:
    """Of threads, for so many elements."""
    return min(MAX_BLOCKS, max(1, -(-count // (THREADS * pack_of(element)))))


def pack_of(element: Element) -> int:
    """Elements in PACK_BYTES."""
    return PACK_BYTES // element.itemsize


def divides(folder: Folder) -> bool:
    """Whether the result is divided by the number of terms."""
    return folder.op.name == "avg" and folder.terms is not None


def are_aligned(addresses: Sequence[int]) -> bool:
    return all(address % PACK_BYTES == 0 for address in addresses)


def _preamble(element: Element) -> str:
    part = _PARTS.get(element.name)
    text = _COMPLEX.format(part=part, align=element.itemsize) if part else ""
    stored = "Complex" if part else _STORED[element.name]
    value = "float" if element.name in _HALF else stored
    text += _TYPES.format(stored=stored, value=value, align=PACK_BYTES, pack=pack_of(element))
    if element.kind in ("bool", "int", "uint"):
        # Not of less than 32 bits: those would be computed as int, whose overflow is undefined.
        text += f"typedef unsigned {'long long' if element.itemsize == 8 else 'int'} Unsigned;\n"
    else:
        text += _FLOAT32 if real_of(element) is np.float32 else operators("double")
    return text + {"float16": _FLOAT16, "bfloat16": _BFLOAT16}.get(element.name, _PLAIN)


def operators(real: str) -> str:
    """Steps on a floating point type, as the compiler has them."""
    return _OPERATORS.format(real=real)


def real_of(element: Element) -> type[np.float32] | type[np.float64]:
    """What the number of terms is given as."""
    return np.float64 if element.name in ("float64", "complex128") else np.float32


def _finish(element: Element) -> str:
    if element.kind == "complex":
        return "a.re = over(a.re, terms); a.im = over(a.im, terms); return a;"
    return "return over(a, terms);"
