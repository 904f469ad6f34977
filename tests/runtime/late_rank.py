"""A rank of a job of test_control_jobs.py; its argument says how the ranks get out of step."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Generator

import numpy as np

import mpdist
from mpdist.algorithms import dropped

World = mpdist.Communicator


async def leaves_before_a_collective(world: World) -> None:
    """Rank 1 ends while rank 0 waits in a collective of all."""
    if world.rank == 0:
        await world.all_reduce(np.ones(4, np.float32))


async def leaves_a_communicator_that_it_never_had(world: World) -> None:
    """The same on one that rank 1 has under another name."""
    from mpi4py import MPI

    comm = mpdist.Communicator.from_mpi4py(MPI.COMM_WORLD, f"of {world.rank}")
    if world.rank == 0:
        await comm.all_reduce(np.ones(4, np.float32))


async def leaves_before_a_send(world: World) -> None:
    """Rank 1 ends while rank 0 waits for a message, beside a task that waits for another one."""
    if world.rank == 0:
        other = asyncio.create_task(second_message(world))
        await world.recv(src=1, tag=3)
        await other


async def second_message(world: World) -> None:
    await world.recv(src=1, tag=4)


async def leaves_a_wait_that_a_task_ends(world: World) -> None:
    """Rank 1 ends while rank 0 waits for a message; another task does something about it."""
    if world.rank == 0:
        receive = world.recv(src=1, tag=3)
        other = asyncio.create_task(asyncio.sleep(3))
        other.add_done_callback(lambda _: receive.cancel())
        with contextlib.suppress(asyncio.CancelledError):
            await receive


async def leaves_before_a_receive(world: World) -> None:
    """Rank 1 ends while rank 0 sends it what nobody takes."""
    if world.rank == 0:
        await world.send(np.ones(2**22), 1)


async def leaves_a_collective_behind(world: World) -> None:
    """Both end, rank 1 with a collective that rank 0 has never called."""
    if world.rank == 1:
        world.barrier().forget()


async def leaves_a_pair_at_work(world: World) -> None:
    """The last rank ends early, having sent all it owed; the others go on for longer than its end may take."""
    last = world.size - 1
    async with world.subgroup(range(last)) if world.rank < last else world.subgroup([last]) as part:
        if world.rank == last:
            world.send(np.ones(2**22), 0, tag=9).forget()
            return
        for number in range(4):
            await asyncio.sleep(0.5)
            assert (await part.all_reduce(np.ones(1))).tolist() == [last], number
    if world.rank == 0:
        await asyncio.sleep(1.5)
        assert (await world.recv(src=last, tag=9)).count == 2**22


async def loads_for_long(world: World) -> None:
    """Rank 1 comes too late."""
    await world.barrier()
    if world.rank == 1:
        load_batch()
    await world.all_reduce(np.ones(4, np.float32))


def load_batch() -> None:
    time.sleep(20)


async def holds_the_gil(world: World) -> None:
    """Rank 1 is in a call that lets no other thread run."""
    await world.barrier()
    if world.rank == 1:
        ctypes.PyDLL(None).sleep(4)
    await world.barrier()
    print("all is well", flush=True)


async def calls_another(world: World) -> None:
    """The ranks call different collectives."""
    x = np.ones(4, np.float32)
    await (world.all_reduce(x) if world.rank == 0 else world.broadcast(x, 0))


def waits_without_a_loop() -> None:
    """Rank 1 ends while rank 0's main thread waits."""
    world = mpdist.init()
    if world.rank == 0:
        world.barrier().wait()


def leaves_a_collective_that_a_handler_has_interrupted() -> None:
    """Rank 1 has called it, but a signal's handler has raised before its last step.

    Without a loop, in which it might raise in a callback: that ends the job at once.
    """
    world = mpdist.init()
    if world.rank == 0:
        world.dup().wait()
        return

    def interrupt(*_: object) -> Generator[None]:
        signal.raise_signal(signal.SIGALRM)
        yield

    def raise_error(*_: object) -> None:
        raise InterruptedError

    signal.signal(signal.SIGALRM, raise_error)
    dropped.close_common = interrupt
    with contextlib.suppress(InterruptedError, mpdist.MpdistError):
        world.dup().wait()


if __name__ == "__main__":
    how: Callable[..., Awaitable[None] | None] = globals()[sys.argv[1]]
    if inspect.iscoroutinefunction(how):
        mpdist.run(how)
    else:
        how()
