"""Reductions: operations of all ranks that combine their arrays element by element.

Every rank calls them, in the same order. They only read `x`; all_reduce, which may
work in place, has a file of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mpdist.algorithms import native
from mpdist.algorithms.blocks import concatenated, joined
from mpdist.algorithms.reduction import Reduction
from mpdist.algorithms.shared import plans
from mpdist.comm.all_reduce import AllReduce
from mpdist.comm.arrays import OpLike, name_of, op_text, op_to_text
from mpdist.comm.operation import host_buffer, operation
from mpdist.errors import UsageError
from mpdist.memory import Buffer, overlap

if TYPE_CHECKING:
    from mpdist.progress.work import Work


class Reductions(AllReduce):
    """Reducing arrays over the ranks."""

    @operation
    def reduce(
        self, x: object, dst: int, op: OpLike = "sum", *, out: object = None, deterministic: bool = False
    ) -> Work[Any]:
        """Reduce `x` over all ranks; rank `dst` gets the result in `out`, the others None. As all_reduce."""
        dst = self._rank(dst, "dst")
        source = host_buffer(x)
        how = self._reduction(op, source)
        target = self._output(source, out, source.shape) if self.rank == dst else None
        name = name_of(op, deterministic)  # the function itself may hold much
        element, nbytes = source.element, source.nbytes
        details = partial(op_to_text, element, nbytes, name, dst)
        if isinstance(how, Reduction):
            is_large = nbytes >= self._large_from["reduce"]
            if how.is_direct and not is_large and not deterministic and type(source) is Buffer:  # no Mirror
                result = None if target is None else target.owner
                words = (op_to_text, element, nbytes, name, dst)
                call = self._channel.transport.ireduce
                return self._channel.post_direct("reduce", words, result, call, source, target, how.mpi_op, dst)
            return self._post_reduction("reduce", details, deterministic, is_large, source, target, how, dst)
        return self._channel.post("reduce", native.reduce_by_function, details, source, target, how, dst)

    @operation
    def scan(self, x: object, op: OpLike = "sum", *, out: object = None) -> Work[Any]:
        """Reduce `x` over the ranks up to and with this one."""
        return self._scan("scan", x, op, out, native.scan, native.scan_by_function)

    @operation
    def exscan(self, x: object, op: OpLike = "sum", *, out: object = None) -> Work[Any]:
        """Reduce `x` over the ranks before this one; None on rank 0, which has none, and whose `out` stays as it is."""
        return self._scan("exscan", x, op, out, native.exscan, native.exscan_by_function)

    def _scan(self, name: str, x: object, op: OpLike, out: object, plain: Any, by_function: Any) -> Work[Any]:
        source = host_buffer(x)
        how = self._reduction(op, source)
        target = self._output(source, out, source.shape)
        program = plain if isinstance(how, Reduction) else by_function
        details = partial(op_text, source.element, source.nbytes, name_of(op))
        return self._channel.post(name, program, details, source, target, how)

    @operation
    def reduce_scatter(
        self, x: object, op: OpLike = "sum", *, out: object = None, deterministic: bool = False
    ) -> Work[Any]:
        """Reduce `x` over all ranks; each rank keeps its own block in `out`.

        Args:
            x: size * n rows along axis 0; or a list of `size` arrays, block r for rank r, whose sizes
                are the same on all ranks.
            out: n rows, type and device of `x`.
            deterministic: as of all_reduce; not for a list.

        Returns:
            A Work of `out`. Until it is done, `out` is undefined and `x` must not change.

        See MPI_Ireduce_scatter_block.
        """
        if isinstance(x, list | tuple):
            if deterministic:
                raise UsageError("deterministic is for even blocks only; give one array of size * n rows")
            return self._reduce_scatter_list(x, op, out)
        source = host_buffer(x)
        how = self._reduction(op, source)
        shape = self._block_shape(source) if out is None else ()
        target = self._output(source, out, shape, self.size)
        words = (op_text, source.element, source.nbytes, name_of(op, deterministic))
        if isinstance(how, Reduction):
            is_large, result = self._is_large("reduce_scatter", how, source.nbytes), target.owner
            if is_large and not deterministic:
                key, arrays = (how, source.nbytes), (source, target)
                return self._post_large(
                    "reduce_scatter", words, result, plans.reduce_scatter, key, arrays, *arrays, how
                )
            if how.is_direct and not deterministic and type(source) is Buffer:  # no Mirror
                call = self._channel.transport.ireduce_scatter
                return self._channel.post_direct("reduce_scatter", words, result, call, source, target, how.mpi_op)
            details = partial(op_text, *words[1:])
            return self._post_reduction("reduce_scatter", details, deterministic, is_large, source, target, how)
        details, counts = partial(op_text, *words[1:]), [target.count] * self.size
        return self._channel.post(
            "reduce_scatter", native.reduce_scatter_by_function, details, source, target, counts, how
        )

    def _reduce_scatter_list(self, x: Sequence[object], op: OpLike, out: object) -> Work[Any]:
        blocks = self._blocks(x, "x")
        mine = blocks[self.rank]
        how = self._reduction(op, mine)
        target = self._output(mine, out, mine.shape)
        counts, element, name = [block.count for block in blocks], mine.element.name, name_of(op)
        source = concatenated(blocks) if any(overlap(each, target) for each in blocks) else joined(blocks)
        program = native.reduce_scatterv if isinstance(how, Reduction) else native.reduce_scatter_by_function
        return self._channel.post(
            "reduce_scatter",
            program,
            lambda: f"{element} x {counts} {name}",
            source,
            target,
            counts,
            how,
        )
