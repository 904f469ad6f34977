"""Core: what awaiting costs above raw mpi4py. 2 ranks on 2 cores; the last case 4 ranks.

    python bench/core.py [--rounds 21] [--json FILE] [--only WORD]

starts itself on 2 and on 4 ranks with the environment's MPI and prints each
ratio beside its target, with message matching, all checks, fairness and the
failure policy on. Every case alternates both sides, round by round, after a
warm-up of both, and checks its result.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from measure import (  # beside this script
    Result,
    Side,
    is_rank,
    launch,
    mpi_name,
    positive,
    publish,
    require,
    require_output,
    summary,
)

import mpdist

KIB, MIB = 1024, 1024**2

# Where a rank sends on what it has received, neither side finds what never changes in its cache.
SENT_ON = ", sent on as received"
PING_PONGS = {
    f"ping-pong {text} / raw Send, Recv": nbytes
    for text, nbytes in (
        ("8 B", 8),
        ("32 KiB", 32 * KIB),
        (f"32 KiB{SENT_ON}", 32 * KIB),
        ("64 KiB", 64 * KIB),
        (f"64 KiB{SENT_ON}", 64 * KIB),
        ("64 MiB", 64 * MIB),
    )
}
SMALL = "all_reduce of an 8-byte torch tensor / Allreduce of it"
CROWDS = {
    f"message beside 10 000 {what} / beside 100": what for what in ("outstanding receives", "unexpected messages")
}
WAITING, WAKING = "waiting 1 s for a message: processor time / time", "waiting: wake-up / of a FIFO"
WAKING_BARE = "waiting: wake-up / of a bare event loop's reader"
FOUR_RANKS = "1 MiB all_reduce + barrier, 4 ranks on 2 cores / raw"
CASES = (*PING_PONGS, SMALL, *CROWDS, WAITING, WAKING, WAKING_BARE, FOUR_RANKS)


class Bench:
    """Both sides of every case on this rank.

    Attributes:
        world: ours.
        comm: mpi4py's, a duplicate of the world.
    """

    def __init__(self, world: mpdist.Communicator, options: argparse.Namespace) -> None:
        from mpi4py import MPI

        self.world = world
        self.MPI = MPI
        self.comm = MPI.COMM_WORLD.Dup()
        self.peer = 1 - world.rank if world.size == 2 else 0
        self.rounds: int = options.rounds
        self.only: str = options.only
        self.results: list[Result] = []

    async def run(self) -> list[Result]:
        cases = self.four_ranks() if self.world.size == 4 else self.two_ranks()
        async for result in cases:
            self.results.append(result)
            if self.world.rank == 0:
                print(f"{result.case}: {result.ratio:.2f}", file=sys.stderr, flush=True)
        return self.results

    def wants(self, case: str) -> bool:
        return self.only in case

    async def two_ranks(self) -> AsyncIterator[Result]:
        by_mpi = {"MPICH": 1.8, "Open MPI": 4.0}[mpi_name()]
        goals = {8: (2000, by_mpi), 32 * KIB: (500, 1.6), 64 * KIB: (300, 1.6), 64 * MIB: (3, 1.05)}
        stretch = {8: {"MPICH": 1.5, "Open MPI": 3.3}[mpi_name()]}
        for case, nbytes in PING_PONGS.items():
            if self.wants(case):
                number, target = goals[nbytes]
                sides = self.ping_pong(nbytes, is_sent_on=SENT_ON in case)
                yield await self.compare(case, *sides, number, target=target, stretch=stretch.get(nbytes))
        if self.wants(SMALL):
            yield await self.compare(SMALL, *self.small_all_reduce(), 1000, target=0.6, stretch=0.4)
        for case, what in CROWDS.items():
            if self.wants(case):
                yield await self.crowded(case, what)
        if self.wants(WAITING):
            yield await self.waiting_cpu()
        if self.wants(WAKING) or self.wants(WAKING_BARE):
            for result in await self.wake_up():
                yield result

    async def four_ranks(self) -> AsyncIterator[Result]:
        target = {"MPICH": 1.2, "Open MPI": 1.6}[mpi_name()]
        if self.wants(FOUR_RANKS):
            yield await self.compare(FOUR_RANKS, *self.reduce_and_barrier(), 20, target=target, stretch=0.5)

    async def compare(
        self, case: str, ours: Side, theirs: Side, number: int, *, target: float, stretch: float | None = None
    ) -> Result:
        """Rounds of `number` repetitions, ours and theirs in turn."""
        for side in (ours, theirs):
            await side(max(number // 4, 1) if number > 10 else number)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(self.rounds):
            for side, kept in zip((ours, theirs), times, strict=True):
                self.comm.Barrier()
                kept.append(await side(number) / number * 1e6)
        return summary(
            case, *times, ranks=self.world.size, mpi=mpi_name(), target=target, stretch=stretch
        )  # fmt: skip

    # ------------------------------------------------------------------ the cases

    def ping_pong(self, nbytes: int, *, is_sent_on: bool = False) -> tuple[Side, Side]:
        """There and back; each rank's own array, or what rank 0 has sent."""
        world, comm, peer = self.world, self.comm, self.peer
        x = np.full(nbytes // 8, world.rank + 1.0)
        y = x if is_sent_on else np.empty_like(x)
        expected = 1 if is_sent_on else peer + 1

        def prepare() -> None:
            if not is_sent_on:
                y.fill(0)
            elif world.rank == 1:
                x.fill(0)

        async def ours(number: int) -> float:
            prepare()
            start = time.perf_counter()
            if world.rank == 0:
                for _ in range(number):
                    await world.send(x, peer, 1)
                    await world.recv(y, peer, 1)
            else:
                for _ in range(number):
                    await world.recv(y, peer, 1)
                    await world.send(x, peer, 1)
            taken = time.perf_counter() - start
            assert np.all(y == expected)
            return taken

        async def theirs(number: int) -> float:
            prepare()
            start = time.perf_counter()
            if world.rank == 0:
                for _ in range(number):
                    comm.Send(x, peer, 1)
                    comm.Recv(y, peer, 1)
            else:
                for _ in range(number):
                    comm.Recv(y, peer, 1)
                    comm.Send(x, peer, 1)
            taken = time.perf_counter() - start
            assert np.all(y == expected)
            return taken

        return ours, theirs

    def check_sum(self, x: np.ndarray) -> None:
        """Each rank has given its number, from 1 on. Afterwards x is zero: it stays so however often it is reduced."""
        assert np.all(x == self.world.size * (self.world.size + 1) / 2), x
        x.fill(0)

    def small_all_reduce(self) -> tuple[Side, Side]:
        try:
            import torch
        except ModuleNotFoundError:
            raise SystemExit("this case compares torch tensors: pip install 'mpdist[torch]'") from None
        world, comm = self.world, self.comm
        x = torch.zeros(1, dtype=torch.float64)

        async def ours(number: int) -> float:
            start = time.perf_counter()
            for _ in range(number):
                await world.all_reduce(x)
            taken = time.perf_counter() - start
            x.fill_(world.rank + 1)
            await world.all_reduce(x)
            self.check_sum(x.numpy())
            return taken

        async def theirs(number: int) -> float:
            start = time.perf_counter()
            for _ in range(number):
                comm.Allreduce(self.MPI.IN_PLACE, x, self.MPI.SUM)
            taken = time.perf_counter() - start
            x.fill_(world.rank + 1)
            comm.Allreduce(self.MPI.IN_PLACE, x, self.MPI.SUM)
            self.check_sum(x.numpy())
            return taken

        return ours, theirs

    async def crowded(self, case: str, what: str) -> Result:
        """A ping-pong beside a crowd that does not match it."""
        times: dict[int, list[float]] = {100: [], 10_000: []}
        ping_pong, _ = self.ping_pong(8)
        for _ in range(max(self.rounds // 4, 3)):
            for crowd, kept in times.items():
                async with self.world.dup() as apart:
                    world, self.world = self.world, apart
                    waiting = await self.gather_crowd(apart, crowd, what)
                    ping_pong, _ = self.ping_pong(8)
                    await ping_pong(50)
                    kept.append(await ping_pong(1000) / 1000 * 1e6)
                    await self.dissolve(apart, crowd, what, waiting)
                    self.world = world
        return summary(
            case, times[10_000], times[100], ranks=2, mpi=mpi_name(), target=2.0, stretch=1.2
        )  # fmt: skip

    async def gather_crowd(self, apart: mpdist.Communicator, crowd: int, what: str) -> list[mpdist.Work]:
        if what == "outstanding receives":
            waiting = [apart.recv(src=self.peer, tag=1000 + number) for number in range(crowd)]
            await apart.barrier()
            return waiting
        token = np.zeros(1)
        receive = apart.recv(src=self.peer, tag=900)
        for number in range(crowd):
            await apart.send(token, self.peer, 1000 + number)
        await apart.send(token, self.peer, 900)
        await receive  # the crowd has come before it, and is kept
        return []

    async def dissolve(self, apart: mpdist.Communicator, crowd: int, what: str, waiting: list[mpdist.Work]) -> None:
        token = np.zeros(1)
        if what == "outstanding receives":
            for number in range(crowd):
                await apart.send(token, self.peer, 1000 + number)
            for work in waiting:
                await work
        else:
            for number in range(crowd):
                await apart.recv(src=self.peer, tag=1000 + number)
        await apart.barrier()

    async def waiting_cpu(self) -> Result:
        """Rank 1 waits one second for a message: processor time / time; against 1, a core that spins."""
        world = self.world
        x = np.zeros(1)
        shares = []
        for _ in range(max(self.rounds // 4, 3)):
            await world.barrier()
            if world.rank == 0:
                time.sleep(1.0)
                await world.send(x, 1)
            else:
                cpu, start = time.process_time(), time.perf_counter()
                await world.recv(x, 0)
                shares.append((time.process_time() - cpu) / (time.perf_counter() - start))
        shares = await world.broadcast_object(shares, src=1)
        return summary(
            WAITING, shares, [1.0] * len(shares),
            ranks=2, mpi=mpi_name(), unit="s", target=0.04, stretch=0.01,
        )  # fmt: skip

    async def wake_up(self) -> list[Result]:
        """Rank 1 has slept for 50 ms: from the send to its running on, against a read from a FIFO.

        And against a task of an event loop that waits for a second FIFO, with nothing of mpdist on its way.
        """
        world = self.world
        folder = await world.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else None)
        paths = [os.path.join(folder, name) for name in ("read", "listened")]
        if world.rank == 0:
            for path in paths:
                os.mkfifo(path)
        await world.barrier()
        fifos = [os.open(path, os.O_WRONLY if world.rank == 0 else os.O_RDONLY) for path in paths]
        ours: list[float] = []
        read: list[float] = []
        listened: list[float] = []
        stamp = np.zeros(1)
        for _ in range(self.rounds + 2):
            await world.barrier()
            if world.rank == 0:
                time.sleep(0.05)
                stamp[0] = time.perf_counter()
                await world.send(stamp, 1)
            else:
                await world.recv(stamp, 0)
                ours.append((time.perf_counter() - stamp[0]) * 1e6)
            for fifo, times in zip(fifos, (read, listened), strict=True):
                await world.barrier()
                if world.rank == 0:
                    time.sleep(0.05)
                    os.write(fifo, np.float64(time.perf_counter()).tobytes())
                    continue
                got = os.read(fifo, 8) if times is read else await listening(fifo)
                times.append((time.perf_counter() - np.frombuffer(got)[0]) * 1e6)
        for fifo, path in zip(fifos, paths, strict=True):
            os.close(fifo)
            if world.rank == 0:
                os.unlink(path)
        if world.rank == 0:
            os.rmdir(folder)
        ours, read, listened = await world.broadcast_object((ours[2:], read[2:], listened[2:]), src=1)
        return [
            summary(WAKING, ours, read, ranks=2, mpi=mpi_name(), target=1.5),
            summary(WAKING_BARE, ours, listened, ranks=2, mpi=mpi_name()),
        ]

    def reduce_and_barrier(self) -> tuple[Side, Side]:
        world, comm = self.world, self.comm
        x = np.zeros(MIB // 4, np.float32)

        async def ours(number: int) -> float:
            start = time.perf_counter()
            for _ in range(number):
                await world.all_reduce(x)
                await world.barrier()
            taken = time.perf_counter() - start
            x.fill(world.rank + 1)
            await world.all_reduce(x)
            self.check_sum(x)
            return taken

        async def theirs(number: int) -> float:
            start = time.perf_counter()
            for _ in range(number):
                comm.Allreduce(self.MPI.IN_PLACE, x, self.MPI.SUM)
                comm.Barrier()
            taken = time.perf_counter() - start
            x.fill(world.rank + 1)
            comm.Allreduce(self.MPI.IN_PLACE, x, self.MPI.SUM)
            self.check_sum(x)
            return taken

        return ours, theirs


async def listening(fifo: int) -> bytes:
    """Eight bytes of a FIFO, when the event loop finds them."""
    loop = asyncio.get_running_loop()
    there: asyncio.Future[bytes] = loop.create_future()
    loop.add_reader(fifo, lambda: there.set_result(os.read(fifo, 8)))
    try:
        return await there
    finally:
        loop.remove_reader(fifo)


async def main(world: mpdist.Communicator, options: argparse.Namespace) -> None:
    results = await Bench(world, options).run()
    if world.rank == 0 and results:
        publish(results, options.json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=21)
    parser.add_argument("--json", help="append one JSON line per case to this file")
    parser.add_argument("--only", default="", help="cases that contain this word")
    arguments = parser.parse_args()
    if is_rank():
        mpdist.run(main, arguments)
    else:
        require(arguments.only, "--only", CASES)
        require_output(arguments.json)
        for ranks in (2, 4):
            launch(__file__, ranks)
