"""Floors: the steps that a collective cannot do without, bare, against mpi4py and against mpdist.

    python bench/floors.py [--seconds 0.6] [--json FILE] [--only WORD]

starts itself on 2 ranks, and on 4 for the last case, with the environment's MPI. Bare are loops over NumPy and the
kernel's copies between processes, with words by which the ranks meet; no checks,
no event loop, nobody else's turn. `bare / mpi4py` is what no Python code over these means
can be below, beside the target of bench/collectives.py; `mpdist / bare` is what mpdist
adds. Of the ways there are the fastest counts. For what only copies, also copying in
a rank's own memory. Rounds, checks and arrays are those of
bench/collectives.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from copying import COPY, copying  # beside this script
from goals import FOUR_RANK_ROWS, RAW, Goal, Row, two_rank_rows
from measure import (
    Result,
    is_rank,
    launch,
    mpi_name,
    positive_seconds,
    publish,
    require,
    require_output,
    summary,
)

import mpdist
from mpdist.algorithms.shared.moving import Memory, copy
from mpdist.bench.case import OURS, RAW_LATER, RAW_NOW, RESIDENT
from mpdist.bench.contenders import Arrays, Bound, Contender, allocate, as_run, private
from mpdist.bench.job import Bench, Task
from mpdist.bench.operations import ITEM_BYTES, OPERATIONS, Array, Operation
from mpdist.bench.rounds import measure
from mpdist.bench.sizes import size_text
from mpdist.memory import as_buffer
from mpdist.transport.reach import Remote

if TYPE_CHECKING:
    from mpdist.transport.raw import Raw

HEAD_BYTES = 256
SLOT_ITEMS = 1024**2 // ITEM_BYTES
# What is copied and added at a time, to stay in a core's cache.
PIECE_ITEMS = 256 * 1024 // ITEM_BYTES
SHOWN, READ = 0, 1
# All that these do is copying, by every rank as much as its result takes.
COPIED_ALONE = "all_gather", "all_to_all"

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


def title(row: Row, goal: Goal, ranks: int) -> str:
    """What a goal is called."""
    what = f"{row.op} {size_text(row.nbytes)}".removesuffix(" 0 B") + ("" if ranks == 2 else f", {ranks} ranks")
    return what + ("" if row.nbytes < 64 else " on comm.empty memory" if goal.ours == RESIDENT else " private")


def goals_of(row: Row) -> list[Goal]:
    """Those against mpi4py."""
    return [goal for goal in row.goals if goal.against in (RAW, RAW_NOW)]


def cases() -> list[str]:
    """What is measured; the MPI does not matter."""
    by_ranks = {2: two_rank_rows("MPICH"), 4: FOUR_RANK_ROWS}
    return [title(row, goal, ranks) for ranks, rows in by_ranks.items() for row in rows for goal in goals_of(row)]


class Floors(Bench):
    """One rank of this benchmark."""

    def __init__(self, world: mpdist.Communicator, raw: Raw, task: Task, only: str) -> None:
        super().__init__(world, raw, task)
        self.only = only
        self.bare: dict[str, list[Contender]]
        if world.size > 2:
            several = Several(world, raw)
            self.rows = FOUR_RANK_ROWS
            self.bare = {
                RESIDENT: [StraightOfSeveral(several, "bare, comm.empty", is_resident=True)],
                OURS: [StraightOfSeveral(several, "bare")],
            }
            return
        two = Two(world, raw)
        self.rows = two_rank_rows(mpi_name())
        self.bare = {
            RESIDENT: [Straight(two, "bare, comm.empty", is_resident=True)],
            OURS: [Straight(two, "bare"), Slots(two, "bare, through slots")],
            "awaited": [Awaited(), Straight(two, "bare words")],
        }

    async def results(self) -> list[Result]:
        results: list[Result] = []
        for row in self.rows:
            for goal in goals_of(row):
                case = title(row, goal, self.world.size)
                if self.only in case:
                    results += await self.compare(case, row, goal)
        return results

    async def compare(self, case: str, row: Row, goal: Goal) -> list[Result]:
        """The fastest of the bare ways against mpi4py, and mpdist against it."""
        op = OPERATIONS[row.op]
        elements = op.elements(row.nbytes, self.world.size)
        bare = [each for each in self.bare["awaited" if row.nbytes < 64 else goal.ours] if hasattr(each, row.op)]
        rivals = (RAW_NOW,) if goal.against == RAW_NOW else (RAW_NOW, RAW_LATER)
        bounds = {name: bound for name, bound in self.bound(op, elements).items() if name in (goal.ours, *rivals)}
        floors = self._bare_bounds(bare, op, elements)
        bounds |= floors
        wanted = self.expected(op, elements)
        await self.check(op, bounds, wanted)
        copy = {COPY: copying(row.nbytes)} if row.op in COPIED_ALONE else {}
        _, seconds = await measure({**bounds, **copy}, self.raw, self.task.seconds)
        await self.check(op, bounds, wanted)
        micro = {name: [each * 1e6 for each in kept] for name, kept in seconds.items()}
        floor = self._fastest(micro, floors)
        mpi4py = self._fastest(micro, rivals)
        about = {"ranks": self.world.size, "mpi": mpi_name()}
        found = [
            summary(f"{case}: {floor} / mpi4py", micro[floor], micro[mpi4py], target=goal.target, **about),
            summary(f"{case}: mpdist / {floor}", micro[goal.ours], micro[floor], **about),
        ]
        found += [summary(f"{case}: {name} / mpi4py", micro[name], micro[mpi4py], **about) for name in copy]
        if self.world.rank == 0:
            for each in found:
                print(f"{each.case}: {each.ratio:.2f}", file=sys.stderr, flush=True)
        return found

    def _bare_bounds(self, bare: list[Contender], op: Operation, elements: int) -> dict[str, Bound]:
        arrays = allocate(op, elements, self.world.size, private)
        return {each.name: self._bind(each, op, elements, arrays) for each in bare}

    @staticmethod
    def _fastest(micro: dict[str, list[float]], names: Any) -> str:
        return min(names, key=lambda name: float(np.median(micro[name])))


async def main(world: mpdist.Communicator, options: argparse.Namespace) -> None:
    from mpdist.transport.raw import Raw

    bench = Floors(world, Raw(), Task((), (), [OURS, RESIDENT, RAW_NOW, RAW_LATER], options.seconds), options.only)
    results = await bench.results()
    bench.close()
    if world.rank == 0 and results:
        publish(results, options.json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=positive_seconds, default=0.6, help="for the rounds of one operation and size"
    )
    parser.add_argument("--json", help="append one JSON line per case to this file")
    parser.add_argument("--only", default="", help="cases that contain this word")
    parsed = parser.parse_args()
    if is_rank():
        mpdist.run(main, parsed)
    else:
        require(parsed.only, "--only", cases())
        require_output(parsed.json)
        for ranks in (2, 4):
            launch(__file__, ranks)
