"""GPU probe: what CUDA can do between two processes here, and what they cost each other. mpdist has no part in it.

    python bench/gpu_probe.py

starts itself on 2 ranks by the environment's MPI; needs an NVIDIA GPU and CuPy. Each line says what works, or how long
it takes on the average: on rank 0 while rank 1 waits, then on both at the same time. Where both times are the same, the
processes do not hinder each other; where the second is 100 us longer, they take turns on an engine of the GPU.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from measure import is_rank, launch  # beside this script

KIB, MIB = 1024, 1024**2
RANKS = 2
TIMES = 300

TO_DEVICE, TO_HOST, WITHIN = 1, 2, 3  # cudaMemcpyKind
NOT_READY = 600  # cudaError_t

KERNEL = r"""
extern "C" __global__ void add(unsigned int* x, long long count) {
    long long width = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += width) x[i] += 1;
}
"""


class Probe:
    """This rank's part."""

    def __init__(self) -> None:
        import cupy
        from mpi4py import MPI

        self.cupy: Any = cupy
        self.runtime: Any = cupy.cuda.runtime
        self.comm = MPI.COMM_WORLD
        self.rank = self.comm.rank
        cupy.cuda.Device(self.rank % self.runtime.getDeviceCount()).use()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.event = cupy.cuda.Event(disable_timing=True)

    def run(self) -> None:
        name = self.runtime.getDeviceProperties(self.cupy.cuda.runtime.getDevice())["name"].decode()
        self.say(f"{name}, driver {self.runtime.driverGetVersion()}, CuPy {self.cupy.__version__}")
        self.pinning()
        for what in (self.memory, self.events):
            self.tried(what)
        self.costs()

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def tried(self, what: Callable[[], str]) -> None:
        try:
            outcome = what()
        except self.runtime.CUDARuntimeError as error:
            outcome = f"does not work: {error}"
        outcomes = self.comm.allgather(outcome)
        self.say(f"{(what.__doc__ or '').rstrip('.')}: {outcomes[0] if len(set(outcomes)) == 1 else outcomes}")

    # ------------------------------------------------------------------ what works

    def pinning(self) -> None:
        self.host = np.zeros(64 * MIB + 4096, np.uint8)
        self.host = self.host[-self.host.ctypes.data % 4096 :][: 64 * MIB]
        start = time.perf_counter()
        try:
            self.runtime.hostRegister(self.host.ctypes.data, self.host.nbytes, 0)
        except self.runtime.CUDARuntimeError as error:
            self.say(f"pinning 64 MiB of host memory: does not work: {error}; what follows is of memory not pinned")
            return
        self.say(f"pinning 64 MiB of host memory: {(time.perf_counter() - start) * 1e3:.0f} ms")

    def memory(self) -> str:
        """Memory of another process (CUDA IPC)."""
        mine = self.runtime.malloc(4 * MIB)
        self.runtime.memset(mine, 1 + self.rank, 4 * MIB)
        self.runtime.deviceSynchronize()
        handle = self.comm.sendrecv(self.runtime.ipcGetMemHandle(mine), 1 - self.rank)
        start = time.perf_counter()
        theirs = self.runtime.ipcOpenMemHandle(handle)
        seconds = time.perf_counter() - start
        found = np.empty(16, np.uint8)
        self.runtime.memcpy(found.ctypes.data, theirs, found.nbytes, TO_HOST)
        self.comm.Barrier()
        self.runtime.ipcCloseMemHandle(theirs)
        self.comm.Barrier()
        self.runtime.free(mine)
        is_right = bool((found == 2 - self.rank).all())
        if self.rank == 0:
            print(f"opening 4 MiB of another process: {seconds * 1e6:.0f} us", flush=True)
        return "works" if is_right else f"gives other values: {found[0]}"

    def events(self) -> str:
        """Events of another process (CUDA IPC)."""
        event = self.cupy.cuda.Event(disable_timing=True, interprocess=True)
        event.record(self.stream)
        theirs = self.runtime.ipcOpenEventHandle(
            self.comm.sendrecv(self.runtime.ipcGetEventHandle(event.ptr), 1 - self.rank)
        )
        self.runtime.streamWaitEvent(self.stream.ptr, theirs)
        self.stream.synchronize()
        self.comm.Barrier()
        self.runtime.eventDestroy(theirs)
        return "works"

    # ------------------------------------------------------------------ what it costs

    def costs(self) -> None:
        copy, rows = self.runtime.memcpyAsync, self.runtime.memcpy2DAsync
        x = self.cupy.zeros(256 * MIB, self.cupy.uint8)
        y = self.cupy.zeros(256 * MIB, self.cupy.uint8)
        kernel = self.cupy.RawKernel(KERNEL, "add")
        at, to, host, stream = x.data.ptr, y.data.ptr, self.host.ctypes.data, self.stream.ptr
        self.say("\nus, until an event says that it is over           alone     both")
        self.timed("an event", lambda: None)
        self.timed("a kernel on 4 MiB", lambda: kernel((1024,), (256,), (x, np.int64(MIB)), stream=self.stream))
        for nbytes in (4 * KIB, 64 * KIB, 4 * MIB, 64 * MIB):
            size = f"{nbytes // KIB} KiB" if nbytes < MIB else f"{nbytes // MIB} MiB"
            half = nbytes // 2
            self.timed(f"{size} within the GPU", copy, to, at, nbytes, WITHIN, stream)
            self.timed(f"{size} to the host", copy, host, at, nbytes, TO_HOST, stream)
            self.timed(f"{size} from the host", copy, at, host, nbytes, TO_DEVICE, stream)
            self.timed(f"{size} from the host, as two rows", rows, at, half, host, half, half, 2, TO_DEVICE, stream)
        self.timed("256 MiB within the GPU", copy, to, at, 256 * MIB, WITHIN, stream)

    def timed(self, what: str, queue: Callable[..., object], *arguments: object) -> None:
        alone, both = (self.mean(partial(queue, *arguments), ranks) for ranks in ((0,), (0, 1)))
        self.say(f"{what:45} {alone:9.1f} {both:8.1f}")

    def mean(self, queue: Callable[[], object], ranks: tuple[int, ...]) -> float:
        """Microseconds on this rank, if it is one of these."""
        self.once(queue)  # compiles what is new
        self.runtime.deviceSynchronize()
        self.comm.Barrier()
        times = [self.once(queue) for _ in range(TIMES)] if self.rank in ranks else [0.0]
        self.comm.Barrier()
        return statistics.mean(times)

    def once(self, queue: Callable[[], object]) -> float:
        start = time.perf_counter()
        queue()
        self.event.record(self.stream)
        while self.runtime.eventQuery(self.event.ptr) == NOT_READY:
            pass
        return (time.perf_counter() - start) * 1e6


if __name__ == "__main__":
    if is_rank():
        Probe().run()
    else:
        try:
            import cupy
        except ImportError as error:
            raise SystemExit(
                f"bench/gpu_probe.py: {error}; pip install 'mpdist[cuda13]' (or cuda12, by driver)"
            ) from error
        try:
            cupy.cuda.runtime.getDeviceCount()
        except RuntimeError as error:
            raise SystemExit(f"bench/gpu_probe.py needs an NVIDIA GPU: {error}") from error
        launch(__file__, RANKS)
