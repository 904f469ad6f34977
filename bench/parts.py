"""Parts: where the time of a small collective goes, each part by itself.

    python bench/parts.py [--rounds 15]

starts itself on 2 ranks with the environment's MPI. Both ranks do each part in a
loop, all parts alternate, and the median of the rounds counts. `the rest` is what the
whole call takes more than its parts: their caches and branches are others' in between.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from measure import is_rank, launch, mpi_name, positive  # beside this script

import mpdist
from mpdist.algorithms.shared import plans
from mpdist.algorithms.shared.team import Team
from mpdist.comm.operation import host_buffer

if TYPE_CHECKING:
    from mpdist.transport.requests import Request

REPEATS = 500

Part = Callable[[], Awaitable[None]]


class Complete:
    """A request that is."""

    def Test(self) -> bool:
        return True


class Over:
    """What can be awaited and is over."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


COMPLETE, OVER = Complete(), Over()


def calling(call: Callable[[], object]) -> Part:
    """A call by itself, beside an await, as the whole has one."""

    async def part() -> None:
        for _ in range(REPEATS):
            call()
            await OVER

    return part


def awaiting(post: Callable[[], Awaitable[object]]) -> Part:
    async def part() -> None:
        for _ in range(REPEATS):
            await post()

    return part


def testing(post: Callable[[], Request]) -> Part:
    """A request, tested until it is complete: what goes on between the ranks."""

    async def part() -> None:
        for _ in range(REPEATS):
            test = post().Test
            while not test():
                pass
            await OVER

    return part


class Parts:
    """The calls, and the parts of each; the first is the whole."""

    def __init__(self, world: mpdist.Communicator) -> None:
        self.world = world
        self.channel = world._channel
        assert isinstance(self.channel.team, Team), "these ranks share no memory"
        self.team = self.channel.team

    def calls(self) -> dict[str, dict[str, Part]]:
        world = self.world
        few, many = np.zeros(2, np.float32), np.zeros(16 * 1024, np.float32)
        mapped = world.empty(16 * 1024, np.float32)
        mapped[:] = 0
        return {
            "barrier": {
                "the whole": awaiting(world.barrier),
                "words, told and looked at": testing(self.team.enter_barrier),
                "order, diagnosis, await": self.posting("barrier", (str,)),
            },
            "all_reduce 8 B": self.reducing(few, self.by_mpi),
            "all_reduce 64 KiB, private": self.reducing(many, self.by_words),
            "all_reduce 64 KiB, comm.empty": self.reducing(mapped, self.by_words),
        }

    def reducing(self, x: np.ndarray, request: Callable[[Any, Any], Callable[[], Request]]) -> dict[str, Part]:
        world = self.world
        buffer = host_buffer(x, writable=True)
        how = world._reduction("sum", buffer)
        return {
            "the whole": awaiting(lambda: world.all_reduce(x)),
            "the array, checked": calling(lambda: host_buffer(x, writable=True)),
            "op and type": calling(lambda: world._reduction("sum", buffer)),
            "between the ranks": testing(request(buffer, how)),
            "order, diagnosis, await": self.posting("all_reduce", (len, "")),
        }

    def by_mpi(self, buffer: Any, how: Any) -> Callable[[], Request]:
        call = self.channel.transport.iall_reduce
        return lambda: call(None, buffer, how.mpi_op)

    def by_words(self, buffer: Any, how: Any) -> Callable[[], Request]:
        plan = plans.all_reduce(self.team, how, buffer.nbytes)
        assert plan is not None
        return lambda: plan.request(self.team, plan, buffer, buffer)

    def posting(self, op: str, words: Any) -> Part:
        """A collective of nothing."""
        channel = self.channel
        return awaiting(lambda: channel.post_direct(op, words, None, lambda: COMPLETE, caller=1, is_unchecked=None))


async def main(world: mpdist.Communicator, rounds: int) -> None:
    for _ in range(3):  # the ranks of the node share memory from the second collective on
        await world.barrier()
    for name, parts in Parts(world).calls().items():
        parts = {**parts, "the loop": calling(lambda: None)}
        seconds: dict[str, list[float]] = {part: [] for part in parts}
        for _ in range(rounds):
            for part, run in parts.items():
                await world.barrier()
                start = time.perf_counter()
                await run()
                seconds[part].append((time.perf_counter() - start) / REPEATS)
        if world.rank == 0:
            show(name, {part: statistics.median(each) * 1e6 for part, each in seconds.items()})


def show(name: str, micro: dict[str, float]) -> None:
    loop = micro.pop("the loop")
    whole = micro.pop("the whole")
    print(f"{name}, {mpi_name()}: {whole:.2f} us")
    for part, each in micro.items():
        print(f"    {each - loop:6.2f}  {part}")
    print(f"    {loop:6.2f}  the loop")
    print(f"    {whole - loop - sum(each - loop for each in micro.values()):6.2f}  the rest", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=15)
    parsed = parser.parse_args()
    if is_rank():
        mpdist.run(main, parsed.rounds)
    else:
        launch(__file__, 2)
