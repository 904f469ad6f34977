"""The MPI library: start, stop, abort, and one communicator's calls in mpdist's words.

Here mpi4py is set up, before anything else of it is imported; importing this module
starts MPI, so everybody imports it late. A Transport is a thin, non-blocking view of one MPI
communicator: it takes Buffers, posts, and returns a Request whose `Test()` says
whether it is complete. The request of a collective keeps its buffers alive, that
of a message does not; requests belong to the Engine until MPI is done with them.

Two limits are hidden here. Open MPI counts with 32-bit integers, so larger
blocks travel as one element of a derived type, and larger reductions in slices.
bool is not a type that MPI adds, so its min, max and bitwise forms become logical.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol, TypeVar
from zlib import crc32

import numpy as np

from mpdist.transport.start_up import known_as_unavailable, without_network_cards

with known_as_unavailable():
    import mpi4py

# The end of the job is decided by the ranks' agreement, not by mpi4py's atexit handler, in which a failed rank
# would wait for all others for ever.
if "mpi4py.MPI" not in sys.modules:
    mpi4py.rc.finalize = False
with known_as_unavailable(), without_network_cards(os.environ):
    from mpi4py import MPI

from mpdist.errors import Unavailable, UsageError
from mpdist.memory import Buffer, as_buffer
from mpdist.transport.envelope import envelope
from mpdist.transport.facts import FAMILIES

# Open MPI 5 has MPI 3.1's 32-bit counts; the slices are kept the same on every MPI.
MAX_COUNT = 2**31 - 1
SLICE_COUNT = 2**30


class Request(Protocol):
    """A posted operation."""

    def Test(self) -> bool:
        """Whether it is complete; making progress on the way."""


class Leased(MPI.Request):
    """A request that keeps alive what MPI reads and writes; mpi4py drops some of it, of reductions all."""

    lease: object


class Requests:
    """Several requests as one."""

    lease: object
    __slots__ = ("_requests", "lease")

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests

    def Test(self) -> bool:
        while self._requests and self._requests[-1].Test():
            self._requests.pop()
        return not self._requests


Post = TypeVar("Post", bound=Callable[..., Any])


def leases(post: Post) -> Post:
    """Let the request that a method returns keep the method's arguments alive."""

    @functools.wraps(post)
    def leasing(*arguments: Any) -> Any:
        request = post(*arguments)
        if isinstance(request, Leased | Requests):
            return request
        leased = Leased(request)
        leased.lease = (request, arguments)
        return leased

    return leasing  # type: ignore[return-value]  # the same signature


_DATATYPES: dict[str, MPI.Datatype] = {
    "bool": MPI.C_BOOL,
    "int8": MPI.INT8_T,
    "int16": MPI.INT16_T,
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
    "uint8": MPI.UINT8_T,
    "uint16": MPI.UINT16_T,
    "uint32": MPI.UINT32_T,
    "uint64": MPI.UINT64_T,
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "complex64": MPI.C_FLOAT_COMPLEX,
    "complex128": MPI.C_DOUBLE_COMPLEX,
}

_OPS: dict[str, MPI.Op] = {
    "sum": MPI.SUM,
    "prod": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
    "land": MPI.LAND,
    "lor": MPI.LOR,
    "lxor": MPI.LXOR,
}
IN_PLACE = MPI.IN_PLACE
_IS_OPEN_MPI = FAMILIES.get(MPI.get_vendor()[0]) == "openmpi"
fromaddress = MPI.buffer.fromaddress

_BOOL_OPS = {**_OPS, "min": MPI.LAND, "max": MPI.LOR, "band": MPI.LAND, "bor": MPI.LOR, "bxor": MPI.LXOR}


@lru_cache(maxsize=64)
def _giant(nbytes: int) -> MPI.Datatype:
    """A type of `nbytes` contiguous bytes, more than a 32-bit count can say."""
    whole, rest = divmod(nbytes, SLICE_COUNT)
    piece = MPI.BYTE.Create_contiguous(SLICE_COUNT)
    body = piece.Create_contiguous(whole)
    giant = MPI.Datatype.Create_struct([1, rest], [0, whole * SLICE_COUNT], [body, MPI.BYTE]).Create_resized(0, nbytes)
    giant.Commit()
    return giant


def memory_of(buffer: Buffer) -> Any:
    """The buffer as an object that mpi4py takes together with an explicit count and type."""
    exporter = buffer.exporter
    if exporter is not None:
        return exporter
    return MPI.buffer.fromaddress(buffer.address, buffer.nbytes)


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

    @staticmethod
    def memory_of(buffer: Buffer) -> Any:
        """The buffer as an object that mpi4py takes together with an explicit count and type."""
        return memory_of(buffer)

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
        return self.comm.Isend(_whole(buffer), dst, tag)

    @leases
    def ireceive_from(self, buffer: Buffer, src: int, tag: int) -> Request:
        return self.comm.Irecv(_whole(buffer), src, tag)

    # ------------------------------------------------------------------ collectives

    def ibarrier(self) -> Request:
        return self.comm.Ibarrier()

    @leases
    def ibroadcast(self, buffer: Buffer, src: int) -> Request:
        return self.comm.Ibcast(_whole(buffer), src)

    def iall_reduce(self, x: Buffer | None, out: Buffer, op: str) -> Request:
        """Reduce x into out; x None: in place, and the caller keeps out alive."""
        if x is None and out.count <= SLICE_COUNT:
            element = out.element
            memory = out.exporter
            if memory is None:
                memory = fromaddress(out.address, out.nbytes)
            ops = _BOOL_OPS if element.kind == "bool" else _OPS
            return self.comm.Iallreduce(IN_PLACE, [memory, out.count, _DATATYPES[element.name]], ops[op])

        return self._iall_reduce(x, out, op)

    @leases
    def _iall_reduce(self, x: Buffer | None, out: Buffer, op: str) -> Request:
        def post(source: Any, target: Any) -> Request:
            return self.comm.Iallreduce(MPI.IN_PLACE if source is None else source, target, _op(op, out))

        return _sliced(post, x, out)

    @leases
    def ireduce(self, x: Buffer, out: Buffer | None, op: str, dst: int) -> Request:
        def post(source: Any, target: Any) -> Request:
            return self.comm.Ireduce(source, target, _op(op, x), dst)

        return _sliced(post, x, out)

    @leases
    def iscan(self, x: Buffer, out: Buffer, op: str) -> Request:
        return _sliced(lambda source, target: self.comm.Iscan(source, target, _op(op, x)), x, out)

    @leases
    def iexscan(self, x: Buffer, out: Buffer, op: str) -> Request:
        return _sliced(lambda source, target: self.comm.Iexscan(source, target, _op(op, x)), x, out)

    @leases
    def ireduce_scatter(self, x: Buffer, out: Buffer, op: str) -> Request:
        """Reduce x (size * out.count elements); rank r keeps block r."""
        if out.count <= SLICE_COUNT:
            one = [memory_of(x), out.count, _DATATYPES[x.element.name]]  # mpi4py wants the size of one
            return self.comm.Ireduce_scatter_block(one, _typed(out), _op(op, x))
        whole = x.array()
        blocks = [whole[r * out.count : (r + 1) * out.count] for r in range(self.size)]
        return Requests(
            [self._reduce_block(blocks[r], out if r == self.rank else None, op, r) for r in range(self.size)]
        )

    def _reduce_block(self, block: np.ndarray, out: Buffer | None, op: str, dst: int) -> Request:
        return self.ireduce(as_buffer(block), out, op, dst)

    @leases
    def igather(self, x: Buffer, out: Buffer | None, dst: int) -> Request:
        return self.comm.Igather(_whole(x), None if out is None else _blocks(out, x.nbytes), dst)

    @leases
    def iscatter(self, x: Buffer | None, out: Buffer, src: int) -> Request:
        return self.comm.Iscatter(None if x is None else _blocks(x, out.nbytes), _whole(out), src)

    @leases
    def iall_gather(self, x: Buffer, out: Buffer) -> Request:
        return self.comm.Iallgather(_whole(x), _blocks(out, x.nbytes))

    @leases
    def iall_to_all(self, x: Buffer, out: Buffer) -> Request:
        return self.comm.Ialltoall(_blocks(x, x.nbytes // self.size), _blocks(out, out.nbytes // self.size))

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
        return self.comm.Igatherv(_whole(x), None if out is None else _uneven(out, counts, unit, starts), dst)

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
        return self.comm.Iscatterv(None if x is None else _uneven(x, counts, unit, starts), _whole(out), src)

    @leases
    def iall_gatherv(
        self, x: Buffer, out: Buffer, counts: Sequence[int], unit: int, starts: Sequence[int] | None = None
    ) -> Request:
        return self.comm.Iallgatherv(_whole(x), _uneven(out, counts, unit, starts))

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
        return self.comm.Ialltoallv(_uneven(x, sent, unit, sent_starts), _uneven(out, received, unit, received_starts))

    @leases
    def ireduce_scatterv(self, x: Buffer, out: Buffer, counts: Sequence[int], op: str) -> Request:
        """Reduce x, cut into blocks of `counts` elements; rank r keeps block r."""
        return self.comm.Ireduce_scatter(_typed(x), _typed(out), list(counts), _op(op, x))

    # ------------------------------------------------------------------ communicators: these block until all call

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


def _transport(comm: MPI.Comm) -> Transport:
    assert isinstance(comm, MPI.Intracomm)
    return Transport(comm)


def _op(name: str, buffer: Buffer) -> MPI.Op:
    return (_BOOL_OPS if buffer.element.kind == "bool" else _OPS)[name]


def _typed(buffer: Buffer) -> list[Any]:
    return [memory_of(buffer), buffer.count, _DATATYPES[buffer.element.name]]


def _whole(buffer: Buffer) -> list[Any]:
    return _blocks(buffer, buffer.nbytes)


def _blocks(buffer: Buffer, block_nbytes: int) -> list[Any]:
    """The buffer as equal blocks; mpi4py wants the size of one."""
    if block_nbytes <= MAX_COUNT:
        return [memory_of(buffer), block_nbytes, MPI.BYTE]
    return [memory_of(buffer), 1, _giant(block_nbytes)]


def _uneven(buffer: Buffer, counts: Sequence[int], unit: int, starts: Sequence[int] | None) -> list[Any]:
    """The buffer as blocks of `counts` units that begin at `starts`, or lie one behind the other."""
    if starts is None:
        starts = list(accumulate(counts[:-1], initial=0))
    if max(starts) > MAX_COUNT and MPI.VERSION < 4:
        raise Unavailable(
            f"uneven blocks of {sum(counts)} elements in all: this MPI counts with 32 bits, so their sum must stay "
            f"below {MAX_COUNT}; use even blocks, or several calls"
        )
    # Open MPI copies a rank's block to itself at once if both sides have this type, else through memory of its own.
    if (max(starts) + max(counts)) * unit <= MAX_COUNT:
        counts, starts, unit = [count * unit for count in counts], [start * unit for start in starts], 1
    return [memory_of(buffer), (list(counts), list(starts)), _word(unit)]


@lru_cache(maxsize=32)
def _word(nbytes: int) -> MPI.Datatype:
    """A unit of `nbytes` bytes: with larger units the counts stay small."""
    return MPI.BYTE if nbytes == 1 else MPI.BYTE.Create_contiguous(nbytes).Commit()


def _sliced(post: Callable[[Any, Any], Request], x: Buffer | None, out: Buffer | None) -> Request:
    """Post an element-wise operation, in slices where the count is too large for one call."""
    buffer = x if out is None else out
    assert buffer is not None
    if buffer.count <= SLICE_COUNT:
        return post(None if x is None else _typed(x), None if out is None else _typed(out))
    datatype = _DATATYPES[buffer.element.name]

    def piece(whole: Buffer | None, start: int) -> Any:
        if whole is None:
            return None
        part = whole.array()[start : start + SLICE_COUNT]
        return [part, part.size, datatype]

    slices = Requests([post(piece(x, start), piece(out, start)) for start in range(0, buffer.count, SLICE_COUNT)])
    slices.lease = (x, out)
    return slices


# ---------------------------------------------------------------------- the library


def duplicating(comm: object) -> tuple[Callable[[], Request], Callable[[], Transport]]:
    """Two collective calls on an mpi4py communicator: one to meet by, and one that then makes a duplicate."""
    if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
        raise UsageError(
            "an mpi4py intracommunicator is needed, got MPI.COMM_NULL: it was freed before, or this rank is not in it"
        )
    if not isinstance(comm, MPI.Intracomm):
        raise UsageError(f"an mpi4py intracommunicator is needed, got {type(comm).__name__}")
    return comm.Ibarrier, lambda: Transport(comm.Dup())


def start() -> Transport:
    """Start MPI if it is not running and return a duplicate of the world communicator; collective."""
    if MPI.Is_finalized():
        raise RuntimeError("MPI is finalized and cannot be started again in this process")
    if not MPI.Is_initialized():  # mpi4py was told not to
        with without_network_cards(os.environ):
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return Transport(MPI.COMM_WORLD.Dup())


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
    if mpi4py.rc.finalize is False and is_running():
        MPI.Finalize()


def is_running() -> bool:
    return bool(MPI.Is_initialized() and not MPI.Is_finalized())


def abort(code: int) -> None:
    """End every rank of the job."""
    MPI.COMM_WORLD.Abort(code)
