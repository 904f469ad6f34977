"""Operations: each as a trial does it, with the calls that mpdist makes, and whether all ranks get what they should.

Each is tried with all arrays on the GPU, and with those of one rank there and those of
the other on the host, for ranks choose independently.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.memory import Buffer, as_buffer
from mpdist.memory.elements import Array

if TYPE_CHECKING:
    from mpdist.memory.accelerator import Accelerator
    from mpdist.transport.mpi import Transport
    from mpdist.transport.requests import Request

# So small that they travel with their envelope, and so large that they do not.
COUNTS = (5, 300_000)

TAG = 1


class Trial:
    """The ranks, and where their arrays are.

    Attributes:
        is_there: whether this rank's arrays are on the GPU.
    """

    def __init__(self, transport: Transport, accelerator: Accelerator) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.is_there = True
        self._accelerator = accelerator

    def holds(self, op: str) -> bool:
        """Whether all ranks get what they should, wherever their arrays are."""
        everyone = set(range(self.size))
        places = [everyone, *([{rank} for rank in everyone] if self.size > 1 else [])]
        found = []
        for place in places:
            self.is_there = self.rank in place
            found += [_TRIALS[op](self, count) for count in COUNTS]
        return all(found)

    def put(self, values: Array, is_there: bool | None = None) -> Buffer:
        """An array with these values."""
        if not (self.is_there if is_there is None else is_there):
            return as_buffer(values.copy())
        there = as_buffer(self._accelerator.empty(values.shape, values.dtype), writable=True)
        self._accelerator.copy_in(_octets(values), there, 0).wait()
        return there

    def has(self, buffer: Buffer, values: Array) -> bool:
        """Whether those are in it now."""
        if buffer.device.is_host:
            return bool(np.array_equal(buffer.array(), values.reshape(-1)))
        found = np.empty_like(values)
        self._accelerator.copy_out(buffer, 0, _octets(found)).wait()
        return bool(np.array_equal(found, values))

    def of(self, rank: int, count: int) -> Array:
        """What a rank gives: small whole numbers."""
        return (np.arange(count) % 89 + 100 * rank + 1).astype(np.float32)

    def total(self, ranks: range, count: int) -> Array:
        total: Array = np.zeros(count, np.float32)
        for rank in ranks:
            total += self.of(rank, count)
        return total

    def all(self, count: int) -> Array:
        """What all ranks give, one behind the other."""
        return np.concatenate([self.of(rank, count) for rank in range(self.size)])


def _octets(values: Array) -> Array:
    return values.reshape(-1).view(np.uint8)


def _done(request: Request) -> None:
    while not request.Test():
        os.sched_yield()


# ---------------------------------------------------------------------- the operations


def _send(trial: Trial, count: int) -> bool:
    found = [_message(trial, count, True, receiver) for receiver in (False, True)]  # on both ranks, whatever the first
    return all(found)


def _recv(trial: Trial, count: int) -> bool:
    found = [_message(trial, count, sender, True) for sender in (False, True)]
    return all(found)


def _message(trial: Trial, count: int, sender: bool, receiver: bool) -> bool:
    """Each rank to the next, as Receive does it; both say where their array is to be."""
    transport, rank, size = trial.transport, trial.rank, trial.size
    x, out = trial.put(trial.of(rank, count), sender), trial.put(np.zeros(count, np.float32), receiver)
    memory = [transport.memory_of(out), out.nbytes, transport.byte]
    sent = transport.isend([transport.memory_of(x), x.nbytes, transport.byte], (rank + 1) % size, TAG)
    handle: Any = None
    while handle is None:
        sent.Test()
        handle = transport.improbe(transport.any_source, transport.any_tag, transport.status)
    _done(handle.Irecv(memory))
    _done(sent)
    return trial.has(out, trial.of((rank - 1) % size, count)) and trial.has(x, trial.of(rank, count))


def _broadcast(trial: Trial, count: int) -> bool:
    x = trial.put(trial.of(trial.rank, count))
    _done(trial.transport.ibroadcast(x, 0))
    return trial.has(x, trial.of(0, count))


def _gather(trial: Trial, count: int) -> bool:
    x = trial.put(trial.of(trial.rank, count))
    out = trial.put(np.zeros(trial.size * count, np.float32)) if trial.rank == 0 else None
    _done(trial.transport.igather(x, out, 0))
    return out is None or trial.has(out, trial.all(count))


def _scatter(trial: Trial, count: int) -> bool:
    """Also as blocks that the others do not know to be even."""
    transport, is_root, counts = trial.transport, trial.rank == 0, [count] * trial.size
    x = trial.put(trial.all(count)) if is_root else None
    out, other = (trial.put(np.zeros(count, np.float32)) for _ in range(2))
    _done(transport.iscatter(x, out, 0))
    _done(transport.iscatterv(x, counts if is_root else (), 4, other, 0))
    return all(trial.has(each, trial.of(trial.rank, count)) for each in (out, other))


def _all_gather(trial: Trial, count: int) -> bool:
    x, out = trial.put(trial.of(trial.rank, count)), trial.put(np.zeros(trial.size * count, np.float32))
    _done(trial.transport.iall_gather(x, out))
    return trial.has(out, trial.all(count))


def _all_to_all(trial: Trial, count: int) -> bool:
    x = trial.put(np.tile(trial.of(trial.rank, count), trial.size))
    out = trial.put(np.zeros(trial.size * count, np.float32))
    _done(trial.transport.iall_to_all(x, out))
    return trial.has(out, trial.all(count))


def _all_reduce(trial: Trial, count: int) -> bool:
    x, out = trial.put(trial.of(trial.rank, count)), trial.put(np.zeros(count, np.float32))
    total = trial.total(range(trial.size), count)
    _done(trial.transport.iall_reduce(x, out, "sum"))
    _done(trial.transport.iall_reduce(None, x, "sum"))
    return trial.has(out, total) and trial.has(x, total)


def _reduce(trial: Trial, count: int) -> bool:
    x = trial.put(trial.of(trial.rank, count))
    out = trial.put(np.zeros(count, np.float32)) if trial.rank == 0 else None
    _done(trial.transport.ireduce(x, out, "sum", 0))
    return out is None or trial.has(out, trial.total(range(trial.size), count))


def _reduce_scatter(trial: Trial, count: int) -> bool:
    x = trial.put(np.tile(trial.of(trial.rank, count), trial.size))
    out = trial.put(np.zeros(count, np.float32))
    _done(trial.transport.ireduce_scatter(x, out, "sum"))
    return trial.has(out, trial.total(range(trial.size), count))


def _scan(trial: Trial, count: int) -> bool:
    x, out = trial.put(trial.of(trial.rank, count)), trial.put(np.zeros(count, np.float32))
    _done(trial.transport.iscan(x, out, "sum"))
    return trial.has(out, trial.total(range(trial.rank + 1), count))


def _exscan(trial: Trial, count: int) -> bool:
    x, out = trial.put(trial.of(trial.rank, count)), trial.put(np.zeros(count, np.float32))
    _done(trial.transport.iexscan(x, out, "sum"))
    return trial.rank == 0 or trial.has(out, trial.total(range(trial.rank), count))


_TRIALS: dict[str, Callable[[Trial, int], bool]] = {
    "send": _send, "recv": _recv, "broadcast": _broadcast, "gather": _gather, "scatter": _scatter,
    "all_gather": _all_gather, "all_to_all": _all_to_all, "all_reduce": _all_reduce, "reduce": _reduce,
    "reduce_scatter": _reduce_scatter, "scan": _scan, "exscan": _exscan,
}  # fmt: skip
