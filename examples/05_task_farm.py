"""Task farm: rank 0 hands out tasks, and gives the next one to whoever is done.

A task is a row of the Mandelbrot set. Rows inside it take many times longer than
the others, so equal shares in advance would leave some ranks idle. All ranks
work; rank 0 also serves, in a second coroutine, while a thread of it computes.

$ mpirun -n 4 python examples/05_task_farm.py
45 rows are right; 642 points never leave the circle
rows done by each rank: [...]
"""

import asyncio
from collections.abc import Iterator

import numpy as np

import mpdist

ROWS, COLUMNS, LIMIT = 45, 64, 1000
TASK, RESULT = 1, 2


def escape_times(row: int) -> np.ndarray:
    """For each point of the row, after how many steps z -> z*z + c leaves the circle; LIMIT if it does not."""
    a, b = np.linspace(-2.1, 0.7, COLUMNS), np.linspace(-1.2, 1.2, ROWS)[row]
    x, y = np.zeros((2, COLUMNS))
    steps = np.zeros(COLUMNS, int)
    for _ in range(LIMIT):
        inside = x * x + y * y <= 4
        if not inside.any():
            break
        steps += inside
        x, y = np.where(inside, x * x - y * y + a, x), np.where(inside, 2 * x * y + b, y)
    return steps


async def serve(world: mpdist.Communicator, tasks: Iterator[int]) -> dict[int, np.ndarray]:
    """Answer every message with the next task, or with None when there is none left; returns the results."""
    results, workers = {}, world.size
    async for message in world.messages(tag=RESULT):
        if message.data is not None:
            row, steps = message.data
            results[row] = steps
        task = next(tasks, None)
        await world.send_object(task, dst=message.src, tag=TASK)
        workers -= task is None
        if workers == 0:
            break
    return results


async def work(world: mpdist.Communicator) -> int:
    """Ask rank 0 for tasks until there is none; returns how many were done."""
    done, result = 0, None
    while True:
        await world.send_object(result, dst=0, tag=RESULT)
        task = (await world.recv_object(src=0, tag=TASK)).data
        if task is None:
            return done
        result = task, await asyncio.to_thread(escape_times, task)
        done += 1


async def main(world: mpdist.Communicator) -> None:
    if world.rank == 0:
        results, done = await asyncio.gather(serve(world, iter(range(ROWS))), work(world))
    else:
        results, done = {}, await work(world)
    shares = await world.gather_object(done, dst=0)
    if world.rank == 0:
        steps = np.array([results[row] for row in range(ROWS)])
        np.testing.assert_array_equal(steps, [escape_times(row) for row in range(ROWS)])
        print(f"{ROWS} rows are right; {np.count_nonzero(steps == LIMIT)} points never leave the circle")
        print(f"rows done by each rank: {shares}")


mpdist.run(main)
