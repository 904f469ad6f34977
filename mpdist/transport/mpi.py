"""The MPI library: start, stop, abort, and one communicator's calls in mpdist's words.

Here mpi4py is set up, before anything else of it is imported; importing this module
starts MPI, so everybody imports it late. A Transport is a thin, non-blocking view of one MPI
communicator: it takes Buffers, posts, and returns a Request whose `Test()` says
whether it is complete. The request of a collective keeps its buffers alive, that
of a message does not; requests belong to the Engine until MPI is done with them.
How a Buffer becomes what mpi4py's calls take: `arguments.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn
from zlib import crc32

from mpdist.transport.start_up import at_home, known_as_unavailable, without_network_cards

with known_as_unavailable():
    import mpi4py

# The end of the job is decided by the ranks' agreement, not by mpi4py's atexit handler, in which a failed rank
# would wait for all others for ever.
if "mpi4py.MPI" not in sys.modules:
    mpi4py.rc.finalize = False
with known_as_unavailable(), at_home(os.environ), without_network_cards(os.environ):
    from mpi4py import MPI

from mpdist.errors import UsageError
from mpdist.memory import Buffer, as_buffer
from mpdist.transport import arguments
from mpdist.transport.arguments import (
    BOOL_OPS,
    DATATYPES,
    MAX_COUNT,
    OPS,
    SLICE_COUNT,
    blocks,
    op_of,
    sliced,
    typed,
    uneven,
    whole,
)
from mpdist.transport.envelope import envelope
from mpdist.transport.facts import FAMILIES
from mpdist.transport.requests import Request, Requests, leases

IN_PLACE = MPI.IN_PLACE
fromaddress = MPI.buffer.fromaddress
_finalize = MPI.Finalize
_IS_OPEN_MPI = FAMILIES.get(MPI.get_vendor()[0]) == "openmpi"


class Transport:
    """Non-blocking calls on one MPI communicator.

    `isend([memory, nbytes, byte], dst, wire_tag)` and `improbe(any_source, any_tag, status)` are mpi4py's
    own methods: they are called once per message, where a wrapper would show.
    """

    any_source: int = MPI.ANY_SOURCE
    any_tag: int = MPI.ANY_TAG
    byte: object = MPI.BYTE
    failure: type[Exception] = MPI.Exception
    max_total: int | None = None if MPI.VERSION >= 4 else MAX_COUNT
    """How many elements uneven blocks may have together on one rank; None: any number."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.max_tag = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0)
        self._streams = 0
        self.status = MPI.Status()
        self.envelope = envelope(self.status)
        self.isend: Callable[[list[Any], int, int], Request] = comm.Isend
        self.improbe: Callable[[int, int, Any], Any] = comm.Improbe

    memory_of = staticmethod(arguments.memory_of)

    @staticmethod
    def together(requests: list[Request]) -> Request:
        """Several requests as one."""
        return Requests(requests)

    @staticmethod
    def reduces_slowly(size: int) -> bool:
        """Whether Iallreduce of large arrays over so many ranks takes far longer than the link needs.

        16 MiB between hosts over 1 Gbit/s, where the link needs 142 ms for 2 and 190 for 3: by Open MPI 5.0.11 285 and
        557, by MPICH 5.0.2 143 and 497.
        """
        return _IS_OPEN_MPI or size & (size - 1) != 0

    # ------------------------------------------------------------------ messages within collectives, next to no other

    def tag_of_next(self, nbytes: int) -> int:
        """The tag of the messages of the next collective, of so many bytes: no other's stray ones are taken for its."""
        self._streams += 1
        return crc32(f"{self._streams} {nbytes}".encode()) % (self.max_tag + 1)

    @leases
    def isend_to(self, buffer: Buffer, dst: int, tag: int) -> Request:
        return self.comm.Isend(whole(buffer), dst, tag)

    @leases
    def ireceive_from(self, buffer: Buffer, src: int, tag: int) -> Request:
        return self.comm.Irecv(whole(buffer), src, tag)

    # ------------------------------------------------------------------ collectives

    def ibarrier(self) -> Request:
        return self.comm.Ibarrier()

    @leases
    def ibroadcast(self, buffer: Buffer, src: int) -> Request:
        return self.comm.Ibcast(whole(buffer), src)

    def iall_reduce(self, x: Buffer | None, out: Buffer, op: str) -> Request:
        """Reduce x into out; x None: in place, and the caller keeps out's owner alive."""
        memory = out.exporter
        if x is None and out.count <= SLICE_COUNT and (memory is None or memory is out.owner):
            element = out.element
            if memory is None:
                memory = fromaddress(out.address, out.nbytes)
            ops = BOOL_OPS if element.kind == "bool" else OPS
            return self.comm.Iallreduce(IN_PLACE, [memory, out.count, DATATYPES[element.name]], ops[op])

        return self._iall_reduce(x, out, op)

    @leases
    def _iall_reduce(self, x: Buffer | None, out: Buffer, op: str) -> Request:
        def post(source: Any, target: Any) -> Request:
            return self.comm.Iallreduce(MPI.IN_PLACE if source is None else source, target, op_of(op, out))

        return sliced(post, x, out)

    @leases
    def ireduce(self, x: Buffer, out: Buffer | None, op: str, dst: int) -> Request:
        def post(source: Any, target: Any) -> Request:
            return self.comm.Ireduce(source, target, op_of(op, x), dst)

        return sliced(post, x, out)

    @leases
    def iscan(self, x: Buffer, out: Buffer, op: str) -> Request:
        return sliced(lambda source, target: self.comm.Iscan(source, target, op_of(op, x)), x, out)

    @leases
    def iexscan(self, x: Buffer, out: Buffer, op: str) -> Request:
        return sliced(lambda source, target: self.comm.Iexscan(source, target, op_of(op, x)), x, out)

    @leases
    def ireduce_scatter(self, x: Buffer, out: Buffer, op: str) -> Request:
        """Reduce x (size * out.count elements); rank r keeps block r."""
        if out.count <= SLICE_COUNT:
            one = [arguments.memory_of(x), out.count, DATATYPES[x.element.name]]  # mpi4py wants the size of one
            return self.comm.Ireduce_scatter_block(one, typed(out), op_of(op, x))
        array, n = x.array(), out.count
        rows = [as_buffer(array[r * n : (r + 1) * n]) for r in range(self.size)]
        return Requests([self.ireduce(rows[r], out if r == self.rank else None, op, r) for r in range(self.size)])

    @leases
    def igather(self, x: Buffer, out: Buffer | None, dst: int) -> Request:
        return self.comm.Igather(whole(x), None if out is None else blocks(out, x.nbytes), dst)

    @leases
    def iscatter(self, x: Buffer | None, out: Buffer, src: int) -> Request:
        return self.comm.Iscatter(None if x is None else blocks(x, out.nbytes), whole(out), src)

    @leases
    def iall_gather(self, x: Buffer, out: Buffer) -> Request:
        return self.comm.Iallgather(whole(x), blocks(out, x.nbytes))

    @leases
    def iall_to_all(self, x: Buffer, out: Buffer) -> Request:
        return self.comm.Ialltoall(blocks(x, x.nbytes // self.size), blocks(out, out.nbytes // self.size))

    # ------------------------------------------------------------------ uneven blocks

    # Counts and starts are in units of `unit` bytes; without starts the blocks lie one behind the other.

    @leases
    def igatherv(
        self,
        x: Buffer,
        out: Buffer | None,
        counts: Sequence[int],
        unit: int,
        dst: int,
        starts: Sequence[int] | None = None,
    ) -> Request:
        return self.comm.Igatherv(whole(x), None if out is None else uneven(out, counts, unit, starts), dst)

    @leases
    def iscatterv(
        self,
        x: Buffer | None,
        counts: Sequence[int],
        unit: int,
        out: Buffer,
        src: int,
        starts: Sequence[int] | None = None,
    ) -> Request:
        return self.comm.Iscatterv(None if x is None else uneven(x, counts, unit, starts), whole(out), src)

    @leases
    def iall_gatherv(
        self, x: Buffer, out: Buffer, counts: Sequence[int], unit: int, starts: Sequence[int] | None = None
    ) -> Request:
        return self.comm.Iallgatherv(whole(x), uneven(out, counts, unit, starts))

    @leases
    def iall_to_allv(
        self,
        x: Buffer,
        sent: Sequence[int],
        out: Buffer,
        received: Sequence[int],
        unit: int,
        sent_starts: Sequence[int] | None = None,
        received_starts: Sequence[int] | None = None,
    ) -> Request:
        return self.comm.Ialltoallv(uneven(x, sent, unit, sent_starts), uneven(out, received, unit, received_starts))

    @leases
    def ireduce_scatterv(self, x: Buffer, out: Buffer, counts: Sequence[int], op: str) -> Request:
        """Reduce x, cut into blocks of `counts` elements; rank r keeps block r."""
        return self.comm.Ireduce_scatter(typed(x), typed(out), list(counts), op_of(op, x))

    # ------------------------------------------------------------------ communicators

    def idup(self) -> Duplicate:
        """Collective. Of Open MPI the makings of this process come one after the other: all members must be at it."""
        return Duplicate(self.comm)

    # These block until all call.

    def dup(self) -> Transport:
        return _transport(self.comm.Dup())

    def split(self, color: int | None, key: int) -> Transport | None:
        part = self.comm.Split(MPI.UNDEFINED if color is None else color, key)
        return None if part == MPI.COMM_NULL else _transport(part)

    def split_node(self, most: int = 0) -> Transport:
        """The ranks of this node; of a larger one the `most` that this rank is among, 0 for all."""
        node = self.comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        if not most:
            return _transport(node)
        part = node.Split(node.Get_rank() // most, node.Get_rank())
        node.Free()
        return _transport(part)

    def subgroup(self, ranks: Sequence[int], tag: int) -> Transport:
        """Collective over `ranks` only.

        Nobody may probe this communicator for any message: Open MPI (5.0.11) makes a group by ordinary
        messages on it, with the caller's tag.
        """
        everyone = self.comm.Get_group()
        members = everyone.Incl(list(ranks))
        part = self.comm.Create_group(members, tag)
        members.Free()
        everyone.Free()
        return Transport(part)

    def fence(self) -> Callable[[], None]:
        """A function that is a full memory fence; collective, and its window lives as long as the function."""
        window = MPI.Win.Allocate(8, comm=self.comm)
        window.Lock_all()
        return window.Sync

    def world_ranks(self) -> tuple[int, ...]:
        """The members' ranks in MPI_COMM_WORLD."""
        mine, world = self.comm.Get_group(), MPI.COMM_WORLD.Get_group()
        ranks = MPI.Group.Translate_ranks(mine, range(self.size), world)
        mine.Free()
        world.Free()
        return tuple(int(rank) for rank in ranks)

    def all_gather_now(self, item: object) -> list[Any]:
        """Blocking exchange of small objects, for set-up only."""
        return self.comm.allgather(item)

    def free(self) -> None:
        """Give the communicator back; local on both MPIs, nobody is waited for."""
        if self.comm != MPI.COMM_NULL and not MPI.Is_finalized():
            self.comm.Free()


class Duplicate:
    """A communicator that MPI duplicates, as a request."""

    _posted: tuple[MPI.Intracomm, MPI.Request]

    def __init__(self, comm: MPI.Intracomm) -> None:
        # Held at once: after a call a signal's handler could raise, and MPI writes into what it has been given.
        for self._posted in map(comm.Idup, (None,)):
            pass

    def Test(self) -> bool:
        return self._posted[1].Test()

    def transport(self) -> Transport:
        """Of the duplicate, which is there."""
        return Transport(self._posted[0])


def _transport(comm: MPI.Comm) -> Transport:
    assert isinstance(comm, MPI.Intracomm)
    return Transport(comm)


# ---------------------------------------------------------------------- the library


def duplicating(comm: object) -> tuple[Callable[[], Request], Callable[[], Duplicate]]:
    """Two collective calls on an mpi4py communicator: one to meet by, and one that then makes a duplicate."""
    if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
        raise UsageError(
            "an mpi4py intracommunicator is needed, got MPI.COMM_NULL: it was freed before, or this rank is not in it"
        )
    if not isinstance(comm, MPI.Intracomm):
        raise UsageError(f"an mpi4py intracommunicator is needed, got {type(comm).__name__}")
    return comm.Ibarrier, lambda: Duplicate(comm)


def start() -> Transport:
    """Start MPI if it is not running and return a duplicate of the world communicator; collective."""
    if MPI.Is_finalized():
        raise RuntimeError("MPI is finalized and cannot be started again in this process")
    if not MPI.Is_initialized():  # mpi4py was told not to
        with at_home(os.environ), without_network_cards(os.environ):
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    MPI.Finalize = _refuse
    return Transport(MPI.COMM_WORLD.Dup())


def _refuse() -> NoReturn:
    raise UsageError(
        "MPI.Finalize() was called while mpdist communicates: leave it out, for the end of the program stops MPI, or "
        "call mpdist.finalize() first"
    )


def family() -> str:
    """Whose launcher this MPI needs: mpich, openmpi or other."""
    return FAMILIES.get(MPI.get_vendor()[0], "other")


def library_version() -> str:
    """The library's own words."""
    return MPI.Get_library_version().strip("\0\n ")


def finalizes_by_itself() -> bool:
    """Whether mpi4py will call MPI_Finalize when the process ends: it was imported before mpdist was started."""
    return mpi4py.rc.finalize is not False and is_running()


def is_threaded() -> bool:
    """Whether MPI may be called from several threads at once."""
    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def stop() -> None:
    """MPI_Finalize, if mpdist has started MPI; collective."""
    MPI.Finalize = _finalize
    if mpi4py.rc.finalize is False and is_running():
        _finalize()


def is_running() -> bool:
    return bool(MPI.Is_initialized() and not MPI.Is_finalized())


def abort(code: int) -> None:
    """End every rank of the job."""
    MPI.COMM_WORLD.Abort(code)
