"""A rank of a job of test_shown_jobs.py; its first argument says what it does."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

import mpdist

sys.path.insert(0, str(Path(__file__).parents[2]))
from memory.simulated import Simulated, simulated

COUNT = 300_000


async def meet(world: mpdist.Communicator, gpu: Simulated) -> None:
    """After this rank 0 shows its messages to rank 1."""
    x = gpu.array(np.zeros(COUNT))
    if world.rank == 0:
        await world.send(x, 1)
    else:
        await world.recv(x, 0)
    await world.barrier()
    gpu.copies.clear()


async def leaves_before_a_receive(world: mpdist.Communicator, gpu: Simulated) -> None:
    """Rank 1 ends while rank 0 shows it what nobody takes."""
    if world.rank == 0:
        await world.send(gpu.array(np.ones(COUNT)), 1)


async def sends_and_ends(world: mpdist.Communicator, gpu: Simulated) -> None:
    """Rank 0's program ends before its message has been taken."""
    if world.rank == 0:
        world.send(gpu.array(np.arange(COUNT)), 1, tag=5).forget()
        return
    x: Any = gpu.array(np.zeros(COUNT, int))
    await world.recv(x, 0, tag=5)
    np.testing.assert_array_equal(x.get(), np.arange(COUNT))
    assert {kind for kind, _ in gpu.copies} == {"between"}, gpu.copies


async def dies_while_it_sends(world: mpdist.Communicator, gpu: Simulated) -> None:
    """Rank 0 is killed when rank 1 knows of its message and waits for the data."""
    x = gpu.array(np.ones(COUNT))
    if world.rank == 0:
        world.send(x, 1).forget()
        await world.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    await world.barrier()
    await world.recv(x, 0)


async def main(world: mpdist.Communicator) -> None:
    how: Callable[[mpdist.Communicator, Simulated], Awaitable[None]] = globals()[sys.argv[1]]
    with simulated() as gpu:
        await meet(world, gpu)
        await how(world, gpu)


if __name__ == "__main__":
    mpdist.run(main)
