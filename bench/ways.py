"""Ways: reductions of two ranks' private arrays by either way, by the one that is chosen, and by mpi4py.

    python bench/ways.py [--rounds 15] [--json FILE]

starts itself on 2 ranks with the environment's MPI. The same array again and again,
so it is in the caches where they hold it. Sizes are those of the input. Medians in
microseconds, and what the chosen way takes of mpi4py's blocking call. mpdist/algorithms/shared/either.py has the
two ways; bench/caches.py shows why now the one and now the other is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from measure import mpi_name  # beside this script

import mpdist

KIB = 1024
SIZES = (512 * KIB, 1024 * KIB, 2048 * KIB, 4096 * KIB, 8192 * KIB, 16384 * KIB, 65536 * KIB)
# So many bytes by one way before the next, and at least so many calls: each is to find its own memory in the caches.
ROW_BYTES = 64 * 1024 * KIB
LEAST_CALLS = 3


class Arrays(NamedTuple):
    """What one contender works on."""

    x: np.ndarray
    row: np.ndarray


def all_reduce(comm: mpdist.Communicator, arrays: Arrays) -> mpdist.Work:
    return comm.all_reduce(arrays.x)


def reduce_scatter(comm: mpdist.Communicator, arrays: Arrays) -> mpdist.Work:
    return comm.reduce_scatter(arrays.x, out=arrays.row)


OPERATIONS: dict[str, tuple[Callable[..., mpdist.Work], Callable[[Any, Arrays], None]]] = {
    "all_reduce": (all_reduce, lambda mpi, arrays: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, arrays.x)),
    "reduce_scatter": (reduce_scatter, lambda mpi, arrays: mpi.COMM_WORLD.Reduce_scatter_block(arrays.x, arrays.row)),
}


async def forced(world: mpdist.Communicator, through_slots: bool) -> mpdist.Communicator:
    """A duplicate on which all go one way."""
    comm = await world.dup()
    x = np.zeros(SIZES[0] // 4, np.float32)
    for op, (ours, _) in OPERATIONS.items():
        await ours(comm, Arrays(x, x[: x.size // 2].copy()))
        pace: Any = comm._channel.team.paces[op]  # type: ignore[union-attr]  # made by the first call
        pace.is_through_slots = lambda nbytes: through_slots
    return comm


async def main(world: mpdist.Communicator, options: argparse.Namespace) -> None:
    comms = {"straight": await forced(world, False), "slots": await forced(world, True), "chosen": world}
    lines = []
    for op in OPERATIONS:
        for nbytes in SIZES:
            medians = await measured(comms, op, nbytes, options.rounds)
            line = {"case": f"{op} {nbytes // KIB} KiB", "mpi": mpi_name(), **medians}
            lines.append(line | {"ratio": round(medians["chosen"] / medians["mpi4py"], 2)})
            if world.rank == 0:
                print(lines[-1], flush=True)
    if world.rank == 0 and options.json:
        with open(options.json, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    for name in ("straight", "slots"):
        await comms[name].close()


async def measured(comms: dict[str, mpdist.Communicator], op: str, nbytes: int, rounds: int) -> dict[str, float]:
    """Median microseconds of each contender, in turn."""
    from mpi4py import MPI

    ours, theirs = OPERATIONS[op]
    count = nbytes // 4
    contenders = {
        name: Arrays(np.zeros(count, np.float32), np.zeros(count // 2, np.float32)) for name in [*comms, "mpi4py"]
    }
    calls = max(LEAST_CALLS, ROW_BYTES // nbytes)
    micro: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
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
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", default="")
    parsed = parser.parse_args()
    if "MPDIST_BENCH_RANK" in os.environ:
        mpdist.run(main, parsed)
    else:
        environ = {**os.environ, "MPDIST_BENCH_RANK": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "mpdist", "run", "-n", "2", __file__, *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=environ, check=False).returncode)
