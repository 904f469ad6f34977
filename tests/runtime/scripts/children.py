"""Program for the job tests: rank 1 starts children in the way that is asked for; then all ranks add, and end well.

children.py HOW
"""

import ctypes
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time

if sys.argv[1].startswith("mpi4py"):
    from mpi4py import MPI  # noqa: F401  # it will call MPI_Finalize at the end of the process

if sys.argv[1] == "ended_at_once":  # as early as Python runs anything in a child
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))

import numpy as np

import mpdist


def fork(child):
    """Run a function in a forked child, and return its exit status; negative for a signal."""
    pid = os.fork()
    if pid == 0:
        child()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def use(world):
    """Every way into mpdist is closed in a forked child, and none of them waits."""
    calls = [
        mpdist.init,
        world.barrier,
        lambda: world.send(np.ones(3), 0),
        lambda: world.recv(),
        lambda: world.dup(),
        lambda: PENDING[0].wait(),
        lambda: mpdist.run(coroutine),
    ]
    for call in calls:
        try:
            call()
        except mpdist.MpdistError as error:
            if "fork" not in str(error):
                raise
        else:
            raise AssertionError(f"no error from {call}")
    mpdist.finalize()


async def coroutine(world):
    pass


PENDING = []


def raise_error():
    raise ValueError("in a child")


def wait_for_sigterm():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)


def square(x):
    return x * x


def start_mpdist(_=None):
    try:
        mpdist.init()
    except mpdist.UsageError as error:
        return str(error)
    return "no error"


def crash(world):
    assert fork(lambda: ctypes.string_at(0)) == -signal.SIGSEGV


def forks(world):
    assert fork(lambda: None) == 0
    assert fork(lambda: sys.exit(3)) == 3
    assert fork(lambda: os._exit(4)) == 4
    assert fork(lambda: use(world)) == 0
    assert fork(raise_error) == 1
    assert fork(wait_for_sigterm) == -signal.SIGTERM


def ended_at_once(world):
    """A child that gets SIGTERM while it is being forked, as a pool's that is closed early."""
    assert fork(lambda: None) == -signal.SIGTERM
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    time.sleep(4)  # longer than a rank may take to end


def mpi4py_forks(world):
    assert fork(lambda: None) == 0
    assert fork(lambda: sys.exit(3)) == 3
    assert fork(raise_error) == 1


def pools(world):
    with multiprocessing.get_context("fork").Pool(2) as workers:
        assert workers.map(square, range(5)) == [0, 1, 4, 9, 16]
        assert all("fork" in text for text in workers.map(start_mpdist, range(2)))


def spawned(world):
    """Children with an interpreter of their own."""
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as workers:
            assert workers.map(square, range(5)) == [0, 1, 4, 9, 16]
            (text,) = workers.map(start_mpdist, [0])
        assert f"rank 1 of {world.size} has itself started" in text, text
        assert 'write what is for the rank alone under `if __name__ == "__main__":`' in text
    command = [sys.executable, "-c", "import mpdist; mpdist.init()"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "UsageError" in done.stderr
    assert "has itself started" in done.stderr


def dataloader(world):
    from torch.utils.data import DataLoader

    batches = list(DataLoader(list(range(10)), batch_size=5, num_workers=2))
    assert [int(batch.sum()) for batch in batches] == [10, 35]


def main(how):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    world = mpdist.init()
    world.barrier().wait()
    if world.rank == 1:
        PENDING.append(world.recv(src=0, tag=9))
        globals()[how](world)
    if world.rank == 0:
        world.send(np.ones(1), 1, tag=9).wait()
    if world.rank == 1:
        PENDING[0].wait()
    x = np.ones(4)
    world.all_reduce(x).wait()
    assert x[0] == world.size
    print("added", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
