"""Contenders: the same operation by mpdist and by its rivals, on the same arrays.

Each binds an operation to its arrays once, and gets a function that does it n
times; all of them are called in the same way, so that one can be exchanged for
another.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpdist.bench.case import OURS, RAW_LATER, RAW_NOW
from mpdist.bench.operations import Array, Operation, length, partner

if TYPE_CHECKING:
    from mpdist.comm import Communicator
    from mpdist.transport.raw import Raw

Run = Callable[[int], Awaitable[None]]


@dataclass
class Arrays:
    """What an operation works on; None where it has none."""

    x: Array | None
    out: Array | None


@dataclass
class Bound:
    """An operation on its arrays.

    Attributes:
        run: does it n times.
        source: gets `given` before a check.
        result: holds what is `expected` after `run(1)`.
    """

    run: Run
    source: Array | None
    result: Array | None


class Contender(Protocol):
    """mpdist, or what it is compared with.

    Attributes:
        name: of its line in tables and plots.
        is_resident: works on `comm.empty` memory.
    """

    name: str
    is_resident: bool

    def bind(self, op: Operation, arrays: Arrays) -> Bound:
        """The operation on these arrays."""
        ...


def allocate(op: Operation, elements: int, ranks: int, empty: Callable[[int], Array]) -> Arrays:
    """The arrays of an operation, written once, so that every page is there."""

    def make(what: str) -> Array | None:
        if not what:
            return None
        array = empty(length(what, elements, ranks))
        array[:] = 0
        return array

    return Arrays(make(op.x), make(op.out))


def private(count: int) -> Array:
    """Memory of this process alone."""
    return np.empty(count, np.float32)


class Ours:
    """mpdist, awaited."""

    def __init__(self, comm: Communicator, name: str = OURS, *, is_resident: bool = False) -> None:
        self.comm = comm
        self.name = name
        self.is_resident = is_resident

    def bind(self, op: Operation, arrays: Arrays) -> Bound:
        x, out = arrays.x, arrays.out
        if op.name == "ping_pong":
            return Bound(self._ping_pong(arrays), x, out)
        result = x if out is None else out
        return Bound(_awaited(self._call(op.name, x, out), self.comm.size if op.is_rooted else 0), x, result)

    def _call(self, op: str, x: Array | None, out: Array | None) -> Callable[..., Awaitable[Any]]:
        """Posts the operation; with the root as argument where there is one."""
        comm, rank = self.comm, self.comm.rank
        calls: dict[str, Callable[..., Awaitable[Any]]] = {
            "barrier": lambda: comm.barrier(),
            "all_reduce": lambda: comm.all_reduce(x),
            "reduce_scatter": lambda: comm.reduce_scatter(x, out=out),
            "all_gather": lambda: comm.all_gather(x, out=out),
            "all_to_all": lambda: comm.all_to_all(x, out=out),
            "broadcast": lambda root: comm.broadcast(x, root),
            "reduce": lambda root: comm.reduce(x, root, out=out),
            "gather": lambda root: comm.gather(x, root, out=out),
            "scatter": lambda root: comm.scatter(x if rank == root else None, root, out=out),
        }
        return calls[op]

    def _ping_pong(self, arrays: Arrays) -> Run:
        comm, x, out = self.comm, arrays.x, arrays.out
        other = partner(comm.rank, comm.size)

        async def play(count: int) -> None:
            if other is None:
                return
            for _ in repeat(None, count):
                if comm.rank < other:
                    await comm.send(x, other)
                    await comm.recv(out, other)
                else:
                    await comm.recv(out, other)
                    await comm.send(x, other)

        return play


def _awaited(call: Callable[..., Awaitable[Any]], roots: int) -> Run:
    async def plain(count: int) -> None:
        for _ in repeat(None, count):
            await call()

    async def rooted(count: int) -> None:
        for number in range(count):
            await call(number % roots)

    return rooted if roots else plain


class RawContender:
    """mpi4py's own calls, blocking or not."""

    is_resident = False

    def __init__(self, raw: Raw, *, blocking: bool) -> None:
        self.raw = raw
        self.blocking = blocking
        self.name = RAW_NOW if blocking else RAW_LATER

    def bind(self, op: Operation, arrays: Arrays) -> Bound:
        x, out = arrays.x, arrays.out
        if op.name == "ping_pong":
            assert x is not None
            assert out is not None
            other = partner(self.raw.rank, self.raw.size)
            return Bound(as_run(self.raw.ping_pong(x, out, other, blocking=self.blocking)), x, out)
        run = as_run(self.raw.collective(op.name, x, out, blocking=self.blocking))
        return Bound(run, x, x if out is None else out)


def as_run(blocking: Callable[[int], None]) -> Run:
    """A blocking function, called as the awaited ones are."""

    async def run(count: int) -> None:
        blocking(count)

    return run
