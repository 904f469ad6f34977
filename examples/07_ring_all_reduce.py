"""Ring all-reduce: the classic tutorial's algorithm, written over `sendrecv`, beside `all_reduce` itself.

Each rank cuts its array into as many chunks as there are ranks. In size - 1 steps
a chunk travels round the ring and collects what each rank has of it; in size - 1
further steps the finished chunks travel round once more. Each rank sends
2 (size - 1) / size of the array, however many ranks there are.

$ mpirun -n 3 python examples/07_ring_all_reduce.py
a ring of 3, 1000 numbers: its sum is all_reduce's
the average of the ranks' numbers is 1.0
"""

import numpy as np

import mpdist


async def ring_all_reduce(comm: mpdist.Communicator, x: np.ndarray) -> None:
    """Sum `x` over all ranks, in place."""
    chunks = np.array_split(x, comm.size)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        outgoing, incoming = chunks[(comm.rank - step) % comm.size], chunks[(comm.rank - step - 1) % comm.size]
        part = np.empty_like(incoming)
        await comm.sendrecv(outgoing, right, part, left)
        incoming += part
    for step in range(comm.size - 1):
        outgoing, incoming = chunks[(comm.rank - step + 1) % comm.size], chunks[(comm.rank - step) % comm.size]
        await comm.sendrecv(outgoing, right, incoming, left)


async def main(world: mpdist.Communicator) -> None:
    x = np.full(1000, float(world.rank)) + np.arange(1000)
    expected = x.copy()
    await world.all_reduce(expected)
    await ring_all_reduce(world, x)
    assert np.array_equal(x, expected)
    if world.rank == 0:
        print(f"a ring of {world.size}, {x.size} numbers: its sum is all_reduce's")
        print(f"the average of the ranks' numbers is {x[0] / world.size}")


if __name__ == "__main__":
    mpdist.run(main)
