"""GPU all_reduce: CuPy arrays are reduced like any others, in the order of the stream that computes them.

The kernel that fills the array may still be queued when the operation is posted: the copies wait for it, the host does
not. After the await the result is complete, for every stream.

$ mpirun -n 2 python examples/gpu_all_reduce.py
mean over the ranks: 1.5, everywhere: True
"""

import mpdist

try:
    import cupy

    GPUS = cupy.cuda.runtime.getDeviceCount()
except (ImportError, RuntimeError) as error:  # CuPy's own error, where there is no GPU, is a RuntimeError
    raise SystemExit(
        f"gpu_all_reduce.py needs an NVIDIA GPU and CuPy ({error}): pip install 'mpdist[cuda13]' or 'mpdist[cuda12]', "
        "by your driver"
    ) from error


async def main(world: mpdist.Communicator) -> None:
    with cupy.cuda.Device(world.local_rank % GPUS):
        x = cupy.full(2**20, world.rank + 1, cupy.float32)
        await world.all_reduce(x, op="avg")
        if world.rank == 0:
            print(f"mean over the ranks: {float(x[0])}, everywhere: {bool((x == x[0]).all())}")


if __name__ == "__main__":
    mpdist.run(main)
