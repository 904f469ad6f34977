"""GPU overlap: kernels run while a large array is being reduced.

An operation follows what is queued when it is posted, not what is queued later: so post it first, then queue the
kernels. The copies run in streams of their own, beside the kernels.

What is gained depends on the machine. Where the array goes through the host, kernels and messages share nothing; where
ranks of one GPU reduce there, they share the GPU.

$ mpirun -n 2 python examples/gpu_overlap.py
all_reduce of 64 MiB alone: ... ms
kernels alone:              ... ms
together:                   ... ms, one after the other ... ms
"""

from collections.abc import Awaitable, Callable
from time import perf_counter

import numpy as np

import mpdist

try:
    import cupy

    GPUS = cupy.cuda.runtime.getDeviceCount()
except (ImportError, RuntimeError) as error:  # CuPy's own error, where there is no GPU, is a RuntimeError
    raise SystemExit(
        f"gpu_overlap.py needs an NVIDIA GPU and CuPy ({error}): pip install 'mpdist[cuda13]' or 'mpdist[cuda12]', "
        "by your driver"
    ) from error

REPEATS = 5
KERNELS = 50


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


async def measure(world: mpdist.Communicator) -> None:
    x = cupy.full(2**24, world.rank + 1, cupy.float32)
    values = cupy.linspace(0, 1, 2**22)

    async def reduce() -> None:
        await world.all_reduce(x, op="avg")

    async def compute() -> None:
        for _ in range(KERNELS):
            cupy.sin(values, out=values)
        cupy.cuda.get_current_stream().synchronize()

    async def both() -> None:
        work = world.all_reduce(x, op="avg")
        for _ in range(KERNELS):
            cupy.sin(values, out=values)
        await work
        cupy.cuda.get_current_stream().synchronize()

    await both()  # the first time is slower: memory is pinned, kernels are compiled
    alone, computing = await median_ms(world, reduce), await median_ms(world, compute)
    together = await median_ms(world, both)
    if not bool((x == (world.size + 1) / 2).all()):
        raise RuntimeError(f"wrong average on rank {world.rank}: {x}")
    if world.rank == 0:
        print(f"all_reduce of {x.nbytes / 2**20:.0f} MiB alone: {alone:.1f} ms")
        print(f"kernels alone:              {computing:.1f} ms")
        print(f"together:                   {together:.1f} ms, one after the other {alone + computing:.1f} ms")


async def main(world: mpdist.Communicator) -> None:
    with cupy.cuda.Device(world.local_rank % GPUS):
        await measure(world)


if __name__ == "__main__":
    mpdist.run(main)
