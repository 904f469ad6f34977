"""A rank of a job of test_shared_memory_jobs.py; its first argument says what it does."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable

import numpy as np

import mpdist

World = mpdist.Communicator
MIB = 1 << 20


def arena(world: World) -> mpdist.memory.arena.Arena:
    shared = world._channel.engine.shared
    assert shared is not None, "the ranks do not share memory"
    return shared.arena


async def check(comm: World, count: int, make: Callable[[int], np.ndarray] | None = None) -> None:
    """Every kind of collective once, against what it must give."""
    make = make or (lambda length: np.empty(length, np.float32))
    rank, size, ranks = comm.rank, comm.size, np.arange(comm.size, dtype=np.float32)
    places = np.arange(count, dtype=np.float32) % 1021
    total = (ranks.sum() + size * places).astype(np.float32)

    def mine() -> np.ndarray:
        x = make(count)
        x[:] = rank + places
        return x

    def rows() -> np.ndarray:
        x = make(count * size)
        x[:] = np.concatenate([rank + 10 * each + places for each in range(size)])
        return x

    assert np.array_equal(await comm.all_reduce(mine()), total), "all_reduce"
    assert np.array_equal(await comm.all_reduce(mine(), deterministic=True), total), "all_reduce, deterministic"
    result = await comm.reduce(mine(), size - 1)
    assert result is None or np.array_equal(result, total), "reduce"
    assert np.array_equal(await comm.all_gather(mine()), ranks[:, None] + places), "all_gather"
    gathered = await comm.gather(mine(), 0)
    assert gathered is None or np.array_equal(gathered, ranks[:, None] + places), "gather"
    assert np.array_equal(await comm.broadcast(mine(), size - 1), size - 1 + places), "broadcast"
    assert np.array_equal(await comm.scatter(rows() if rank == 0 else None, 0), 10 * rank + places), "scatter"
    blocks = (await comm.all_to_all(rows())).reshape(size, count)
    assert np.array_equal(blocks, ranks[:, None] + 10 * rank + places), "all_to_all"
    assert np.array_equal(await comm.reduce_scatter(rows()), total + 10 * rank * size), "reduce_scatter"
    half = mine().astype(np.float16)
    half[:] = rank + 1
    assert (await comm.all_reduce(half) == size * (size + 1) // 2).all(), "all_reduce float16"
    await comm.barrier()


async def short(world: World) -> None:
    """More is asked for than there is, by all ranks."""
    arrays = []
    for number in range(12):
        x = world.empty(10 * MIB // 4, np.float32)
        x[:] = number + world.rank
        arrays.append(x)
    await world.barrier()
    await check(world, MIB, lambda count: world.empty(count, np.float32))
    for number in range(0, 12, 3):
        await world.all_reduce(arrays[number])
        assert (arrays[number] == sum(number + rank for rank in range(world.size))).all()
    async with world.dup() as other:
        await check(other, MIB // 2)
    del arrays, x
    await world.barrier()
    async with world.dup() as other:
        await check(other, MIB // 2)
        assert other._channel.team is not None, "there is memory again"


async def short_on_one(world: World) -> None:
    """What is left is enough for the slots of one rank only."""
    await world.barrier()  # the world has its slots
    if world.rank == 0:
        folder = os.environ["MPDIST_SHARED_MEMORY_DIR"]
        state = os.statvfs(folder)
        hog = world.empty(state.f_bavail * state.f_frsize - 2 * MIB, np.uint8)
        hog[:] = 1
    await world.barrier()
    async with world.dup() as other:
        await check(other, 300_000)
        assert other._channel.team is None
    x = world.empty(MIB // 4, np.float32)
    x[:] = 1
    await world.all_reduce(x)
    assert (x == world.size).all()


async def leak(world: World) -> None:
    """Communicators come and go; nothing grows."""
    count = int(sys.argv[2])
    x = np.ones(20_000, np.float32)

    async def once() -> None:
        async with world.dup() as made:
            await made.all_reduce(x)
            await made.barrier()

    await world.barrier()  # the world has its slots
    for _ in range(20):
        await once()
    before = state(world)
    for _ in range(count):
        await once()
    opened = [await world.dup() for _ in range(64)]
    for made in opened:
        y = made.empty(5000, np.float32)
        y[:] = 1
        assert (await made.all_reduce(y) == world.size).all()
    for made in opened:
        await made.close()
    del opened, made, y
    await world.barrier()
    after = state(world)
    assert after[0] == before[0], f"bytes of shared memory: {before[0]} before, {after[0]} after"
    assert after[1] <= before[1], f"open files: {before[1]} before, {after[1]} after"
    assert after[2] <= before[2] + 30, f"mappings: {before[2]} before, {after[2]} after"


def state(world: World) -> tuple[int, int, int]:
    with open("/proc/self/maps") as maps:
        return arena(world).used_bytes, len(os.listdir("/proc/self/fd")), len(maps.readlines())


async def stays(world: World) -> None:
    """All ranks hold shared memory and collectives run, until somebody ends it."""
    x = world.empty(MIB, np.float32)
    await check(world, 200_000)
    print(f"rank {world.rank} is ready", flush=True)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        x[:] = 1
        await world.all_reduce(x)
        await asyncio.sleep(0)


async def reference(world: World) -> None:
    """Every collective at several sizes; says on which nodes."""
    nodes = sorted(set(world._channel.engine.nodes))
    for count in (1, 1000, 20_000, 300_001):
        await check(world, count)
        await check(world, count, lambda length: world.empty(length, np.float32))
    async with world.split(world.rank % 2) as part:
        await check(part, 50_000)
    print(f"rank {world.rank} of {world.size} on nodes {nodes}: {type(world._channel.team).__name__}", flush=True)


if __name__ == "__main__":
    programs: dict[str, Callable[[World], Awaitable[None]]] = {
        each.__name__: each for each in (short, short_on_one, leak, stays, reference)
    }
    mpdist.run(programs[sys.argv[1]])
