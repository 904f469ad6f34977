"""Folding of 16-bit types: one block in whichever way is fastest, all of which give the same bits.

added      two sources, one sum: torch does it in one pass
converted  each source widened, the result narrowed: by torch where it is loaded, else by NumPy
paired     NumPy, two values at a time
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from mpdist.memory import pairs
from mpdist.memory.borrowed import torch_kernels
from mpdist.memory.elements import Array, Element
from mpdist.memory.half import Float32, narrow_into, widen_into
from mpdist.memory.ops import divide
from mpdist.memory.scratch import BLOCK_COUNT, SCRATCH

Block: TypeAlias = Callable[[Sequence[Array], Sequence[Array]], None]
"""Reduces the sources into each of the outs."""

# A sum by torch needs no scratch: only the result is to stay in cache until it is copied.
SUM_COUNT = 4 * BLOCK_COUNT

_FLOAT32 = np.dtype(np.float32)

# Where blocks are smaller, the one call that converts costs less than the many that are fast.
MIN_COUNT = 512

# Sums of float16 are multiples of its smallest value: so they stay after up to 13 halvings of what pairs scales.
_FLOAT16_MAX_DIVISOR = 2**13


class HalfFolding:
    """One op on one 16-bit type.

    Attributes:
        divisor: what the result is divided by, if by anything.
        factors: what each source is multiplied by, if by anything.
    """

    __slots__ = ("_can_pair", "_join", "_split", "_ufunc", "divisor", "element", "factors")

    def __init__(
        self, ufunc: np.ufunc, element: Element, divisor: int | None, factors: Sequence[np.float32] | None
    ) -> None:
        self._ufunc: Any = ufunc
        self.element = element
        self.divisor = divisor
        self.factors = factors
        torch_kernels(element)  # compares them once, which takes milliseconds: not in the middle of a collective
        is_bfloat16 = element.name == "bfloat16"
        self._can_pair = is_bfloat16 or (factors is None and ufunc is not np.multiply and _is_exact(divisor))
        self._split = pairs.split_bfloat16 if is_bfloat16 else pairs.split_float16
        self._join = pairs.join_bfloat16 if is_bfloat16 else pairs.join_float16

    def block(self, sources: Sequence[Array], outs: Sequence[Array]) -> tuple[Block, int]:
        """The way for these arrays, and how many elements it takes at a time."""
        arrays = (*sources, *outs)
        if len(outs[0]) < MIN_COUNT:
            return self._by_numpy, BLOCK_COUNT
        is_stored = all(x.dtype == self.element.storage for x in arrays)
        kernels = torch_kernels(self.element)
        if kernels is not None and all(x.flags.writeable for x in arrays):  # torch warns of the others
            if is_stored and len(sources) == 2 and self._is_plain_sum():
                return partial(_added, kernels.add), kernels.limit(SUM_COUNT)
            return partial(self._converted, kernels.widen, kernels.narrow), kernels.limit(BLOCK_COUNT)
        if is_stored and self._can_pair:
            return self._paired, BLOCK_COUNT
        return self._by_numpy, BLOCK_COUNT

    def _is_plain_sum(self) -> bool:
        return self._ufunc is np.add and self.divisor is None and self.factors is None

    def _numpy_widen(self, x: Array, out: Float32) -> None:
        widen_into(x, out, self.element)

    def _numpy_narrow(self, values: Float32, out: Array) -> None:
        narrow_into(values, out, self.element)

    # ------------------------------------------------------------------ converted

    def _converted(
        self,
        widen: Callable[[Array, Float32], None],
        narrow: Callable[[Float32, Array], None],
        sources: Sequence[Array],
        outs: Sequence[Array],
    ) -> None:
        count = len(outs[0])
        first, second = SCRATCH.first[:count], SCRATCH.second[:count]
        acc = self._wide(sources[0], 0, first, widen)
        for index in range(1, len(sources)):
            self._ufunc(acc, self._wide(sources[index], index, second, widen), out=first)
            acc = first
        if self.divisor is not None:
            divide(acc, self.divisor, first)
            acc = first
        self._store(acc, outs, narrow)

    def _wide(self, x: Array, index: int, room: Float32, widen: Callable[[Array, Float32], None]) -> Float32:
        """A source as float32, times its factor: in `room`, or itself where nothing is to be done."""
        if x.dtype != _FLOAT32:
            widen(x, room)
            x = room
        return x if self.factors is None else np.multiply(x, self.factors[index], room)

    def _store(self, acc: Float32, outs: Sequence[Array], narrow: Callable[[Float32, Array], None]) -> None:
        narrowed = None
        for out in outs:
            if out.dtype == _FLOAT32:
                np.copyto(out, acc)
            elif narrowed is None:
                narrow(acc, out)
                narrowed = out
            else:
                np.copyto(out, narrowed)

    # ------------------------------------------------------------------ paired

    def _paired(self, sources: Sequence[Array], outs: Sequence[Array]) -> None:
        count = len(outs[0])
        if count % 2 == 0:
            self._pairs(sources, outs)
            return
        for part, way in ((slice(count - 1), self._pairs), (slice(count - 1, count), self._by_numpy)):
            way([x[part] for x in sources], [out[part] for out in outs])

    def _by_numpy(self, sources: Sequence[Array], outs: Sequence[Array]) -> None:
        self._converted(self._numpy_widen, self._numpy_narrow, sources, outs)

    def _pairs(self, sources: Sequence[Array], outs: Sequence[Array]) -> None:
        if not self._pair_up(sources, outs[0]):
            self._by_numpy(sources, outs)
            return
        for out in outs[1:]:
            np.copyto(out, outs[0])

    def _pair_up(self, sources: Sequence[Array], out: Array) -> bool:
        """Whether it could be done; `out` is untouched if not."""
        wide, spare = pairs.runs(len(out))
        for index, x in enumerate(sources):
            room = spare if index else wide
            if not self._split(x, room):
                return False
            if self.factors is not None:
                np.multiply(room.values, self.factors[index], room.values)
            if index:
                self._ufunc(wide.values, spare.values, out=wide.values)
        if self.divisor is not None:
            divide(wide.values, self.divisor, wide.values)
        return self._join(wide, spare, out)


def _added(add: Callable[[Array, Array, Array], None], sources: Sequence[Array], outs: Sequence[Array]) -> None:
    add(sources[0], sources[1], outs[0])
    for out in outs[1:]:
        np.copyto(out, outs[0])


def _is_exact(divisor: int | None) -> bool:
    return divisor is None or (divisor & (divisor - 1) == 0 and divisor <= _FLOAT16_MAX_DIVISOR)
