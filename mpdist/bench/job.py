"""Job: what every rank of a benchmark does, from pinning to the last case."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpdist import __version__
from mpdist.bench import machine
from mpdist.bench.case import GLOO, OURS, RAW_LATER, RAW_NOW, RESIDENT, Case, line_of
from mpdist.bench.contenders import Arrays, Bound, Contender, Ours, RawContender, allocate, private
from mpdist.bench.gloo import Gloo
from mpdist.bench.operations import ITEM_BYTES, OPERATIONS, Array, Operation, expected
from mpdist.bench.rounds import check, measure
from mpdist.bench.sizes import size_text, time_text
from mpdist.config import NO_SETTINGS, PREFIX
from mpdist.runtime.cores import Place

if TYPE_CHECKING:
    from mpdist.comm import Communicator
    from mpdist.transport.raw import Raw


@dataclass(frozen=True)
class Task:
    """What is to be measured.

    Attributes:
        sizes: in bytes.
        contenders: by their names.
        seconds: to spend on the rounds of one case.
    """

    ops: Sequence[str]
    sizes: Sequence[int]
    contenders: Sequence[str]
    seconds: float


class Bench:
    """One rank of a benchmark.

    Attributes:
        world: ours.
        raw: mpi4py's duplicate of the world, a rival and what the ranks agree by.
    """

    def __init__(self, world: Communicator, raw: Raw, task: Task) -> None:
        self.world = world
        self.raw = raw
        self.task = task
        self.nodes = len(set(raw.of_all(min(world.node.ranks))))
        own, places = Place.here(), raw.of_all(Place.here())
        near = [rank for rank, place in enumerate(places) if place.machine == own.machine and place.cores & own.cores]
        cores = frozenset().union(*(places[rank].cores for rank in world.node.ranks))
        core = machine.core_for(near.index(world.rank), sorted(own.cores)) if machine.CAN_PIN else None
        if core is not None:
            machine.pin(core)
        self.machine = describe(raw, core, max(raw.of_all(world.local_size)), len(cores))
        self.contenders = self._contenders()

    def _contenders(self) -> list[Contender]:
        makers: dict[str, Callable[[], Contender]] = {
            OURS: lambda: Ours(self.world),
            RESIDENT: lambda: Ours(self.world, RESIDENT, is_resident=True),
            RAW_NOW: lambda: RawContender(self.raw, blocking=True),
            RAW_LATER: lambda: RawContender(self.raw, blocking=False),
            GLOO: lambda: Gloo(self.raw, self.nodes),
        }
        return [makers[name]() for name in self.task.contenders]

    async def cases(self) -> AsyncIterator[Case]:
        """All cases, one after the other."""
        for name in self.task.ops:
            op = OPERATIONS[name]
            sizes = self.task.sizes if op.has_size else [0]
            slow: set[str] = set()
            for elements in dict.fromkeys(op.elements(size, self.world.size) for size in sizes):
                case = await self.case(op, elements, slow)
                yield case
                slow.update(case.slow())
                if OURS in slow:
                    break

    async def case(self, op: Operation, elements: int, without: Collection[str] = ()) -> Case:
        """Measure one operation at one size; all contenders with private memory work on the same arrays."""
        ranks = self.world.size
        bounds = {name: bound for name, bound in self.bound(op, elements).items() if name not in without}
        wanted = self.expected(op, elements)
        await self.check(op, bounds, wanted)
        chosen, seconds = await measure(bounds, self.raw, self.task.seconds)
        await self.check(op, bounds, wanted)
        nbytes = elements * ITEM_BYTES
        lines = {
            name: line_of(op.name, nbytes, ranks, kept, chosen.repetitions[name]) for name, kept in seconds.items()
        }
        return Case(op.name, nbytes, ranks, self.nodes, lines, self.machine)

    def bound(self, op: Operation, elements: int) -> dict[str, Bound]:
        """Every contender with its arrays, by name."""
        shared = allocate(op, elements, self.world.size, private)
        return {each.name: self._bind(each, op, elements, shared) for each in self.contenders}

    def expected(self, op: Operation, elements: int) -> Array | None:
        """The result on this rank."""
        return expected(op, self.world.rank, self.world.size, elements)

    async def check(self, op: Operation, bounds: Mapping[str, Bound], wanted: Array | None) -> None:
        """Check every contender; raises WrongResult on all ranks."""
        for name, bound in bounds.items():
            await check(f"{op.name} by {name}", bound, self.raw, self.world.rank, wanted)

    def _bind(self, contender: Contender, op: Operation, elements: int, arrays: Arrays) -> Bound:
        if contender.is_resident and op.has_size:
            arrays = allocate(op, elements, self.world.size, self._resident)
        return contender.bind(op, arrays)

    def _resident(self, count: int) -> Array:
        return cast(Array, self.world.empty(count, "float32"))

    def close(self) -> None:
        """End the rivals; collective."""
        for contender in self.contenders:
            if isinstance(contender, Gloo):
                contender.close()
        self.raw.free()


def describe(raw: Raw, core: int | None, local_ranks: int, cores: int) -> dict[str, Any]:
    """What tells this run from another; of rank 0, but the cores that all ranks are pinned to."""
    mpi, version = raw.name_and_version()
    internal = tuple(f"{PREFIX}{name}" for name in NO_SETTINGS)  # a secret is among them
    steering = {
        name: value
        for name, value in os.environ.items()
        if name.startswith((PREFIX, "MPIR_", "OMPI_MCA_")) and not name.startswith(internal)
    }
    mine = {
        "mpi": mpi,
        "mpi_version": version,
        "versions": {**machine.versions(), "mpdist": __version__},
        "processor": machine.processor(),
        "usable_cores": cores,
        "local_ranks": local_ranks,
        "variables": steering,
        "date": machine.today(),
    }
    return {**raw.from_first(mine), "pinned_to": raw.of_all(core)}


async def run_job(world: Communicator, task: Task, is_wanted: bool) -> list[Case]:
    """Measure everything; the main function of every rank. Rank 0 tells how far it is on stderr.

    Args:
        is_wanted: on rank 0, whether anything is to be measured.
    """
    from mpdist.transport.raw import Raw

    wanted = np.array([is_wanted])
    await world.broadcast(wanted, 0)
    if not wanted[0]:
        return []
    bench = Bench(world, Raw(), task)
    cases = []
    async for case in bench.cases():
        cases.append(case)
        if world.rank == 0:
            print(progress_text(case), file=sys.stderr, flush=True)
    bench.close()
    return cases


def progress_text(case: Case) -> str:
    """`all_reduce 64 KiB: mpdist 20.1 us, gloo 400 us`."""
    times = ", ".join(f"{name} {time_text(line.median)}" for name, line in case.lines.items())
    if not case.nbytes:
        return f"{case.op}: {times}"
    slow = f"; too slow for larger sizes: {', '.join(case.slow())}" if case.slow() else ""
    return f"{case.op} {size_text(case.nbytes)}: {times}{slow}"
