"""Floors: the steps that a collective cannot do without, bare, against mpi4py and against mpdist.

    python bench/floors.py [--seconds 0.6] [--json FILE] [--only WORD]

starts itself on 2 ranks, and on 4 for the last case, with the environment's MPI. The bare
steps are those of bare.py. `bare / mpi4py` is what no Python code over these means can be
below, beside the target of bench/collectives.py; `mpdist / bare` is what mpdist adds. Of
the ways there are the fastest counts. For what only copies, also copying in a rank's own
memory. Rounds, checks and arrays are those of bench/collectives.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from bare import Awaited, Several, Slots, Straight, StraightOfSeveral, Two  # beside this script
from copying import COPY, copying
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
from mpdist.bench.case import OURS, RAW_LATER, RAW_NOW, RESIDENT
from mpdist.bench.contenders import Bound, Contender, allocate, private
from mpdist.bench.job import Bench, Task
from mpdist.bench.operations import OPERATIONS, Operation
from mpdist.bench.rounds import measure
from mpdist.bench.sizes import size_text

if TYPE_CHECKING:
    from mpdist.transport.raw import Raw

# All that these do is copying, by every rank as much as its result takes.
COPIED_ALONE = "all_gather", "all_to_all"


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
