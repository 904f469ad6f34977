"""Borrowed kernels: torch's conversions and sums of 16-bit types, where the program has loaded torch.

They take one pass where NumPy takes ten. torch is never imported here. Its
results are ours bit for bit, which is checked once, on every kind of value;
where they are not, or torch is in the middle of something that changes what
its functions do, nothing is borrowed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from mpdist.memory.elements import Array, Element
from mpdist.memory.half import QUIET_NAN, Float32, has_nan, has_negative_nan, narrow_into, quieten, widen

# torch shares a kernel among threads from 32768 elements on (its GRAIN_SIZE); less, by a cache line, and it does not.
SERIAL_COUNT = 32768 - 64

_FLOAT32 = np.dtype(np.float32)


class TorchKernels:
    """torch on arrays of one 16-bit type: at most `limit` elements a call, so that no other thread is woken."""

    __slots__ = ("_dtype", "_float32", "_may_be_nan", "_name", "_torch")

    def __init__(self, torch: Any, element: Element, may_be_nan: Callable[[Array, str], bool]) -> None:
        self._torch = torch
        self._name = element.name
        self._dtype = getattr(torch, element.name)
        self._float32 = torch.float32
        self._may_be_nan = may_be_nan

    def _tensor(self, x: Array) -> Any:
        return self._torch.frombuffer(x, dtype=self._float32 if x.dtype == _FLOAT32 else self._dtype)

    def limit(self, if_single: int) -> int:
        """How many elements to take at a time: `if_single` where torch has a single thread anyway."""
        return if_single if self._torch.get_num_threads() == 1 else SERIAL_COUNT

    def _quieten(self, out: Array) -> None:
        if self._may_be_nan(out, self._name):
            quieten(out, self._name)

    def add(self, a: Array, b: Array, out: Array) -> None:
        """The sum of two storage arrays, rounded once; `out` may be one of them."""
        self._torch.add(self._tensor(a), self._tensor(b), out=self._tensor(out))
        self._quieten(out)

    def widen(self, x: Array, out: Float32) -> None:
        """As half.widen_into."""
        self._tensor(out).copy_(self._tensor(x))

    def narrow(self, values: Float32, out: Array) -> None:
        """As half.narrow_into."""
        self._tensor(out).copy_(self._tensor(values))
        self._quieten(out)


# By element type; None where torch disagrees.
_known: dict[str, TorchKernels | None] = {}


def torch_kernels(element: Element) -> TorchKernels | None:
    """The kernels for a 16-bit type if torch is loaded and agrees with us; None if not, or not now."""
    torch = sys.modules.get("torch")
    if torch is None or not _is_plain(torch):
        return None
    if element.name not in _known:
        _known[element.name] = _choose(torch, element)
    return _known[element.name]


def _is_plain(torch: ModuleType) -> bool:
    """Whether nothing stands between us and the kernels: a half-done import, a default device, fake tensors."""
    if getattr(torch.__spec__, "_initializing", False):
        return False
    return torch._C._len_torch_dispatch_stack() == 0 and torch._C._len_torch_function_stack() == 0  # type: ignore[no-any-return]


def _choose(torch: ModuleType, element: Element) -> TorchKernels | None:
    for may_be_nan in (has_negative_nan, has_nan):
        kernels = TorchKernels(torch, element, may_be_nan)
        if _agrees(kernels, element):
            return kernels
    return None


def _agrees(kernels: TorchKernels, element: Element) -> bool:
    """Compare with NumPy: all kinds of values, and single NaNs within and after the part that is done in vectors."""
    every = np.random.default_rng(1).permutation(np.arange(2**16, dtype=np.uint16)).view(element.storage)
    count = SERIAL_COUNT - 1
    if not _agree_on(kernels, element, every[:count], every[-count:]):
        return False
    return all(
        _agree_on(kernels, element, *_single_nan(element, bits, at)) for bits in (1, 0x3F, 0x8001) for at in (0, -1)
    )


def _single_nan(element: Element, bits: int, at: int) -> tuple[Array, Array]:
    values = np.zeros(77, np.uint16)
    values[at] = QUIET_NAN[element.name] ^ bits
    return values.view(element.storage), np.zeros(77, element.storage)


def _agree_on(kernels: TorchKernels, element: Element, values: Array, partners: Array) -> bool:
    wide, total = np.empty(len(values), np.float32), widen(values, element)
    added, narrowed, expected = partners.copy(), np.empty_like(values), np.empty_like(values)
    kernels.widen(values.copy(), wide)
    if not np.array_equal(wide, total, equal_nan=True):
        return False
    with np.errstate(all="ignore"):
        total += widen(partners, element)
    narrow_into(total, expected, element)
    kernels.narrow(total, narrowed)
    kernels.add(values.copy(), added, added)
    return narrowed.tobytes() == added.tobytes() == expected.tobytes()
