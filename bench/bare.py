"""Bare: the steps that collectives of a node cannot do without, for floors.py and ddp.py.

Loops over NumPy and the kernel's copies between processes, with words by which the ranks
meet; no checks, no event loop, nobody else's turn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

import mpdist
from mpdist.algorithms.shared.moving import Memory, copy
from mpdist.bench.contenders import Arrays, Bound, as_run
from mpdist.bench.operations import ITEM_BYTES, Array, Operation
from mpdist.memory import as_buffer
from mpdist.transport.reach import Remote

if TYPE_CHECKING:
    from mpdist.transport.raw import Raw

HEAD_BYTES = 256
SLOT_ITEMS = 1024**2 // ITEM_BYTES
# What is copied and added at a time, to stay in a core's cache.
PIECE_ITEMS = 256 * 1024 // ITEM_BYTES
SHOWN, READ = 0, 1
Step = Callable[[int], None]
"""Does the operation once; the number is that of the repetition."""


class Several:
    """Ranks with words that all map, and each other's arrays."""

    def __init__(self, world: mpdist.Communicator, raw: Raw, nbytes: int = HEAD_BYTES) -> None:
        """Take a block of so many bytes, which begins with words."""
        shared = world._channel.engine.shared
        assert shared is not None, "these ranks share no memory"
        assert shared.reach is not None, "the kernel keeps these ranks' memory private"
        self.shared, self.reach, self.raw = shared, shared.reach, raw
        self.rank, self.size = world.rank, world.size
        self.block = shared.allocate(nbytes, "bare steps")
        assert self.block is not None
        self.block.bytes()[:HEAD_BYTES] = 0
        self.offsets = raw.of_all(self.block.offset)
        self.lines = [shared.words(rank, offset, 2) for rank, offset in enumerate(self.offsets)]
        self.scratch = np.empty(PIECE_ITEMS, np.float32)
        self.rounds = 0

    def meet(self) -> None:
        """All have come; there may be more of them than cores, so who waits gives way."""
        self.rounds += 1
        self.lines[self.rank][SHOWN] = self.rounds
        while any(line[SHOWN] < self.rounds for line in self.lines):
            os.sched_yield()

    def of_others(self, array: Array) -> list[Memory]:
        """The others' arrays, where all bind the same; collective."""
        offset = self.shared.offset_of(as_buffer(array))
        told = self.raw.of_all((array.ctypes.data if offset is None else offset, offset is not None, array.size))
        return [self._of(rank, *facts) for rank, facts in enumerate(told) if rank != self.rank]

    def _of(self, rank: int, place: int, is_mapped: bool, count: int) -> Memory:
        if is_mapped:
            return self.shared.array(rank, place, count, np.float32)
        return Remote(self.reach, rank, place, count, np.dtype(np.float32))


class Two(Several):
    """Two ranks: two slots of each besides."""

    def __init__(self, world: mpdist.Communicator, raw: Raw) -> None:
        super().__init__(world, raw, HEAD_BYTES + 2 * SLOT_ITEMS * ITEM_BYTES)
        self.other = 1 - world.rank
        self.mine, self.theirs = self.lines[self.rank], self.lines[self.other]
        self.slots = [
            [
                self.shared.array(rank, offset + HEAD_BYTES + side * SLOT_ITEMS * ITEM_BYTES, SLOT_ITEMS, np.float32)
                for side in range(2)
            ]
            for rank, offset in enumerate(self.offsets)
        ]

    def meet(self) -> None:
        """Both have come."""
        self.rounds += 1
        self.mine[SHOWN] = self.mine[READ] = self.rounds
        self.wait(SHOWN, self.rounds)

    def wait(self, word: int, number: int) -> None:
        theirs = self.theirs
        while theirs[word] < number:
            pass

    def of_other(self, array: Array) -> Memory:
        """The other's array, where both bind the same; collective."""
        (memory,) = self.of_others(array)
        return memory

    def add(self, target: Array, x: Array, theirs: Memory) -> Iterator[tuple[int, int]]:
        """Add in pieces; gives each piece that is done."""
        for start in range(0, x.size, PIECE_ITEMS):
            end = min(start + PIECE_ITEMS, x.size)
            part = theirs[start:end]
            if isinstance(part, Remote):
                part.read_into(self.scratch[: end - start])
                part = self.scratch[: end - start]
            np.add(x[start:end], part, out=target[start:end])
            yield start, end

    def exchange(self, shown: Array, take: Callable[[int, int, Array], object]) -> None:
        """Show all through the slots, and take what the other shows."""
        before = self.rounds
        count = -(-shown.size // SLOT_ITEMS)
        self.rounds += count
        for number in range(count + 1):
            if number < count:
                self.wait(READ, before + number - 1)
                part = shown[number * SLOT_ITEMS : (number + 1) * SLOT_ITEMS]
                np.copyto(self.slots[self.rank][number % 2][: part.size], part)
                self.mine[SHOWN] = before + number + 1
            if number:
                self.wait(SHOWN, before + number)
                start, end = (number - 1) * SLOT_ITEMS, min(number * SLOT_ITEMS, shown.size)
                take(start, end, self.slots[self.other][(number - 1) % 2][: end - start])
                self.mine[READ] = before + number
        self.wait(READ, self.rounds)


class Bare:
    """A contender with a method for each operation that it knows, which gives the step on these arrays."""

    def __init__(self, two: Two, name: str, *, is_resident: bool = False) -> None:
        self.two = two
        self.name = name
        self.is_resident = is_resident

    def bind(self, op: Operation, arrays: Arrays) -> Bound:
        step: Step = getattr(self, op.name)(arrays)

        def run(count: int) -> None:
            for number in range(count):
                step(number)

        return Bound(as_run(run), arrays.x, arrays.x if arrays.out is None else arrays.out)


class Straight(Bare):
    """Each rank reads and writes the other's arrays where they are."""

    def barrier(self, _: Arrays) -> Step:
        return lambda number: self.two.meet()

    def all_reduce(self, arrays: Arrays) -> Step:
        x, theirs, two = arrays.x, self.two.of_other(arrays.x), self.two
        half = -(-x.size // 2)
        mine = slice(two.rank * half, min((two.rank + 1) * half, x.size))

        def step(_: int) -> None:
            two.meet()
            own, other = x[mine], theirs[mine]
            for start, end in two.add(own, own, other):
                copy(other[start:end], own[start:end])
            two.meet()

        return step

    def reduce_scatter(self, arrays: Arrays) -> Step:
        x, out, theirs, two = arrays.x, arrays.out, self.two.of_other(arrays.x), self.two
        mine = slice(two.rank * out.size, (two.rank + 1) * out.size)

        def step(_: int) -> None:
            two.meet()
            for _ in two.add(out, x[mine], theirs[mine]):
                pass
            two.meet()

        return step

    def all_gather(self, arrays: Arrays) -> Step:
        x = arrays.x
        return self._copying(x, self.two.of_other(x), arrays.out.reshape(2, x.size), slice(0, x.size), slice(0, x.size))

    def all_to_all(self, arrays: Arrays) -> Step:
        x, two = arrays.x, self.two
        block = x.size // 2
        mine = slice(two.rank * block, (two.rank + 1) * block)
        return self._copying(x, two.of_other(x), arrays.out.reshape(2, block), mine, mine)

    def _copying(self, x: Array, theirs: Memory, rows: Array, own: slice, other: slice) -> Step:
        two = self.two

        def step(_: int) -> None:
            two.meet()
            copy(rows[two.rank], x[own])
            copy(rows[two.other], theirs[other])
            two.meet()

        return step

    def broadcast(self, arrays: Arrays) -> Step:
        x, theirs, two = arrays.x, self.two.of_other(arrays.x), self.two
        half = x.size // 2

        def step(number: int) -> None:
            two.meet()
            if number % 2 == two.rank:
                copy(theirs[half:], x[half:])
            else:
                copy(x[:half], theirs[:half])
            two.meet()

        return step


class Slots(Bare):
    """Private arrays through slots."""

    def all_reduce(self, arrays: Arrays) -> Step:
        return self._adding(arrays.x, arrays.x, arrays.x)

    def reduce_scatter(self, arrays: Arrays) -> Step:
        rows = arrays.x.reshape(2, -1)
        return self._adding(rows[self.two.other], rows[self.two.rank], arrays.out)

    def _adding(self, shown: Array, own: Array, target: Array) -> Step:
        def take(start: int, end: int, theirs: Array) -> None:
            np.add(own[start:end], theirs, out=target[start:end])

        return lambda number: self.two.exchange(shown, take)

    def all_gather(self, arrays: Arrays) -> Step:
        rows = arrays.out.reshape(2, -1)
        return self._placing(arrays.x, arrays.x, rows)

    def all_to_all(self, arrays: Arrays) -> Step:
        x = arrays.x.reshape(2, -1)
        return self._placing(x[self.two.other], x[self.two.rank], arrays.out.reshape(2, -1))

    def _placing(self, shown: Array, own: Array, rows: Array) -> Step:
        two = self.two

        def take(start: int, end: int, theirs: Array) -> None:
            np.copyto(rows[two.rank][start:end], own[start:end])
            np.copyto(rows[two.other][start:end], theirs)

        return lambda number: two.exchange(shown, take)


class StraightOfSeveral:
    """Each rank reads its slice of all arrays where they are, and writes it there."""

    def __init__(self, several: Several, name: str, *, is_resident: bool = False) -> None:
        self.several = several
        self.name = name
        self.is_resident = is_resident

    def all_reduce(self, x: Array) -> Step:
        several, others = self.several, self.several.of_others(x)
        width = -(-x.size // several.size)
        first, last = several.rank * width, min((several.rank + 1) * width, x.size)

        def step(_: int) -> None:
            several.meet()
            for start in range(first, last, PIECE_ITEMS):
                part = slice(start, min(start + PIECE_ITEMS, last))
                own = x[part]
                for other in others:
                    theirs = other[part]
                    if isinstance(theirs, Remote):
                        room = several.scratch[: own.size]
                        theirs.read_into(room)
                        theirs = room
                    np.add(own, theirs, out=own)
                for other in others:
                    copy(other[part], own)
            several.meet()

        return step

    def bind(self, op: Operation, arrays: Arrays) -> Bound:
        step = self.all_reduce(arrays.x)

        def run(count: int) -> None:
            for number in range(count):
                step(number)

        return Bound(as_run(run), arrays.x, arrays.x)


class Awaited:
    """An awaited call of MPI: posted, tested until it is done."""

    name = "bare, awaited"
    is_resident = False

    def all_reduce(self, arrays: Arrays) -> Callable[[], Any]:
        from mpi4py import MPI

        return lambda: MPI.COMM_WORLD.Iallreduce(MPI.IN_PLACE, arrays.x)

    def barrier(self, _: Arrays) -> Callable[[], Any]:
        from mpi4py import MPI

        return MPI.COMM_WORLD.Ibarrier

    def bind(self, op: Operation, arrays: Arrays) -> Bound:
        post = getattr(self, op.name)(arrays)

        async def run(count: int) -> None:
            for _ in range(count):
                await Posted(post())

        return Bound(run, arrays.x, arrays.x)


class Posted:
    """A request, to be awaited."""

    __slots__ = ("request",)

    def __init__(self, request: Any) -> None:
        self.request = request

    def __await__(self) -> Generator[None, None, None]:
        test = self.request.Test
        while not test():
            pass
        return
        yield
