"""Program for the job tests: rank 1 fails as it is told, while the others wait as they are told.

    failing_rank.py HOW WHERE MARKER

It uses mpi4py itself, and writes the completion record as mpdist's runtime does.
"""

import ctypes
import os
import resource
import signal
import sys
import time

from mpdist.runtime.completion import record_completion, record_failure, record_opening, record_start

FAILING = 1
PAUSE_SECONDS = 0.3


def die(number: int) -> None:
    os.kill(os.getpid(), number)


def tell_and_leave() -> None:
    print("rank 1 explains itself", file=sys.stderr, flush=True)
    record_failure()
    os._exit(5)


FAILURES = {
    "exit0": lambda: os._exit(0),
    "exit3": lambda: os._exit(3),
    "sigkill": lambda: die(signal.SIGKILL),
    "sigsegv": lambda: ctypes.string_at(0),
    "told": tell_and_leave,
    "warden": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "nothing": lambda: None,
}


def wait(world, where: str) -> None:
    box = bytearray(8)
    if where == "barrier":
        world.Barrier()
    elif where == "recv":
        world.Recv(box, source=FAILING)
    elif where == "poll":
        request = world.Irecv(box, source=FAILING)
        while not request.Test():
            pass
    elif where == "idle":
        time.sleep(60)
    elif where == "finally":
        try:
            time.sleep(60)
        finally:
            time.sleep(0.2 * world.rank)
            print(f"rank {world.rank} cleaned up", flush=True)


def main(how: str, where: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    record_start()
    record_opening()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    world.Barrier()
    print(f"rank {world.rank} of {world.size} is ready", flush=True)
    time.sleep(PAUSE_SECONDS)
    if how == "finish":
        record_completion()
        return
    if world.rank == FAILING:
        FAILURES[how]()
    wait(world, where)


if __name__ == "__main__":
    main(*sys.argv[1:3])
