"""Collectives of arrays: every rank of the communicator calls them, in the same order.

Input first; `x` is only read, but by `broadcast`, and a missing `out` is allocated like it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from mpdist.algorithms import native, uneven
from mpdist.algorithms.shared import plans
from mpdist.algorithms.shared.team import Team
from mpdist.algorithms.uneven import Parcel
from mpdist.comm.arrays import check_all_apart, check_apart, from_text, text_of, to_text
from mpdist.comm.operation import OnDevice, host_buffer, operation
from mpdist.comm.reductions import Reductions
from mpdist.errors import UsageError
from mpdist.memory import Buffer

if TYPE_CHECKING:
    from mpdist.progress.collective import Steps
    from mpdist.progress.work import Work
    from mpdist.transport.mpi import Transport


class Collectives(Reductions):
    """Operations of all ranks on arrays."""

    def barrier(self) -> Work[None]:
        """Done when all ranks have called it."""
        channel = self._channel
        try:
            if self._large_from["barrier"]:
                return channel.post_direct("barrier", (str,), None, channel.transport.ibarrier, caller=2)
            if isinstance(channel.team, Team):
                # Against another call it waits, and is reported; comparing it would take a sixth of its time.
                enter = channel.team.enter_barrier
                return channel.post_direct("barrier", (str,), None, enter, caller=2, is_unchecked=None)
            return channel.post("barrier", self._large.barrier, str, channel)
        except UsageError as error:
            raise self._explained("barrier", error) from error.__cause__

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
        element, nbytes = buffer.element, buffer.nbytes
        words = (from_text, element, nbytes, src)
        if nbytes >= self._large_from["broadcast"]:
            return self._post_large("broadcast", words, x, plans.broadcast, words[1:], (buffer, buffer), buffer, src)
        return self._channel.post_direct("broadcast", words, x, self._channel.transport.ibroadcast, buffer, src)

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
            outs = self._out_blocks(out if self.rank == dst else None, [mine])
            return self._post_with_headers("gather", uneven.gather, lambda: f"list to {dst}", mine, outs, dst, x[0])
        source = host_buffer(x)
        target = self._gathered(source, out) if self.rank == dst else None
        element, nbytes = source.element, source.nbytes
        details = partial(to_text, element, nbytes, dst)
        if nbytes >= self._large_from["gather"]:
            return self._channel.post("gather", self._large.gather, details, self._channel, source, target, dst)
        if type(source) is not Buffer:  # a Mirror, whose way depends on the program
            return self._channel.post("gather", native.gather, details, source, target, dst)
        result = None if target is None else target.owner
        return self._channel.post_direct(
            "gather", (to_text, element, nbytes, dst), result, self._channel.transport.igather, source, target, dst
        )

    @operation
    def all_gather(self, x: object, *, out: object = None) -> Work[Any]:
        """Collect `x` of all ranks on all ranks, along a new leading axis of `size`; arguments as of gather."""
        if isinstance(x, list | tuple):
            mine = self._only(x)
            outs = self._out_blocks(out, [mine])
            name = mine.element.name
            return self._post_with_headers("all_gather", uneven.all_gather, lambda: f"[{name}]", mine, outs, x[0])
        source = host_buffer(x)
        target = self._gathered(source, out)
        element, nbytes = source.element, source.nbytes
        if nbytes >= self._large_from["all_gather"]:
            details = partial(text_of, element, nbytes)
            program, is_unchecked = self._large.all_gather, self._is_large_unchecked
            return self._channel.post(
                "all_gather", program, details, self._channel, source, target, is_unchecked=is_unchecked
            )
        return self._channel.post_direct(
            "all_gather", (text_of, element, nbytes), target.owner, self._channel.transport.iall_gather, source, target
        )

    @operation
    def scatter(self, x: object, src: int, *, out: object = None) -> Work[Any]:
        """Hand the blocks of `x` of rank `src` out, block r to rank r.

        Args:
            x: on `src` size * n rows along axis 0, or a list of `size` arrays; ignored elsewhere.
            out: n rows of the type of `x`; missing: allocated like `x` on `src`, a NumPy array elsewhere.

        Returns:
            A Work of the block; until it is done, `x` must not change. A wrong `x` raises on `src` at once, and fails
            the Work of the others.
        """
        src = self._rank(src, "src")
        target = None if out is None else host_buffer(out, writable=True)
        try:
            parcel = self._parcel(x, target) if self.rank == src else None
        except OnDevice:
            raise
        except UsageError as error:
            raise self._refused_scatter(error, src) from error.__cause__
        like = None if parcel is None else x[0] if isinstance(x, list | tuple) else x
        return self._post_scatter(parcel, target, src, like)

    def _parcel(self, x: object, out: Buffer | None) -> Parcel:
        """The root's blocks."""
        if isinstance(x, list | tuple):
            blocks = self._blocks(x, "x")
            check_all_apart(blocks, [] if out is None else [out])
            return Parcel.of_blocks(blocks)
        whole = host_buffer(x)
        if out is not None:
            check_apart(whole, out)
        return Parcel.of_rows(whole, self.size, self._block_shape(whole))

    def _refused_scatter(self, error: UsageError, src: int) -> UsageError:
        """Let the others, who wait for this rank's blocks, hear why there are none; the error as it is to be raised."""
        explained = self._explained("scatter", error)
        self._post_scatter(Parcel.refused(str(explained), self.size), None, src, None).forget()
        return explained

    def _post_scatter(self, parcel: Parcel | None, out: Buffer | None, src: int, like: object) -> Work[Any]:
        return self._post_with_headers(
            "scatter", uneven.scatter, lambda: f"from {src}", self._spread, parcel, out, src, like
        )

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
            outs = self._out_blocks(out, blocks)
            name = blocks[0].element.name
            return self._post_with_headers("all_to_all", uneven.all_to_all, lambda: f"[{name}]", blocks, outs, x[0])
        source = host_buffer(x)
        self._block_shape(source)
        target = self._output(source, out, source.shape)
        element, nbytes = source.element, source.nbytes
        if nbytes >= self._large_from["all_to_all"]:
            details = partial(text_of, element, nbytes)
            return self._channel.post("all_to_all", self._large.all_to_all, details, self._channel, source, target)
        return self._channel.post_direct(
            "all_to_all", (text_of, element, nbytes), target.owner, self._channel.transport.iall_to_all, source, target
        )

    def _spread(self, transport: Transport, x: Buffer | None, out: Buffer, src: int) -> Steps[None]:
        """Even blocks of src, whose size is known by now."""
        if out.nbytes >= self._large_from["scatter"]:
            yield from self._large.scatter(transport, self._channel, x, out, src)
        else:
            yield transport.iscatter(x, out, src)
