"""init, run and finalize in one process, without a launcher."""

from __future__ import annotations

import subprocess
import sys
from statistics import median

import pytest
from cli.jobs import job_environ

HEAD = """
import asyncio, sys
import numpy as np
import mpdist
async def main(world, *args):
    x = np.ones(3)
    await world.all_reduce(x)
    return (world.size, float(x.sum()), *args)
"""


def python(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program of its own."""
    command = [sys.executable, *arguments, "-c", HEAD + text]
    return subprocess.run(command, capture_output=True, text=True, env=job_environ(), timeout=60, check=False)


def test_size_one_world_works_without_a_launcher() -> None:
    done = python("print(mpdist.run(main, 'more'))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "(1, 3.0, 'more')\n", "")


def test_init_serves_code_without_a_loop() -> None:
    done = python("world = mpdist.init(); print(world.node.size, world.all_reduce(np.ones(2)).wait())")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 [1. 1.]\n", "")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("mpdist.run(main(None))", "write mpdist.run(main), not main()"),
        ("mpdist.run(print)", "takes a coroutine function"),
        ("mpdist.run(3)", "takes a coroutine function"),
        ("async def alone(): pass\nmpdist.run(alone)", "it would call alone(world), but alone takes (): too many"),
        ("asyncio.run(within(mpdist.run, main))", "write `await main(mpdist.init())`"),
        ("mpdist.init(); asyncio.run(within(mpdist.finalize))", "finalize() was called in a running event loop"),
        (
            "async def beside(world): await world.barrier(); await asyncio.to_thread(mpdist.finalize)\n"
            "mpdist.run(beside)",
            "finalize() was called while an event loop runs in another thread",
        ),
    ],
)
def test_wrong_use_of_run_and_finalize_is_refused(call: str, words: str) -> None:
    done = python(f"async def within(call, *args): call(*args)\n{call}")
    assert done.returncode == 1
    assert words in done.stderr
    assert "never awaited" not in done.stderr


def test_mpi_is_not_stopped_beneath_mpdist() -> None:
    done = python("mpdist.init(); from mpi4py import MPI; MPI.Finalize()")
    assert done.returncode == 1
    assert "MPI.Finalize() was called while mpdist communicates: leave it out" in done.stderr
    done = python("from mpi4py import MPI; mpdist.init(); mpdist.finalize(); MPI.Finalize()")
    assert (done.returncode, done.stderr) == (0, "")


def test_run_takes_a_partial_and_a_callable_object() -> None:
    text = """
import functools
class Main:
    async def __call__(self, world):
        return world.size
print(mpdist.run(functools.partial(main, b=1) if False else functools.partial(main)), mpdist.run(Main()))
"""
    done = python(text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(1, 3.0) 1\n", "")


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise SystemExit(3)", "exit(3)"])
def test_exit_status_of_a_single_rank_is_its_own(end: str) -> None:
    assert python(f"mpdist.init(); {end}").returncode == 3


def test_exception_of_a_single_rank_is_python_s() -> None:
    done = python("mpdist.run(main); raise ValueError('boom')")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: boom"


def test_send_to_itself_that_is_never_received_is_told_of() -> None:
    done = python("mpdist.init().send(np.ones(1 << 22), 0)")
    assert "pending: send to 0" in done.stderr or "1 message that nobody received" in done.stderr
    assert done.returncode == int("pending" in done.stderr)


def test_wait_of_a_single_rank_for_itself_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPDIST_REPORT_AFTER", "0.3")
    text = """
async def wait(world):
    try:
        async with asyncio.timeout(2):
            await world.recv(src=0, tag=4)
    except TimeoutError:
        pass
mpdist.run(wait)
"""
    done = python(text)
    assert (done.returncode, done.stdout) == (0, "")
    assert "recv from 0, tag 4 on 'world' (rank 0 of 1)" in done.stderr
    assert "only this rank could send it, and it is at <string>:" in done.stderr


def test_rank_that_only_a_launcher_would_start_is_told() -> None:
    done = python("mpdist.init().send(np.ones(1), 1)")
    assert (
        "dst is 1, the ranks of this communicator are 0 to 0: this program was started without a launcher"
        in done.stderr
    )
    assert "`mpirun -n 2 python ...`" in done.stderr
    done = python("mpdist.init().dup().wait().send(np.ones(1), 1)")
    assert done.stderr.rstrip().endswith("the ranks of this communicator are 0 to 0")


def test_hooks_are_put_back_by_finalize() -> None:
    text = """
import threading
def state(): return (sys.excepthook, threading.excepthook, sys.exit)
before = state()
mpdist.init(); mpdist.finalize()
print(state() == before)
"""
    assert python(text).stdout == "True\n"


def test_import_loads_neither_mpi_nor_torch() -> None:
    text = "print([name for name in ('mpi4py.MPI', 'mpi4py', 'torch', 'cupy') if name in sys.modules])"
    assert python(text).stdout == "[]\n"


def test_start_loads_no_torch() -> None:
    assert python("mpdist.run(main); print('torch' in sys.modules)").stdout == "False\n"


def test_torch_s_part_is_loaded_when_it_is_named() -> None:
    pytest.importorskip("torch")
    assert python("print(mpdist.torch.Metrics.__name__)").stdout == "Metrics\n"


def test_data_parallel_is_loaded_without_torch_s_compiler() -> None:
    pytest.importorskip("torch")
    text = "print(mpdist.torch.DistributedDataParallel.__name__, 'torch._dynamo' in sys.modules)"
    assert python(text).stdout == "DistributedDataParallel False\n"  # it takes longer to load than all of torch


@pytest.mark.parametrize("text", ["mpdist.torch.check", "import mpdist.torch"])
def test_torch_s_part_without_torch_says_what_to_install(text: str) -> None:
    done = python(f"sys.modules['torch'] = None; {text}")
    assert done.returncode == 1
    assert done.stderr.endswith("mpdist.errors.Unavailable: mpdist.torch needs torch: pip install 'mpdist[torch]'\n")


def test_import_costs_little_more_than_numpy() -> None:
    limit_seconds = 0.06
    numpy, ours = (median(import_seconds(text) for _ in range(5)) for text in ("import numpy", "import numpy, mpdist"))
    assert ours - numpy < limit_seconds


def import_seconds(text: str) -> float:
    """Processor seconds of a Python process that runs this."""
    program = f"import time; start = time.process_time(); {text}; print(time.process_time() - start)"
    command = [sys.executable, "-c", program]
    return float(subprocess.run(command, capture_output=True, text=True, env=job_environ(), check=True).stdout)
