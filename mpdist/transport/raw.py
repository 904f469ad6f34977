"""Raw: mpi4py as a plain program uses it, for `mpdist bench` to compare with.

Blocking calls, or non-blocking ones waited for at once, on a duplicate of the
world communicator; no checks, no event loop. Import it when mpdist has started:
mpi4py must have been told by then how it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any, TypeVar

import numpy as np

from mpdist.transport.start_up import known_as_unavailable

with known_as_unavailable():
    from mpi4py import MPI
from numpy.typing import NDArray

T = TypeVar("T")
Repeat = Callable[[int], None]

_BLOCKING = {
    "all_reduce": "Allreduce",
    "reduce": "Reduce",
    "reduce_scatter": "Reduce_scatter_block",
    "all_gather": "Allgather",
    "broadcast": "Bcast",
    "all_to_all": "Alltoall",
    "gather": "Gather",
    "scatter": "Scatter",
    "barrier": "Barrier",
}


class Raw:
    """A duplicate of the world communicator, and what a program does with it."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()

    @staticmethod
    def name_and_version() -> tuple[str, str]:
        """`("MPICH", "5.0.2")`, `("Open MPI", "5.0.11")`."""
        name, version = MPI.get_vendor()
        return name, ".".join(map(str, version))

    def fence(self) -> None:
        """Until all ranks are here."""
        self.comm.Barrier()

    def from_first(self, item: T) -> T:
        """Rank 0's item, on all ranks."""
        same: T = self.comm.bcast(item)
        return same

    def of_all(self, item: T) -> list[T]:
        """Every rank's item."""
        return self.comm.allgather(item)

    def slowest(self, seconds: list[float]) -> list[float]:
        """The largest over all ranks, place by place."""
        worst = np.array(seconds)
        self.comm.Allreduce(MPI.IN_PLACE, worst, MPI.MAX)
        return [float(value) for value in worst]

    def collective(self, op: str, x: NDArray[Any] | None, out: NDArray[Any] | None, *, blocking: bool) -> Repeat:
        """A function that does `op` n times; a root moves on by one rank each time.

        Args:
            x: in and out of all_reduce and broadcast; else only read.
        """
        name = _BLOCKING[op]
        call = getattr(self.comm, name if blocking else f"I{name.lower()}")
        arguments: tuple[Any, ...] = tuple(array for array in (x, out) if array is not None)
        if op == "all_reduce":
            arguments = (MPI.IN_PLACE, x)
        if op == "reduce":
            arguments = (x, out, MPI.SUM)
        is_rooted = op in ("reduce", "broadcast", "gather", "scatter")
        return _loop(call, arguments, self.size if is_rooted else 0, blocking)

    def ping_pong(self, x: NDArray[Any], out: NDArray[Any], partner: int | None, *, blocking: bool) -> Repeat:
        """A function that sends `x` there, and receives back into `out`, n times."""
        comm = self.comm

        def play(count: int) -> None:
            assert partner is not None
            is_first = self.rank < partner
            for _ in repeat(None, count):
                if is_first:
                    comm.Send(x, partner)
                    comm.Recv(out, partner)
                else:
                    comm.Recv(out, partner)
                    comm.Send(x, partner)

        def play_later(count: int) -> None:
            assert partner is not None
            is_first = self.rank < partner
            for _ in repeat(None, count):
                if is_first:
                    comm.Isend(x, partner).Wait()
                    comm.Irecv(out, partner).Wait()
                else:
                    comm.Irecv(out, partner).Wait()
                    comm.Isend(x, partner).Wait()

        if partner is None:
            return lambda count: None
        return play if blocking else play_later

    def free(self) -> None:
        self.comm.Free()


def _loop(call: Callable[..., Any], arguments: tuple[Any, ...], roots: int, blocking: bool) -> Repeat:
    """The tightest loop for each way, for what is not in it can't be held against mpi4py."""

    def plain(count: int) -> None:
        for _ in repeat(None, count):
            call(*arguments)

    def waited(count: int) -> None:
        for _ in repeat(None, count):
            call(*arguments).Wait()

    def rooted(count: int) -> None:
        for number in range(count):
            call(*arguments, root=number % roots)

    def rooted_waited(count: int) -> None:
        for number in range(count):
            call(*arguments, root=number % roots).Wait()

    if roots:
        return rooted if blocking else rooted_waited
    return plain if blocking else waited
