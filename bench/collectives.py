"""Collectives: all of them against mpi4py, torch gloo and the memory itself. 2 ranks on 2 cores; some on 4.

    python bench/collectives.py [--seconds 1.5] [--json FILE] [--only WORD]

starts itself on 2 and on 4 ranks with the environment's MPI and prints each ratio,
beside its target where it has one. All contenders of an operation and size take
turns in the same rounds (mpdist/bench/rounds.py), and results are checked. Against
mpi4py counts its faster call, blocking or not. Sizes are those of nccl-tests: of all_gather
and the like the whole of all blocks. With MPDIST_FAKECLUSTER naming a program
that makes several hosts on one machine, also between hosts, joined by 1 Gbit/s.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from copying import COPY, copying  # beside this script
from goals import FOUR_RANK_ROWS, MIB, RAW, Goal, Row, several_node_rows, two_rank_rows
from longest import Callbacks, link_bytes
from measure import (
    Result,
    is_rank,
    launch,
    positive_seconds,
    publish,
    rank_environ,
    require,
    require_output,
    summary,
)

import mpdist
from mpdist.bench.case import GLOO, OURS, RAW_LATER, RAW_NOW, RESIDENT
from mpdist.bench.contenders import Bound, private
from mpdist.bench.gloo import is_installed
from mpdist.bench.job import Bench, Task
from mpdist.bench.operations import ITEM_BYTES, OPERATIONS
from mpdist.bench.rounds import measure
from mpdist.bench.sizes import size_text

if TYPE_CHECKING:
    from mpdist.transport.raw import Raw

HOSTS = ((2, 2), (2, 1), (3, 1))
"""How many of them, and how many ranks on each."""
HALF_COUNT = 16 * MIB
CALLBACK_BYTES = 256 * MIB
CALLBACK_SECONDS = 0.001

FAKE = "MPDIST_FAKECLUSTER"
HALF = "all_reduce of 16 M bfloat16 / of 16 M float32, both on comm.empty memory"
CALLBACKS: dict[str, Callable[[Callbacks], float]] = {
    "one callback in a 256 MiB all_reduce: thread CPU, longest / 1 ms": lambda seen: max(seen.cpu),
    "one callback in a 256 MiB all_reduce: wall time, p99.9 / 1 ms": lambda seen: float(np.percentile(seen.wall, 99.9)),
}


def title(row: Row, goal: Goal, nodes: int) -> str:
    """What a goal is called."""
    what = f"{row.op} {size_text(row.nbytes)}".removesuffix(" 0 B")
    ours = "on comm.empty memory" if goal.ours == RESIDENT else "private"
    ours = what if row.nbytes <= ITEM_BYTES * 2 else f"{what} {ours}"
    return (f"{goal.against} / {ours}" if goal.is_inverse else f"{ours} / {goal.against}") + on_hosts(nodes)


def on_hosts(nodes: int) -> str:
    return f", {nodes} hosts" if nodes > 1 else ""


def on_link(nodes: int) -> str:
    """What is counted on the link between so many hosts."""
    return f"bytes that a node sends for a 16 MiB all_reduce / lower bound{on_hosts(nodes)}"


def cases() -> Iterator[str]:
    """What is measured here, with torch or without, on one host or on several; the MPI does not matter."""
    for row in (*two_rank_rows("MPICH"), *FOUR_RANK_ROWS):
        yield from (title(row, goal, 1) for goal in row.goals if goal.against != GLOO or is_installed())
    if is_installed():
        yield HALF
    yield from CALLBACKS
    for nodes, local in HOSTS if FAKE in os.environ else ():
        yield from (title(row, goal, nodes) for row in several_node_rows(local) for goal in row.goals)
        yield on_link(nodes)


class Collectives(Bench):
    """One rank of this benchmark."""

    def __init__(self, world: mpdist.Communicator, raw: Raw, task: Task, only: str) -> None:
        super().__init__(world, raw, task)
        self.mpi = self.machine["mpi"]
        self.only = only

    async def results(self) -> AsyncIterator[Result]:
        if self.nodes > 1:
            rows = several_node_rows(self.world.local_size)
        else:
            rows = {2: two_rank_rows(self.mpi), 4: FOUR_RANK_ROWS}[self.world.size]
        for row in rows:
            async for result in self.row(row):
                yield result
        if self.nodes > 1:
            async for result in self.link():
                yield result
        elif self.world.size == 2:
            async for result in self.half_precision():
                yield result
            async for result in self.callbacks():
                yield result

    def title(self, row: Row, goal: Goal) -> str:
        return title(row, goal, self.nodes)

    async def row(self, row: Row) -> AsyncIterator[Result]:
        """All goals of a row, from the same rounds."""
        goals = [goal for goal in row.goals if self.only in self.title(row, goal) and self.has(goal.against)]
        if not goals:
            return
        seconds = await self.seconds(row, {name for goal in goals for name in (goal.ours, goal.against)})
        for goal in goals:
            ours, theirs = seconds[goal.ours], seconds[self.fastest(seconds) if goal.against == RAW else goal.against]
            yield summary(
                self.title(row, goal),
                *((theirs, ours) if goal.is_inverse else (ours, theirs)),
                ranks=self.world.size,
                mpi=self.mpi,
                target=goal.target,
                stretch=goal.stretch,
                larger_is_better=goal.is_inverse,
            )

    def has(self, name: str) -> bool:
        return name != GLOO or any(each.name == GLOO for each in self.contenders)

    @staticmethod
    def fastest(seconds: dict[str, list[float]]) -> str:
        return min((RAW_NOW, RAW_LATER), key=lambda name: float(np.median(seconds[name])))

    async def seconds(self, row: Row, wanted: set[str]) -> dict[str, list[float]]:
        """Microseconds of every round of the contenders that are wanted, checked before and after."""
        op = OPERATIONS[row.op]
        elements = op.elements(row.nbytes, self.world.size)
        names = wanted | ({RAW_NOW, RAW_LATER} if RAW in wanted else set())
        bounds = {name: bound for name, bound in self.bound(op, elements).items() if name in names}
        result = self.expected(op, elements)
        await self.check(op, bounds, result)
        copy = {COPY: copying(row.nbytes)} if COPY in wanted else {}
        _, seconds = await measure({**bounds, **copy}, self.raw, self.task.seconds)
        await self.check(op, bounds, result)
        return {name: [each * 1e6 for each in kept] for name, kept in seconds.items()}

    async def half_precision(self) -> AsyncIterator[Result]:
        """bfloat16 against float32, as many elements of both, in memory that the ranks share."""
        if self.only not in HALF or not is_installed():
            return
        bounds = {"bfloat16": self.half(), "float32": self.single()}
        _, seconds = await measure(bounds, self.raw, self.task.seconds)
        await self.check_half()
        micro = {name: [each * 1e6 for each in kept] for name, kept in seconds.items()}
        yield summary(
            HALF, micro["bfloat16"], micro["float32"], ranks=self.world.size, mpi=self.mpi, target=0.8, stretch=0.6
        )

    def half(self) -> Bound:
        """torch's bfloat16 over the memory, for NumPy has none."""
        import torch

        words: Any = self.world.empty(HALF_COUNT, np.uint16)
        words[:] = 0
        return self.in_place(torch.from_numpy(words).view(torch.bfloat16))

    def single(self) -> Bound:
        x = self.world.empty(HALF_COUNT, np.float32)
        x[:] = 0
        return self.in_place(x)

    def in_place(self, x: object) -> Bound:
        async def run(count: int) -> None:
            for _ in range(count):
                await self.world.all_reduce(x)

        return Bound(run, None, None)

    async def check_half(self) -> None:
        import torch

        words: Any = self.world.empty(HALF_COUNT, np.uint16)
        x = torch.from_numpy(words).view(torch.bfloat16)
        x.fill_(self.world.rank + 1)
        await self.world.all_reduce(x)
        assert bool((x == self.world.size * (self.world.size + 1) / 2).all())

    async def callbacks(self) -> AsyncIterator[Result]:
        """How long one callback holds the event loop during a large all_reduce: the worst of all ranks."""
        x = private(CALLBACK_BYTES // ITEM_BYTES)
        x[:] = 0
        kept: dict[str, list[float]] = {case: [] for case in CALLBACKS if self.only in case}
        for number in range(7 if kept else 0):
            self.raw.fence()
            with Callbacks() as seen:
                await self.world.all_reduce(x)
            worst = self.raw.slowest([float(CALLBACKS[case](seen)) for case in kept])
            for case, value in zip(kept, worst, strict=True):
                if number:  # the first warms up
                    kept[case].append(value * 1e6)
        for case, values in kept.items():
            limit = [CALLBACK_SECONDS * 1e6] * len(values)
            yield summary(case, values, limit, ranks=self.world.size, mpi=self.mpi, target=1.0)

    async def link(self) -> AsyncIterator[Result]:
        """Bytes that a node sends for one all_reduce of 16 MiB / the least that can be: 2 (q - 1) / q of them."""
        case = on_link(self.nodes)
        if self.only not in case:
            return
        nbytes = 16 * MIB
        x = private(nbytes // ITEM_BYTES)
        x[:] = 0
        least = 2 * (self.nodes - 1) / self.nodes * nbytes
        sent = []
        for _ in range(6):
            self.raw.fence()
            before = link_bytes()
            self.raw.fence()
            await self.world.all_reduce(x)
            self.raw.fence()
            sent += self.raw.slowest([float(link_bytes() - before)])
        yield summary(
            case, sent[1:], [least] * 5, ranks=self.world.size, mpi=self.mpi, unit="bytes", target=1.05
        )  # fmt: skip


async def main(world: mpdist.Communicator, options: argparse.Namespace) -> None:
    from mpdist.transport.raw import Raw

    rivals = [GLOO] if is_installed() and world.size == 2 else []
    task = Task((), (), [OURS, RESIDENT, RAW_NOW, RAW_LATER, *rivals], options.seconds)
    bench = Collectives(world, Raw(), task, options.only)
    results = []
    async for result in bench.results():
        results.append(result)
        if world.rank == 0:
            print(f"{result.case}: {result.ratio:.2f}", file=sys.stderr, flush=True)
    bench.close()
    if world.rank == 0 and results:
        publish(results, options.json)


def launch_all() -> None:
    """Run this script on 2 and on 4 ranks, and between hosts where there is something to make them."""
    for ranks in (2, 4):
        launch(__file__, ranks)
    if FAKE in os.environ:
        script = [sys.executable, __file__, *sys.argv[1:]]
        for hosts, ranks in HOSTS:
            with cluster(os.environ[FAKE], str(hosts), "--rate", "1gbit") as run:
                run(["--ranks-per-host", str(ranks), "--timeout", "200", "--", *script], rank_environ())


@contextmanager
def cluster(tool: str, *arguments: str) -> Iterator[Callable[[list[str], dict[str, str]], None]]:
    """Several hosts, while the block runs; gives a function that runs a job on them."""
    from mpdist.cli.launcher import find_launcher

    launcher = find_launcher()
    name = f"b{os.getpid() % 10**7}"  # at most 8 letters and digits
    subprocess.run([tool, "--name", name, "up", *arguments], check=True)

    def run(words: list[str], environ: dict[str, str]) -> None:
        path = os.pathsep.join([str(Path(launcher.path).parent), environ["PATH"]])
        own = [f"--env={key}={value}" for key, value in environ.items() if os.environ.get(key) != value]
        command = [tool, "--name", name, "run", "--mpi", launcher.kind.value, *own, *words]
        subprocess.run(command, check=True, env={**environ, "PATH": path})

    try:
        yield run
    finally:
        subprocess.run([tool, "--name", name, "down"], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=positive_seconds, default=1.5, help="for the rounds of one operation and size"
    )
    parser.add_argument("--json", help="append one JSON line per case to this file")
    parser.add_argument("--only", default="", help="cases that contain this word")
    parsed = parser.parse_args()
    if is_rank():
        mpdist.run(main, parsed)
    else:
        require(parsed.only, "--only", cases())
        require_output(parsed.json)
        launch_all()
