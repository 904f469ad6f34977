"""GPU: arrays of a GPU over MPI against what one does without mpdist. 2 ranks, which share the node's GPUs.

    python bench/gpu.py [--rounds 15] [--json FILE] [--only WORD]

starts itself with the environment's MPI; needs an NVIDIA GPU, CuPy and a torch that is built for CUDA, and says so
where they are missing. Every case alternates its two sides round by round after a warm-up of both, waits for the
device within the time, checks its result, and prints the ratio of times beside its target.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from measure import Result, lines, mpi_name, show, summary  # beside this script

KIB, MIB = 1024, 1024**2
WARM_UP = 3
RANKS = 2

Op = Callable[[], object]


def check_gpu() -> None:
    """Raise SystemExit where there is nothing to measure."""
    try:
        import cupy
        import torch
    except ImportError as error:
        raise SystemExit(f"bench/gpu.py: {error}; pip install torch 'mpdist[cuda13]' (or cuda12, by driver)") from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        raise SystemExit(f"bench/gpu.py needs an NVIDIA GPU: {error}") from error
    if not count or not torch.cuda.is_available():
        raise SystemExit("bench/gpu.py needs an NVIDIA GPU, and a torch that is built for CUDA")


class Bench:
    """Both sides of every case on this rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        import mpdist

        self.torch, self.dist = torch, dist
        self.world = mpdist.init()
        torch.set_num_threads(1)
        torch.cuda.set_device(self.world.local_rank % torch.cuda.device_count())
        dist.init_process_group("mpdist")
        self.gloo: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))
        self.rounds: int = options.rounds
        self.only: str = options.only

    def run(self) -> list[Result]:
        results = []
        for make in self.cases():
            result = make()
            results.append(result)
            if self.world.rank == 0:
                print(f"{result.case}: {result.ratio:.2f}", file=sys.stderr, flush=True)
        return results

    def cases(self) -> Iterator[Callable[[], Result]]:
        """The table of targets."""
        yield from self.wanted("staged all_reduce 64 MiB / copy to the host, MPI, copy back", self.staged, 0.4)
        yield from self.wanted("torch all_reduce 64 MiB / gloo", self.backend, 0.08)
        yield from self.wanted("DDP step, small transformer / torch DDP over gloo", self.data_parallel, 0.6)
        yield from self.wanted("all_reduce 4 KiB with ordering / without", self.ordering, 1.3)

    def wanted(self, case: str, make: Callable[[str, float], Result], target: float) -> Iterator[Callable[[], Result]]:
        if self.only in case:
            yield lambda: make(case, target)

    def compare(self, case: str, ours: Op, theirs: Op, number: int, target: float) -> Result:
        """Time both, round by round."""
        sides = (ours, theirs)
        for _ in range(WARM_UP):
            for side in sides:
                self.timed(side, number)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(self.rounds):
            for side, each in zip(sides, times, strict=True):
                each.append(self.timed(side, number))
        return summary(case, *times, ranks=self.world.size, mpi=mpi_name(), target=target)

    def timed(self, op: Op, number: int) -> float:
        """Microseconds of one call on the slower rank, until the device is done."""
        self.torch.cuda.synchronize()
        self.world.barrier().wait()
        start = time.perf_counter()
        for _ in range(number):
            op()
        self.torch.cuda.synchronize()
        seconds = np.array([time.perf_counter() - start])
        self.world.all_reduce(seconds, op="max").wait()
        return float(seconds[0]) / number * 1e6

    def checked(self, x: Any, op: Op) -> None:
        """The sum of ones is the number of ranks; zeros afterwards, which stay so however often they are added."""
        x.fill_(1)
        op()
        self.torch.cuda.synchronize()
        assert x[0].item() == x[-1].item() == self.world.size
        x.zero_()

    @contextmanager
    def without_ipc(self) -> Iterator[None]:
        """As with MPDIST_IPC=0, for communicators that have not been used yet."""
        engine = self.world._channel.engine
        before, engine.has_ipc = engine.has_ipc, False
        try:
            yield
        finally:
            engine.has_ipc = before

    # ------------------------------------------------------------------ cases

    def staged(self, case: str, target: float) -> Result:
        """mpdist without CUDA IPC against a copy to ordinary host memory, mpi4py, and a copy back."""
        from mpi4py import MPI

        x = self.torch.zeros(64 * MIB // 4, device="cuda")
        host = np.empty(64 * MIB // 4, np.float32)
        comm = self.world.dup().wait()
        there = self.torch.from_numpy(host)

        def naive() -> None:
            there.copy_(x)
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, host)
            x.copy_(there)

        def ours() -> None:
            comm.all_reduce(x).wait()

        with self.without_ipc():
            self.checked(x, naive)
            self.checked(x, ours)
            return self.compare(case, ours, naive, 2, target)

    def backend(self, case: str, target: float) -> Result:
        x = self.torch.zeros(64 * MIB // 4, device="cuda")

        def ours() -> None:
            self.dist.all_reduce(x)

        def theirs() -> None:
            self.dist.all_reduce(x, group=self.gloo)

        self.checked(x, ours)
        self.checked(x, theirs)
        return self.compare(case, ours, theirs, 2, target)

    def data_parallel(self, case: str, target: float) -> Result:
        from models import CASES
        from torch.nn.parallel import DistributedDataParallel as TorchDataParallel

        from mpdist.torch import DistributedDataParallel

        torch = self.torch
        torch.manual_seed(0)
        module = CASES["transformer, batch 8"].make().cuda()
        other = copy.deepcopy(module)
        x, y = (each.cuda() for each in CASES["transformer, batch 8"].batch(self.world.rank))
        sides = [
            (DistributedDataParallel(module, self.world), module),
            (TorchDataParallel(other, process_group=self.gloo, gradient_as_bucket_view=True), other),
        ]

        def stepping(model: Any, parameters: Any) -> Op:
            optimizer = torch.optim.SGD(parameters, lr=1e-4)

            def step() -> None:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

            return step

        ours, theirs = (stepping(model, module.parameters()) for model, module in sides)
        ours()
        theirs()
        for a, b in zip(module.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5)
        return self.compare(case, ours, theirs, 2, target)

    def ordering(self, case: str, target: float) -> Result:
        """What it costs to wait for the producer's stream, where that is idle: against copies that wait for nobody."""
        from mpdist.comm.staging import pinned_of
        from mpdist.memory import as_buffer

        x = self.torch.zeros(KIB, device="cuda")
        accelerator: Any = pinned_of(self.world._channel.engine, as_buffer(x).device).accelerator

        def ours() -> None:
            self.world.all_reduce(x).wait()

        def unordered() -> None:
            accelerator.follow = lambda _: None
            try:
                self.world.all_reduce(x).wait()
            finally:
                del accelerator.follow

        self.checked(x, ours)
        return self.compare(case, ours, unordered, 50, target)


def on_rank(options: argparse.Namespace) -> None:
    bench = Bench(options)
    results = bench.run()
    if bench.world.rank == 0:
        Path(options.out).write_text(lines(results))
    bench.dist.destroy_process_group()


def launch(options: argparse.Namespace, out: str) -> None:
    words = ["--on-rank", "--out", out, "--rounds", str(options.rounds), "--only", options.only]
    command = [sys.executable, "-m", "mpdist", "run", "-n", str(RANKS), __file__, *words]
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="write one JSON object a line here, too")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--on-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    check_gpu()
    if options.on_rank:
        on_rank(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "results")
        launch(options, out)
        text = Path(out).read_text()
    show([Result(**json.loads(line)) for line in text.splitlines()])
    if options.json:
        Path(options.json).write_text(text)


if __name__ == "__main__":
    main()
