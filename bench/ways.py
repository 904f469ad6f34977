"""Ways: collectives of two ranks' private arrays by either way, by the one that is chosen, and by mpi4py.

    python bench/ways.py [--places | --crowd] [--torch] [--rounds 15] [--ops OP,...] [--json FILE]

starts itself on 2 ranks with the environment's MPI. The same array again and again,
so it is in the caches where they hold it. Sizes are those of x. Medians in
microseconds, and what the chosen way takes of mpi4py's blocking call. mpdist/algorithms/shared/either.py has the
two ways; bench/caches.py shows why now the one and now the other is faster.

With --places: smaller arrays through slots, always where a slot begins, by turns in
many places, and where it is chosen (mpdist/algorithms/shared/spread.py).

With --torch: arrays in memory of torch, up to 32 MiB on huge pages (mpdist/memory/heap.py), as all large ones of NumPy;
with MPDIST_KEEP_MEMORY=0 on pages of 4 KiB.

With --crowd: all_reduce of 4 ranks, through shared memory, by MPI's own call as mpdist makes it, and as it is
chosen; to be run where there are fewer cores, several times: which is faster depends on the minute.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from measure import is_rank, launch, mpi_name, positive, require_writable  # beside this script

import mpdist
from mpdist.algorithms.choose import Algorithm, Thresholds
from mpdist.algorithms.shared.spread import Spread
from mpdist.memory.heap import keep_freed

KIB = 1024
SIZES = (512 * KIB, 1024 * KIB, 2048 * KIB, 4096 * KIB, 8192 * KIB, 16384 * KIB, 65536 * KIB)
SMALL_SIZES = (16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, 1024 * KIB)
CROWD, CROWD_SIZES = 4, tuple(KIB << power for power in range(4, 15))
# So many bytes by one way before the next, and at least so many calls: each is to find its own memory in the caches.
ROW_BYTES = 64 * 1024 * KIB
LEAST_CALLS, MOST_CALLS = 3, 400


class Arrays(NamedTuple):
    """What one contender works on; a row is half of x."""

    x: np.ndarray
    y: np.ndarray
    row: np.ndarray


Ours = Callable[[mpdist.Communicator, Arrays], mpdist.Work]
Theirs = Callable[[Any, Arrays], None]

OPERATIONS: dict[str, tuple[Ours, Theirs]] = {
    "all_reduce": (lambda comm, a: comm.all_reduce(a.x), lambda mpi, a: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, a.x)),
    "reduce_scatter": (
        lambda comm, a: comm.reduce_scatter(a.x, out=a.row),
        lambda mpi, a: mpi.COMM_WORLD.Reduce_scatter_block(a.x, a.row),
    ),
    "broadcast": (lambda comm, a: comm.broadcast(a.x, 0), lambda mpi, a: mpi.COMM_WORLD.Bcast(a.x, 0)),
    "all_gather": (
        lambda comm, a: comm.all_gather(a.row, out=a.x),
        lambda mpi, a: mpi.COMM_WORLD.Allgather(a.row, a.x),
    ),
    "all_to_all": (
        lambda comm, a: comm.all_to_all(a.x, out=a.y),
        lambda mpi, a: mpi.COMM_WORLD.Alltoall(a.x, a.y),
    ),
}


async def forced(world: mpdist.Communicator, through_slots: bool) -> mpdist.Communicator:
    """A duplicate on which all take shared memory, and go one way."""
    comm = await taking(world, Algorithm.SHARED)
    await comm.all_reduce(np.zeros(SIZES[0] // 4, np.float32))
    paces: Any = comm._channel.team.paces  # type: ignore[union-attr]  # made by the first call
    for op in OPERATIONS:
        paces[op].is_through_slots = lambda nbytes: through_slots
    return comm


async def taking(world: mpdist.Communicator, algorithm: Algorithm) -> mpdist.Communicator:
    """A duplicate whose collectives take this algorithm."""
    engine = world._channel.engine
    before, engine.thresholds = engine.thresholds, Thresholds(forced=algorithm)
    comm = await world.dup()
    engine.thresholds = before
    return comm


class OnePlace(Spread):
    """Each round where its slot begins."""

    def begin(self, side: int, nbytes: int) -> int:
        return self.slots[side]


class ManyPlaces(Spread):
    """All rounds in large slots."""

    def begin(self, side: int, nbytes: int) -> int:
        if self._ask is not None:
            self._large, self._ask = self._ask(), None
        return self._next(side, nbytes)


async def placed(world: mpdist.Communicator, kind: type[Spread]) -> mpdist.Communicator:
    """A duplicate on which all goes through slots, in places of this kind."""
    comm = await forced(world, True)
    team: Any = comm._channel.team
    spread = kind.__new__(kind)
    for name in Spread.__slots__:
        setattr(spread, name, getattr(team.spread, name))
    team.spread = spread
    team._slots.clear()
    return comm


def arrays_of(count: int, in_torch: bool) -> Arrays:
    if in_torch:
        import torch

        return Arrays(*(torch.zeros(each).numpy() for each in (count, count, count // 2)))
    return Arrays(*(np.zeros(each, np.float32) for each in (count, count, count // 2)))


async def main(world: mpdist.Communicator, options: argparse.Namespace) -> None:
    if options.torch:
        keep_freed(world._channel.engine.keep_bytes)
    sizes = SMALL_SIZES if options.places else CROWD_SIZES if options.crowd else SIZES
    if options.crowd:
        comms = {
            "shared memory": await taking(world, Algorithm.SHARED),
            "MPI's, awaited": await taking(world, Algorithm.NATIVE),
            "chosen": world,
        }
    elif options.places:
        comms = {
            "one place": await placed(world, OnePlace),
            "many": await placed(world, ManyPlaces),
            "chosen": await forced(world, True),
        }
    else:
        comms = {"straight": await forced(world, False), "slots": await forced(world, True), "chosen": world}
    lines = []
    for op in options.ops.split(","):
        for nbytes in sizes:
            medians = await measured(comms, op, nbytes, options)
            line = {"case": f"{op} {nbytes // KIB} KiB", "mpi": mpi_name(), **medians}
            lines.append(line | {"ratio": round(medians["chosen"] / medians["mpi4py"], 2)})
            if world.rank == 0:
                print(lines[-1], flush=True)
    if world.rank == 0 and options.json:
        with open(options.json, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    for comm in comms.values():
        if comm is not world:
            await comm.close()


async def measured(
    comms: dict[str, mpdist.Communicator], op: str, nbytes: int, options: argparse.Namespace
) -> dict[str, float]:
    """Median microseconds of each contender, in turn."""
    from mpi4py import MPI

    ours, theirs = OPERATIONS[op]
    count = nbytes // 4
    contenders = {name: arrays_of(count, options.torch) for name in [*comms, "mpi4py"]}
    calls = min(max(LEAST_CALLS, ROW_BYTES // nbytes), MOST_CALLS)
    micro: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, arrays in contenders.items():
            MPI.COMM_WORLD.Barrier()
            start = time.perf_counter()
            for _ in range(calls):
                if name == "mpi4py":
                    theirs(MPI, arrays)
                else:
                    await ours(comms[name], arrays)
            micro[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: round(float(np.median(each)), 1) for name, each in micro.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--places", action="store_true")
    parser.add_argument("--crowd", action="store_true")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--ops", default="")
    parser.add_argument("--json", default="")
    parsed = parser.parse_args()
    usual = "all_reduce" if parsed.crowd else "all_reduce,reduce_scatter" if parsed.places else ",".join(OPERATIONS)
    parsed.ops = parsed.ops or usual
    if unknown := [op for op in parsed.ops.split(",") if op not in OPERATIONS]:
        parser.error(f"--ops {parsed.ops!r}: {unknown[0]!r} is none of: {', '.join(OPERATIONS)}")
    if is_rank():
        mpdist.run(main, parsed)
    else:
        require_writable(parsed.json)
        launch(__file__, CROWD if parsed.crowd else 2)
