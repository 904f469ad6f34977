"""Staging: operations on arrays that MPI cannot reach, through host memory that it can.

An operation whose arrays are on a device runs on Mirrors in their place: what it
reads is copied out before its program begins, what it writes is copied in when that
has ended, and neither the event loop nor the order of collectives notices. Where
element i of the result needs only element i of the input, an array travels in
chunks: while one is communicated the next comes from the device, and the one before
goes back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from mmap import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.comm.mirror import Mirror, View
from mpdist.errors import UsageError
from mpdist.memory import Buffer, Device, ReduceOp, as_buffer, is_same, overlap
from mpdist.memory.accelerator import accelerator_of
from mpdist.memory.pinned import Pinned
from mpdist.progress.marks import copied, settled

if TYPE_CHECKING:
    from mpdist.memory.mark import Mark
    from mpdist.progress.collective import Program, Steps
    from mpdist.progress.engine import Engine
    from mpdist.transport.mpi import Transport

# An array of more than twice this travels in chunks of this size: large enough that a chunk's copy takes much longer
# than queueing it, small enough that the first and the last, which nothing hides, cost little.
CHUNK_BYTES = 4 * 1024 * 1024

# Element i of the result needs element i of the inputs only.
_ELEMENTWISE = frozenset({"all_reduce", "broadcast", "exscan", "reduce", "scan"})


class Staging:
    """The Mirrors of one operation.

    Args:
        device: where its arrays are.

    Attributes:
        is_even: the ranks' arrays are of one size.
    """

    def __init__(self, engine: Engine, device: Device, is_even: bool = True) -> None:
        self.is_even = is_even
        self.pinned = pinned_of(engine, device)
        self.accelerator = self.pinned.accelerator
        self.sources: list[Mirror] = []
        self.results: list[Mirror] = []

    def mirror(self, buffer: Buffer, *, is_source: bool = False, is_result: bool = False) -> Mirror:
        """A Mirror of an array, whose copies wait for what the program has queued for it."""
        mirror = Mirror(self, buffer)
        self.accelerator.follow(buffer)
        if is_source:
            self.sources.append(mirror)
        if is_result:
            self.results.append(mirror)
        return mirror

    def mirrored(self, x: Any, *, is_source: bool = False, is_result: bool = False) -> Any:
        """The same for an argument, an array or a list of them; the same memory has one Mirror.

        Raises:
            UsageError: what is written overlaps what was given before.
        """
        if isinstance(x, list | tuple):
            return [self.mirrored(each, is_source=is_source, is_result=is_result) for each in x]
        buffer = as_buffer(x, writable=is_result)
        for mirror in [*self.sources, *self.results] if is_result else ():
            other = mirror.there
            if mirror.original is x or (buffer.nbytes and is_same(buffer, other)):  # empty ones are all at one address
                self.results.append(mirror)
                return mirror
            if overlap(buffer, other):
                raise UsageError("x and out overlap in memory; give out memory of its own")
        return self.mirror(buffer, is_source=is_source, is_result=is_result)

    def copy_out(self, start: int = 0, end: int = sys.maxsize) -> list[Mark]:
        """Queue copies of these elements of all sources to the host."""
        copy = self.accelerator.copy_out
        return [
            copy(mirror.there, low, mirror.octets[low:high]) for mirror, low, high in _parts(self.sources, start, end)
        ]

    def copy_in(self, start: int = 0, end: int = sys.maxsize) -> list[Mark]:
        """Queue copies of these elements of all results to the device."""
        copy = self.accelerator.copy_in
        return [
            copy(mirror.octets[low:high], mirror.there, low) for mirror, low, high in _parts(self.results, start, end)
        ]

    def run(self, op: str, program: Program, arguments: Sequence[Any], transport: Transport) -> Steps[Any]:
        """The program on Mirrors, between the copies; its result is the array on the device."""
        spans = list(self._spans(op, arguments))
        outward = [self.copy_out(*span) for span in spans]
        inward: list[Mark] = []
        result = None
        try:
            with settled(*outward, inward):
                for span, marks in zip(spans, outward, strict=True):
                    yield from copied(marks)
                    chunk = arguments if len(spans) == 1 else [part_of(argument, *span) for argument in arguments]
                    result = yield from program(transport, *chunk)
                    inward += [] if result is None else self.copy_in(*span)  # None where this rank gets nothing
                yield from copied(inward)
        finally:
            self.forget()
        return original_of(result)

    def forget(self) -> None:
        """Its Mirrors may go as soon as nobody else needs them."""
        self.sources.clear()
        self.results.clear()

    def _spans(self, op: str, arguments: Sequence[Any]) -> Iterator[tuple[int, int]]:
        """From and to which element the arrays travel together."""
        mirrors = [each for each in flat(arguments) if isinstance(each, Mirror)]
        if not mirrors:
            yield (0, 0)
            return
        count, unit = mirrors[0].count, mirrors[0].element.itemsize
        has_function = any(isinstance(each, ReduceOp) for each in arguments)  # of whole arrays
        if op not in _ELEMENTWISE or has_function or count * unit <= 2 * CHUNK_BYTES:
            yield (0, sys.maxsize)
            return
        width = CHUNK_BYTES // unit
        for start in range(0, count, width):
            yield start, min(start + width, count)


def pinned_of(engine: Engine, device: Device) -> Pinned:
    """The host memory for copies of a device, made for its first array.

    Raises:
        Unavailable: the library for such arrays is missing.
    """
    known = engine.staging.get(device)
    if known is None:
        shared = engine.shared

        def allocate(nbytes: int) -> Any:
            return pages(nbytes) if shared is None else shared.empty(nbytes, np.uint8)

        known = engine.staging.setdefault(device, Pinned(accelerator_of(device), allocate))  # by one thread of several
    return known


def pages(nbytes: int) -> Any:
    """Memory (uint8) of whole pages: beside a neighbour's those could not be pinned.

    Raises:
        MemoryError: there is none.
    """
    try:
        return np.frombuffer(mmap(-1, nbytes), np.uint8)
    except OSError as error:
        raise MemoryError(f"no {nbytes} bytes of memory: {error}") from error


def original_of(result: Any) -> Any:
    """What the caller gets for what the operation made of Mirrors."""
    if isinstance(result, Mirror | View):
        return result.original
    if isinstance(result, list):
        return [original_of(each) for each in result]
    return result


def _parts(mirrors: Sequence[Mirror], start: int, end: int) -> Iterator[tuple[Mirror, int, int]]:
    """From and to which byte of each these elements are; those that have none of them are left out."""
    for mirror in mirrors:
        unit = mirror.element.itemsize
        low, high = start * unit, min(end * unit, mirror.nbytes)
        if high > low:
            yield mirror, low, high


def part_of(argument: Any, start: int, end: int) -> Any:
    """The same argument for a chunk."""
    if isinstance(argument, Mirror):
        return argument.part(start, end)
    return tuple(part_of(each, start, end) for each in argument) if isinstance(argument, tuple) else argument


def flat(arguments: Sequence[Any]) -> Iterator[Any]:
    """The arguments of a program, those of a call of MPI among them."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from flat(argument)
        else:
            yield argument
