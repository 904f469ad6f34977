"""Reductions: operations of all ranks that combine their arrays element by element.

Every rank calls them, in the same order. `all_reduce` without `out` works in
place; the others only read `x`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mpdist.algorithms import native, ordered
from mpdist.algorithms.blocks import concatenated, joined
from mpdist.algorithms.reduction import Reduction
from mpdist.algorithms.shared import plans
from mpdist.algorithms.shared.few import are_few
from mpdist.algorithms.shared.team import Team
from mpdist.comm.arrays import Arrays, OpLike, check_apart, check_same, name_of, op_text, op_to_text, reduction_text
from mpdist.comm.operation import OnDevice, host_buffer, operation
from mpdist.errors import UsageError
from mpdist.memory import Buffer, Element, ReduceOp, as_op, check_op, is_same, overlap

if TYPE_CHECKING:
    from mpdist.algorithms.shared.one_round import Plan
    from mpdist.progress.collective import Words
    from mpdist.progress.work import Work


def _two(x: object, out: object) -> tuple[Buffer | None, Buffer]:
    """Of x and out; None for x where it is out."""
    source, target = host_buffer(x), host_buffer(out, writable=True)
    check_same(source, target)
    if is_same(source, target):
        return None, target
    check_apart(source, target)
    return source, target


def _name_alone(op: OpLike) -> str | None:
    """Where its name says all of an op that is not given by it: the name."""
    return op.name if isinstance(op, ReduceOp) and op.factor is None and op.function is None else None


class Reductions(Arrays):
    """Reducing arrays over the ranks."""

    _reductions: dict[tuple[str, Element], Reduction]

    def all_reduce(
        self, x: object, op: OpLike = "sum", *, out: object = None, deterministic: bool = False
    ) -> Work[Any]:
        """Reduce `x` over all ranks; all get the result.

        Args:
            x: same number of elements and type on all ranks; without `out` it gets the result.
            op: associative; float16 and bfloat16 accumulate in float32; min and max give NaN where a rank has
                it. A function of two arrays is applied in rank order.
            out: as large as `x`, of its type; `x` itself for in place.
            deterministic: fold in the order of ranks, so that neither timing nor the choice of an algorithm
                shows in the bits of the result, but for those of NaN; the same on all ranks.

        Returns:
            A Work of the array that has the result.

        See MPI_Iallreduce.
        """
        try:
            if not deterministic:
                source, target = (None, host_buffer(x, writable=True)) if out is None else _two(x, out)
                result = x if out is None else out
                channel, nbytes = self._channel, target.nbytes
                team = channel.team
                name = op if type(op) is str else _name_alone(op)
                if name is not None and isinstance(team, Team):
                    known = team.known.get((name, target.element, nbytes))
                    if known is None:
                        known = self._planned(team, name, target)
                    if known:
                        words, plan = known
                        return channel.post_direct(
                            "all_reduce",
                            words,
                            result,
                            plan.request,
                            team,
                            plan,
                            source or target,
                            target,
                            caller=2,
                            is_unchecked=plan.is_unchecked,
                        )
                how = self._reduction(op, target)
                if isinstance(how, Reduction):
                    if nbytes >= self._large_from[how.sized_as["all_reduce"]]:
                        program, details = self._large.all_reduce, partial(reduction_text, nbytes, how)
                        is_unchecked = are_few(how, nbytes) or self._is_large_unchecked
                        return channel.post(
                            "all_reduce", program, details, channel, source, target, how, is_unchecked=is_unchecked
                        )
                    if how.is_direct:
                        call, words = channel.transport.iall_reduce, (reduction_text, nbytes, how)
                        return channel.post_direct(
                            "all_reduce", words, result, call, source, target, how.mpi_op, caller=2
                        )
        except OnDevice:
            pass  # as all that is more than one call
        except UsageError as error:
            raise self._explained("all_reduce", error) from error.__cause__
        return self._all_reduce(x, op, out=out, deterministic=deterministic)

    def _planned(self, team: Team, op: str, target: Buffer) -> tuple[Words, Plan] | tuple[()]:
        """What makes it one request of a team, see `Team.known`."""
        how, nbytes = self._reduction(op, target), target.nbytes
        known: tuple[Words, Plan] | tuple[()] = ()
        if isinstance(how, Reduction) and nbytes >= self._large_from[how.sized_as["all_reduce"]]:
            plan = plans.all_reduce(team, how, nbytes)
            known = () if plan is None else ((reduction_text, nbytes, how), plan)
        return plans.kept(team.known, (op, target.element, nbytes), known)

    @operation
    def _all_reduce(self, x: object, op: OpLike, *, out: object, deterministic: bool) -> Work[Any]:
        """What is more than one call of MPI."""
        source, target = (None, host_buffer(x, writable=True)) if out is None else _two(x, out)
        how = self._reduction(op, target)
        details = partial(op_text, target.element, target.nbytes, name_of(op, deterministic))
        if isinstance(how, Reduction):
            is_large, is_unchecked = self._is_large("all_reduce", how, target.nbytes), are_few(how, target.nbytes)
            return self._post_reduction(
                "all_reduce", details, deterministic, is_large, source, target, how, is_unchecked=is_unchecked
            )
        return self._channel.post("all_reduce", native.all_reduce_by_function, details, source or target, target, how)

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

    def _is_large(self, op: str, how: Reduction, nbytes: int) -> bool:
        """Whether it takes another way than MPI's own call."""
        return nbytes >= self._large_from[how.sized_as[op]]

    def _post_reduction(
        self,
        op: str,
        details: Callable[[], str],
        deterministic: bool,
        is_large: bool,
        *arguments: Any,
        is_unchecked: bool = False,
    ) -> Work[Any]:
        """is_unchecked: whether what takes the place of MPI's own call compares nothing by itself."""
        channel = self._channel
        if deterministic:
            compares_nothing = self._ordered is ordered
            program = getattr(self._ordered, op)
            return channel.post(op, program, details, channel, *arguments, is_unchecked=compares_nothing)
        if is_large:
            program, is_unchecked = getattr(self._large, op), is_unchecked or self._is_large_unchecked
            return channel.post(op, program, details, channel, *arguments, is_unchecked=is_unchecked)
        return channel.post(op, getattr(native, op), details, *arguments)

    def _reduction(self, op: OpLike, buffer: Buffer) -> Reduction | ReduceOp:
        """How MPI reduces it; the op itself where a function is to be folded."""
        if type(op) is str:
            known = self._reductions.get((op, buffer.element))
            if known is not None:
                return known
        named = as_op(op)
        if named.function is not None:
            check_op(named, buffer.element)
            return named
        if named.factor is not None:
            return Reduction.of(named, buffer.element, self.size)
        key = named.name, buffer.element
        how = self._reductions.get(key)
        if how is None:
            how = self._reductions[key] = Reduction.of(named, buffer.element, self.size)
        return how
