"""Folding: several equally long slices are reduced into one result, written to one or several places.

What a rank does with its share of a collective in shared memory: the sources
are the ranks' slices in rank order, the destinations their results. Block by
block, so that each byte is read from memory once and a destination may be a source.

sources   widened if 16-bit; premul_sum multiplies
op        in the order given, so that the result depends on nothing else
result    avg divides; narrowed if 16-bit, rounded once
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from mpdist.memory.elements import BY_NAME, Array, Element
from mpdist.memory.half import narrow_into, widen
from mpdist.memory.half_folding import Block, HalfFolding
from mpdist.memory.ops import Factor, ReduceOp, divide, division, fold, ufunc_of
from mpdist.memory.quiet import QUIET, Call
from mpdist.memory.scratch import BLOCK_BYTES, SCRATCH, blocks

# Two sources need no scratch: they and the result are to stay in a core's cache.
PAIR_BYTES = 2 * BLOCK_BYTES

# Where the result has memory of its own, it is what stays in the cache: of 1 MiB between four ranks the whole slice.
APART_BYTES = 2 * BLOCK_BYTES


class Folder:
    """One op on one element type; kept for all collectives with it, called for every slice.

    Attributes:
        terms: how many ranks' inputs the result stands for, which avg divides by; None: a partial result.
        factors: what premul_sum multiplies each source by; None: by nothing.
        pair: NumPy's function that alone folds two sources into one destination; None where it takes more.
        pair_steps: so many calls of NumPy fold two sources into one destination; 0: it takes more than these, and
            `join` can't fold one source more.
    """

    __slots__ = (
        "_divides",
        "_half",
        "_is_odd_alone",
        "_limit",
        "_ufunc",
        "element",
        "factors",
        "op",
        "pair",
        "pair_steps",
        "terms",
    )

    def __init__(
        self, op: ReduceOp, element: Element, terms: int | None, factors: Sequence[Factor] | None = None
    ) -> None:
        self.op = op
        self.element = element
        self.terms = terms
        self.factors = None if factors is None else [self._factor(each) for each in factors]
        self._divides = op.name == "avg" and terms is not None
        self._ufunc: Any = None if op.function is not None else ufunc_of(op)
        self._limit = BLOCK_BYTES // element.itemsize
        self._half: HalfFolding | None = None
        if element.is_half and self._ufunc is not None:
            self._half = HalfFolding(self._ufunc, element, terms if self._divides else None, self.factors)
        self._is_odd_alone = element.kind == "complex" and self._ufunc is np.multiply
        is_scaled = self.factors is not None or self._divides
        is_plain = not (self._half is not None or is_scaled or self._is_odd_alone)
        self.pair: Any = self._ufunc if is_plain else None
        self.pair_steps = 1 if self.pair is not None else 2 if self._divides and self._half is None else 0

    def _factor(self, factor: Factor) -> Any:
        with np.errstate(all="ignore"):
            return (np.float32 if self.element.is_half else self.element.storage.type)(factor)  # type: ignore[arg-type]

    def fold(self, sources: Sequence[Array], outs: Sequence[Array]) -> None:
        """Reduce `sources` in their order and write the result to each of `outs`.

        Time per MiB of one source, data in cache (bench/folding.py): two sources of a plain type 0.05 ms; of 16-bit
        types 0.2 to 0.3 ms where torch is loaded, else 0.5 (bfloat16), 0.9 (float16) and 3 (float16 with infinities or
        NaNs, or with an average of other than 2, 4, 8, ... terms). Each further source takes half as much again.
        NumPy and torch give other threads the GIL in each of their calls, which last less than 0.1 ms; only two plain
        sources into one destination, but for avg, are done in one call, however long they are.

        Args:
            sources: one or more 1-D arrays of one length and the element's storage dtype; for 16-bit types
                float32 too (partial results). Not written to, unless also in `outs`.
            outs: one or more arrays likewise, float32 for a partial result that is not rounded yet; each may be
                the memory of a source, and none may overlap another array in part.

        Raises:
            UsageError: a user's function returned something that does not fit.
        """
        if self._ufunc is None:
            self._by_user(sources, outs)
            return
        if self.pair is not None and len(sources) == 2 and len(outs) == 1:
            QUIET.call(self.pair, sources[0], sources[1], out=outs[0])
            return
        if self._is_odd_alone and len(outs[0]) == 1:
            self._fold_one(sources, outs)
            return
        with np.errstate(all="ignore"):
            block: Block
            if self._half is not None:
                block, limit = self._half.block(sources, outs)
            elif len(sources) == 2 and self.factors is None:
                block, limit = self._pair_block, PAIR_BYTES // self.element.itemsize
            else:
                block, limit = self._plain_block, self._limit
            count = len(outs[0])
            if count <= limit:
                block(sources, outs)
                return
            for part in blocks(count, limit):
                fold_part = self._fold_one if self._is_odd_alone and part.start == count - 1 else block
                fold_part([x[part] for x in sources], [out[part] for out in outs])

    def fold_apart(self, sources: Sequence[Array], out: Array) -> None:
        """As `fold`, into memory that none of the sources has: several small ones in half of the time, see `join`."""
        if not self.pair_steps or len(sources) == 1 or out.nbytes > APART_BYTES:
            self.fold(sources, (out,))
            return
        so_far, *between, last = sources
        for source in between:
            self.join(so_far, source, out)
            so_far = out
        self.join(so_far, last, out, is_last=True)

    def join(self, so_far: Array, source: Array, out: Array, is_last: bool = False) -> None:
        """Fold one source more into what is folded of those before it; where there are `pair_steps`.

        Args:
            so_far: the first source, or what the call before has left.
            out: may be either of the two, or none.
            is_last: avg divides now.
        """
        QUIET.call(self._ufunc, so_far, source, out=out)
        if is_last and self._divides:
            QUIET.call(*division(out, self.terms, out))  # type: ignore[arg-type]  # there are terms

    def calls_for_pair(self, first: Array, second: Array, out: Array) -> list[Call]:
        """These steps, each to be made once and in this order; see `pair_steps`."""
        ufunc = self._ufunc
        # By its position `out` takes half the time, which NumPy deprecates of these two.
        is_named = ufunc is np.maximum or ufunc is np.minimum
        calls: list[Call] = [(partial(ufunc, first, second, out=out),) if is_named else (ufunc, first, second, out)]
        if self._divides:
            calls.append(division(out, self.terms, out))  # type: ignore[arg-type]  # there are terms
        return calls

    def _fold_one(self, sources: Sequence[Array], outs: Sequence[Array]) -> None:
        """NumPy multiplies one complex number by other rules where the result is an operand: so here are two."""
        result = np.empty(2, outs[0].dtype)
        self.fold([np.repeat(x, 2) for x in sources], [result])
        for out in outs:
            out[0] = result[0]

    def _by_user(self, sources: Sequence[Array], outs: Sequence[Array]) -> None:
        if self.element.numpy is not None:
            acc = sources[0].copy()
            for x in sources[1:]:
                fold(self.op, acc, x, self.element)
        else:
            acc = np.empty_like(sources[0])
            narrow_into(self._by_user_in_float32(sources), acc, self.element)
        for out in outs:
            np.copyto(out, acc)

    def _by_user_in_float32(self, sources: Sequence[Array]) -> Array:
        acc = widen(sources[0], self.element)
        for x in sources[1:]:
            fold(self.op, acc, widen(x, self.element), BY_NAME["float32"])
        return acc

    # ------------------------------------------------------------------ plain types

    def _pair_block(self, sources: Sequence[Array], outs: Sequence[Array]) -> None:
        out = outs[0]
        self._ufunc(sources[0], sources[1], out=out)
        if self._divides:
            divide(out, self.terms, out)  # type: ignore[arg-type]  # _divides: there are terms
        for other in outs[1:]:
            np.copyto(other, out)

    def _plain_block(self, sources: Sequence[Array], outs: Sequence[Array]) -> None:
        count = len(outs[0])
        dtype = self.element.storage
        first, second = (each.view(dtype)[:count] for each in (SCRATCH.first, SCRATCH.second))
        acc = self._scaled(sources[0], 0, first)
        for index in range(1, len(sources)):
            is_last = index == len(sources) - 1 and not self._divides
            target = outs[0] if is_last else first
            self._ufunc(acc, self._scaled(sources[index], index, second), out=target)
            acc = target
        if self._divides:
            divide(acc, self.terms, outs[0])  # type: ignore[arg-type]  # _divides: there are terms
        elif acc is not outs[0]:
            np.copyto(outs[0], acc)
        for out in outs[1:]:
            np.copyto(out, outs[0])

    def _scaled(self, x: Array, index: int, room: Array) -> Array:
        """The source times its factor, in `room`; the source itself where it has none."""
        return x if self.factors is None else np.multiply(x, self.factors[index], room)
