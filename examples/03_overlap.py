"""Overlap: compute while a large array is being reduced.

An operation starts when it is posted. While the result is awaited other
coroutines run; one that computes gives way now and then (`await asyncio.sleep(0)`),
because MPI moves data only when it is called.

What is gained depends on the machine. Between hosts the network moves the data
and the cores compute. On one host the cores must copy the data themselves, so
that `together` is often about the sum of the two, and may even exceed it.

$ mpirun -n 2 python examples/03_overlap.py
all_reduce of 16 MiB alone: ... ms
computing alone:            ... ms
together:                   ... ms, one after the other ... ms
"""

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter

import numpy as np

import mpdist

REPEATS = 5
PIECES = 64


async def compute(values: np.ndarray) -> float:
    """The sum of the sines, in pieces between which others may run."""
    total = 0.0
    for piece in np.array_split(values, PIECES):
        total += float(np.sin(piece).sum())
        await asyncio.sleep(0)
    return total


async def median_ms(world: mpdist.Communicator, action: Callable[[], Awaitable[object]]) -> float:
    """How long the slowest rank takes; the median of REPEATS."""
    times = np.empty(REPEATS)
    for repeat in range(REPEATS):
        await world.barrier()
        start = perf_counter()
        await action()
        times[repeat] = 1000 * (perf_counter() - start)
    await world.all_reduce(times, op="max")
    return float(np.median(times))


async def main(world: mpdist.Communicator) -> None:
    x = np.full(2**22, world.rank + 1, np.float32)
    values = np.linspace(0, 1, 2**21)

    await world.all_reduce(x, op="avg")  # the first time is slower: memory is touched, connections are made
    alone = await median_ms(world, lambda: world.all_reduce(x, op="avg"))
    computing = await median_ms(world, lambda: compute(values))
    together = await median_ms(world, lambda: asyncio.gather(world.all_reduce(x, op="avg"), compute(values)))

    if not np.all(x == (world.size + 1) / 2):
        raise RuntimeError(f"wrong average on rank {world.rank}: {x}")
    if world.rank == 0:
        print(f"all_reduce of {x.nbytes / 2**20:.0f} MiB alone: {alone:.1f} ms")
        print(f"computing alone:            {computing:.1f} ms")
        print(f"together:                   {together:.1f} ms, one after the other {alone + computing:.1f} ms")


mpdist.run(main)
