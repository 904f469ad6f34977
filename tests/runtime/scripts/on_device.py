"""Program for the job tests: rank 1 is lost while arrays on a GPU are on their way.

on_device.py GPU HOW WAY

GPU  simulated, real
HOW  exception, sigkill, sigsegv
WAY  led (the communicator's memory), slots (the program's), message
"""

import itertools
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import mpdist

MIB = 1024 * 1024


def end(how):
    if how == "exception":
        raise ValueError("boom")
    os.kill(os.getpid(), getattr(signal, how.upper()))


def main(how, way):
    import cupy

    world = mpdist.init()
    x = world.empty(MIB, np.float32, device="cuda") if way == "led" else cupy.full(MIB, 1, np.float32)
    y = cupy.full(MIB, 2, np.float32)
    other = 1 - world.rank
    for number in itertools.count():
        work = world.sendrecv(x, other, y, other) if way == "message" else world.all_reduce(x, "max")
        if number == 20 and world.rank == 1:
            end(how)
        work.wait()


@contextmanager
def cupy_of(gpu):
    """CuPy there, or on a simulated GPU of this process."""
    if gpu == "real":
        yield
        return
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from memory.simulated import simulated
    from memory.simulated_cupy import module_of

    with simulated(seconds=0.00002) as device:
        sys.modules["cupy"] = module_of(lambda: device)
        yield


if __name__ == "__main__":
    with cupy_of(sys.argv[1]):
        main(*sys.argv[2:4])
