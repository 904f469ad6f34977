"""Collectives of arrays: every rank of the communicator calls them, in the same order.

Input first. `all_reduce` without `out` works in place; everywhere else `x` is
only read and a missing `out` is allocated like `x`. Even blocks lie along axis 0
of one array; uneven ones are a list of arrays in, a list out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mpdist.algorithms import native, uneven
from mpdist.algorithms.reduction import Reduction
from mpdist.algorithms.uneven import Parcel
from mpdist.comm.operation import Operations, host_buffer, operation
from mpdist.errors import SizeMismatch, UnsupportedBuffer, UsageError
from mpdist.memory import Buffer, Element, ReduceOp, allocate_like, as_op, check_op, is_same, overlap

if TYPE_CHECKING:
    from mpdist.progress.work import Work

OpLike = str | ReduceOp | Callable[[Any, Any], Any]


class Collectives(Operations):
    """Operations of all ranks on arrays."""

    _reductions: dict[tuple[str, Element], Reduction]

    @operation
    def barrier(self) -> Work[None]:
        """Done when all ranks have called it."""
        return self._channel.post_direct("barrier", (str,), None, self._channel.transport.ibarrier)

    @operation
    def broadcast(self, x: object, src: int) -> Work[Any]:
        """Copy `x` of rank `src` into `x` of all others.

        Args:
            x: same number of elements and type on all ranks; only read on `src`.

        Returns:
            A Work of `x`.
        """
        src = self._rank(src, "src")
        buffer = host_buffer(x, writable=src != self.rank)
        return self._channel.post_direct(
            "broadcast", (_from_text, buffer, src), x, self._channel.transport.ibroadcast, buffer, src
        )

    def all_reduce(self, x: object, op: OpLike = "sum", *, out: object = None) -> Work[Any]:
        """Reduce `x` over all ranks; all get the result.

        Args:
            x: same number of elements and type on all ranks; without `out` it gets the result.
            op: associative; float16 and bfloat16 accumulate in float32. A function of two arrays is
                applied in rank order.
            out: as large as `x`, of its type; `x` itself for in place.

        Returns:
            A Work of the array that has the result.

        See MPI_Iallreduce.
        """
        try:
            if out is None:
                target = host_buffer(x, writable=True)
                how = self._reduction(op, target)
                if isinstance(how, Reduction) and how.is_direct:
                    channel = self._channel
                    return channel.post_direct(
                        "all_reduce",
                        (_reduction_text, target, op),
                        x,
                        channel.transport.iall_reduce,
                        None,
                        target,
                        how.mpi_op,
                        caller=2,
                    )
        except UsageError as error:
            raise self._explained("all_reduce", error) from error.__cause__
        return self._all_reduce(x, op, out)

    @operation
    def _all_reduce(self, x: object, op: OpLike, out: object) -> Work[Any]:
        """What is more than one call of MPI."""
        source: Buffer | None = None
        if out is None:
            target = host_buffer(x, writable=True)
        else:
            source, target = host_buffer(x), host_buffer(out, writable=True)
            _check_same(source, target)
            if is_same(source, target):
                source = None
            else:
                _check_apart(source, target)
        how = self._reduction(op, target)
        channel = self._channel

        details = partial(_reduction_text, target, op)
        if isinstance(how, Reduction):
            return channel.post("all_reduce", native.all_reduce, details, source, target, how)
        return channel.post("all_reduce", native.all_reduce_by_function, details, source or target, target, how)

    @operation
    def reduce(self, x: object, dst: int, op: OpLike = "sum", *, out: object = None) -> Work[Any]:
        """Reduce `x` over all ranks; rank `dst` gets the result in `out`, the others None."""
        dst = self._rank(dst, "dst")
        source = host_buffer(x)
        how = self._reduction(op, source)
        target = self._output(source, out, source.shape) if self.rank == dst else None
        program = native.reduce if isinstance(how, Reduction) else native.reduce_by_function
        return self._channel.post(
            "reduce", program, lambda: f"{_text(source)} {_name(op)} to {dst}", source, target, how, dst
        )

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
        return self._channel.post(name, program, lambda: f"{_text(source)} {_name(op)}", source, target, how)

    @operation
    def reduce_scatter(self, x: object, op: OpLike = "sum", *, out: object = None) -> Work[Any]:
        """Reduce `x` over all ranks; each rank keeps its own block in `out`.

        Args:
            x: size * n rows along axis 0; or a list of `size` arrays, block r for rank r, whose sizes
                are the same on all ranks.
            out: n rows, type and device of `x`.

        Returns:
            A Work of `out`. Until it is done, `out` is undefined and `x` must not change.

        See MPI_Ireduce_scatter_block.
        """
        if isinstance(x, list | tuple):
            return self._reduce_scatter_list(x, op, out)
        source = host_buffer(x)
        how = self._reduction(op, source)
        shape = self._block_shape(source) if out is None else ()
        target = self._output(source, out, shape, self.size)
        details = lambda: f"{_text(source)} {_name(op)}"  # noqa: E731  # as everywhere else, a text made on demand
        if isinstance(how, Reduction):
            return self._channel.post("reduce_scatter", native.reduce_scatter, details, source, target, how)
        counts = [target.count] * self.size
        return self._channel.post(
            "reduce_scatter", native.reduce_scatter_by_function, details, source, target, counts, how
        )

    def _reduce_scatter_list(self, x: Sequence[object], op: OpLike, out: object) -> Work[Any]:
        blocks = self._blocks(x, "x")
        mine = blocks[self.rank]
        how = self._reduction(op, mine)
        target = self._output(mine, out, mine.shape)
        counts = [block.count for block in blocks]
        program = native.reduce_scatterv if isinstance(how, Reduction) else native.reduce_scatter_by_function
        return self._channel.post(
            "reduce_scatter",
            program,
            lambda: f"{mine.element.name} x {counts} {_name(op)}",
            uneven.concatenated(blocks),
            target,
            counts,
            how,
        )

    @operation
    def gather(self, x: object, dst: int, *, out: object = None) -> Work[Any]:
        """Collect `x` of all ranks on rank `dst`, along a new leading axis of `size`.

        Args:
            x: same size on all ranks; for blocks of any size `[x]`, on all ranks.
            out: on `dst`, size times as large as `x`; for uneven blocks a list of arrays.

        Returns:
            A Work of `out` on `dst`, None elsewhere; a list for uneven blocks.
        """
        dst = self._rank(dst, "dst")
        if isinstance(x, list | tuple):
            mine = self._only(x)
            outs = None if out is None or self.rank != dst else self._blocks(out, "out", writable=True)
            return self._channel.post(
                "gather", uneven.gather, lambda: f"[{mine.element.name}] to {dst}", mine, outs, dst, x[0]
            )
        source = host_buffer(x)
        target = self._gathered(source, out) if self.rank == dst else None
        return self._channel.post("gather", native.gather, lambda: f"{_text(source)} to {dst}", source, target, dst)

    @operation
    def all_gather(self, x: object, *, out: object = None) -> Work[Any]:
        """Collect `x` of all ranks on all ranks, along a new leading axis of `size`; arguments as of gather."""
        if isinstance(x, list | tuple):
            mine = self._only(x)
            outs = None if out is None else self._blocks(out, "out", writable=True)
            return self._channel.post(
                "all_gather", uneven.all_gather, lambda: f"[{mine.element.name}]", mine, outs, x[0]
            )
        source = host_buffer(x)
        target = self._gathered(source, out)
        return self._channel.post_direct(
            "all_gather", (_text, source), target.owner, self._channel.transport.iall_gather, source, target
        )

    @operation
    def scatter(self, x: object, src: int, *, out: object = None) -> Work[Any]:
        """Hand the blocks of `x` of rank `src` out, block r to rank r.

        Args:
            x: on `src` size * n rows along axis 0, or a list of `size` arrays; ignored elsewhere.
            out: n rows of the type of `x`; missing: allocated like `x` on `src`, a NumPy array elsewhere.

        Returns:
            A Work of the block. A wrong `x` raises on `src` at once, and fails the Work of the others.
        """
        src = self._rank(src, "src")
        target = None if out is None else host_buffer(out, writable=True)
        parcel, refusal = self._scattered(x) if self.rank == src else (None, None)
        like = None if parcel is None else x[0] if isinstance(x, list | tuple) else x
        work: Work[Any] = self._channel.post(
            "scatter", uneven.scatter, lambda: f"from {src}", parcel, target, src, like
        )
        if refusal is not None:
            work.forget()
            raise refusal
        return work

    def _scattered(self, x: object) -> tuple[Parcel, UsageError | None]:
        """The root's blocks; or its refusal, for the others, and the error, for itself."""
        try:
            if isinstance(x, list | tuple):
                return Parcel.of_blocks(self._blocks(x, "x")), None
            whole = host_buffer(x)
            return Parcel.of_rows(whole, self.size, self._block_shape(whole)), None
        except UsageError as error:
            explained = self._explained("scatter", error)
            return Parcel.refused(str(explained), self.size), explained

    @operation
    def all_to_all(self, x: object, *, out: object = None) -> Work[Any]:
        """Send block r of `x` to rank r; block r of the result came from rank r.

        Args:
            x: size * n rows along axis 0, the same everywhere; or a list of `size` arrays of any size.
            out: as large as `x`; a list of arrays for a list.

        Returns:
            A Work of `out`.
        """
        if isinstance(x, list | tuple):
            blocks = self._blocks(x, "x")
            outs = None if out is None else self._blocks(out, "out", writable=True)
            return self._channel.post(
                "all_to_all", uneven.all_to_all, lambda: f"[{blocks[0].element.name}]", blocks, outs, x[0]
            )
        source = host_buffer(x)
        self._block_shape(source)
        target = self._output(source, out, source.shape)
        return self._channel.post_direct(
            "all_to_all", (_text, source), target.owner, self._channel.transport.iall_to_all, source, target
        )

    # ------------------------------------------------------------------ checks

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
        how = Reduction.of(named, buffer.element, self.size)
        if type(op) is str:
            self._reductions[op, buffer.element] = how
        return how

    def _output(self, source: Buffer, out: object, shape: Sequence[int], parts: int = 1) -> Buffer:
        """`out` checked, or allocated like the source; the source has `parts` times its elements."""
        if out is None:
            return host_buffer(allocate_like(source.owner, tuple(shape)), writable=True)
        target = host_buffer(out, writable=True)
        _check_same(source, target, parts)
        _check_apart(source, target)
        return target

    def _gathered(self, source: Buffer, out: object) -> Buffer:
        if out is None:
            return host_buffer(allocate_like(source.owner, (self.size, *source.shape)), writable=True)
        if isinstance(out, list | tuple):
            raise UsageError("out is a list, which is for uneven blocks: then give x as a list too, [x], on all ranks")
        target = host_buffer(out, writable=True)
        _check_element(source, target)
        if target.count != self.size * source.count:
            raise SizeMismatch(
                f"x has {source.count} elements, out has {target.count}; out must have size * x = "
                f"{self.size * source.count}; for uneven blocks give x as a list, [x], on all ranks"
            )
        _check_apart(source, target)
        return target

    def _block_shape(self, source: Buffer) -> tuple[int, ...]:
        """Shape of one of `size` blocks along axis 0."""
        shape = tuple(source.shape)
        if not shape or shape[0] % self.size:
            raise SizeMismatch(
                f"x has shape {shape}, and its axis 0 must be a multiple of the {self.size} ranks; "
                "pad it, or give a list of arrays for uneven blocks"
            )
        return (shape[0] // self.size, *shape[1:])

    def _blocks(self, arrays: object, what: str, *, writable: bool = False) -> list[Buffer]:
        """One array for each rank, all of one type."""
        if not isinstance(arrays, list | tuple):
            raise UsageError(
                f"{what} must be a list of {self.size} arrays, as the blocks are uneven, got {type(arrays).__name__}"
            )
        if len(arrays) != self.size:
            raise SizeMismatch(
                f"{what} is a list of {len(arrays)} arrays, one for each of the {self.size} ranks is needed"
            )
        blocks = [host_buffer(array, writable=writable) for array in arrays]
        for block in blocks[1:]:
            _check_element(blocks[0], block)
        return blocks

    def _only(self, arrays: Sequence[object]) -> Buffer:
        if len(arrays) != 1:
            raise UsageError(
                f"x is a list of {len(arrays)}; a list means uneven blocks and holds this rank's one array, [x]"
            )
        return host_buffer(arrays[0])


def _text(buffer: Buffer) -> str:
    return f"{buffer.element.name} x {buffer.count}"


def _from_text(buffer: Buffer, src: int) -> str:
    return f"{_text(buffer)} from {src}"


def _reduction_text(buffer: Buffer, op: OpLike) -> str:
    return f"{_text(buffer)} {_name(op)}"


def _name(op: OpLike) -> str:
    return op if isinstance(op, str) else str(getattr(op, "name", None) or getattr(op, "__name__", repr(op)))


def _check_element(source: Buffer, target: Buffer) -> None:
    if source.element is not target.element:
        raise UnsupportedBuffer(
            f"x is {source.element.name}, out is {target.element.name}; they must be of the same type"
        )
    if source.device != target.device:
        raise UnsupportedBuffer(f"x is on {source.device}, out on {target.device}; they must be on the same device")


def _check_same(source: Buffer, target: Buffer, parts: int = 1) -> None:
    _check_element(source, target)
    if source.count != parts * target.count:
        need = f"size * out = {parts * target.count}" if parts > 1 else f"as many as out, {target.count}"
        raise SizeMismatch(f"x has {source.count} elements, out has {target.count}; x must have {need}")


def _check_apart(source: Buffer, target: Buffer) -> None:
    if overlap(source, target):
        raise UsageError("x and out overlap in memory; give out memory of its own")
