"""GPU: arrays of a GPU over MPI against what one does without mpdist, or without the short way. 2 ranks, which share
the GPUs of the node: with one, the targets are those of two ranks on one GPU.

    python bench/gpu.py [--rounds 15] [--json FILE] [--only WORD]

starts itself with the environment's MPI; needs an NVIDIA GPU, CuPy and a torch that is built for CUDA, and says so
where they are missing. Every case alternates its two sides round by round after a warm-up of both, waits for the
device within the time, checks its result, and prints the ratio beside its target. Where ranks cannot reach each other's
memory (CUDA IPC), mpdist says so, and the cases about that compare something else.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from measure import (  # beside this script
    Result,
    is_rank,
    launch,
    mpi_name,
    positive,
    publish,
    require,
    require_output,
    summary,
)

KIB, MIB = 1024, 1024**2
WARM_UP = 3
RANKS = 2
# Messages that are under way at once, as the usual benchmarks of bandwidth have them; as many copies are queued beside.
AT_A_TIME = 4

# By their names: layers, width, context, batch. On a GPU the first is bound by the thread that queues its kernels.
TRANSFORMERS = {
    "transformer of 3.2 M parameters": (4, 256, 128, 8),
    "transformer of 10.8 M parameters": (6, 384, 256, 8),
    "transformer of 85 M parameters": (12, 768, 256, 4),
}

Op = Callable[[], object]
Case = Callable[["Bench", str, float | None], Result]


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
    """Both sides of every case on this rank.

    Args:
        device: torch's name of it.

    Attributes:
        device: this rank's, as CuPy and torch have it current.
        streams: torch's module for it.
        gloo: torch's group over gloo.
    """

    def __init__(self, options: argparse.Namespace, device: str = "cuda") -> None:
        import cupy
        import torch
        import torch.distributed as dist

        import mpdist.torch

        self.cupy: Any = cupy
        self.torch, self.dist = torch, dist
        self.world = mpdist.init()
        torch.set_num_threads(1)
        self.streams: Any = torch.get_device_module(device)
        index = self.world.local_rank % self.streams.device_count()
        cupy.cuda.Device(index).use()
        self.streams.set_device(index)
        self.device = torch.device(device, index)
        dist.init_process_group("mpdist")
        self.gloo: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))
        self.rounds: int = options.rounds
        self.only: str = options.only

    def run(self) -> list[Result]:
        results = []
        for case, (make, target) in CASES.items():
            if self.only not in case:
                continue
            result = make(self, case, target)
            results.append(result)
            if self.world.rank == 0:
                print(f"{result.case}: {result.ratio:.2f}", file=sys.stderr, flush=True)
        return results

    # ------------------------------------------------------------------ measuring

    def compare(self, case: str, ours: Op, theirs: Op, number: int, target: float | None) -> Result:
        """Ratio of times."""
        return self.summary(case, *self.alternated(ours, theirs, number), target=target)

    def alternated(self, ours: Op, theirs: Op, number: int) -> tuple[list[float], list[float]]:
        """Microseconds of both, round by round, after a warm-up."""
        sides = (ours, theirs)
        for _ in range(WARM_UP):
            for side in sides:
                self.timed(side, number)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(self.rounds):
            for side, each in zip(sides, times, strict=True):
                each.append(self.timed(side, number))
        return times

    def timed(self, op: Op, number: int) -> float:
        """Microseconds of one call on the slower rank, until the device is done."""
        self.streams.synchronize()
        self.world.barrier().wait()
        start = time.perf_counter()
        for _ in range(number):
            op()
        self.streams.synchronize()
        seconds = np.array([time.perf_counter() - start])
        self.world.all_reduce(seconds, op="max").wait()
        return float(seconds[0]) / number * 1e6

    def summary(self, case: str, ours: list[float], theirs: list[float], **more: Any) -> Result:
        return summary(case, ours, theirs, ranks=self.world.size, mpi=mpi_name(), **more)

    def zeros(self, nbytes: int) -> Any:
        """A tensor of the device."""
        return self.torch.zeros(nbytes // 4, device=self.device)

    def checked(self, x: Any, op: Op) -> None:
        """The sum of ones is the number of ranks; zeros afterwards, which stay so however often they are added."""
        x.fill_(1)
        op()
        self.streams.synchronize()
        assert x[0].item() == x[-1].item() == self.world.size
        x.zero_()

    @contextmanager
    def without_ipc(self) -> Iterator[None]:
        """As with MPDIST_IPC=0, for communicators that have not used it yet."""
        engine = self.world._channel.engine
        before, engine.has_ipc = engine.has_ipc, False
        try:
            yield
        finally:
            engine.has_ipc = before

    # ------------------------------------------------------------------ messages

    def send(self, case: str, target: float | None) -> Result:
        """Gigabytes a second from rank 0 to rank 1, against copies on rank 0 within the device; so many at a time."""
        return self.sent(case, target, AT_A_TIME)

    def send_alone(self, case: str, target: float | None) -> Result:
        return self.sent(case, target, 1)

    def sent(self, case: str, target: float | None, number: int) -> Result:
        x = self.filled(256 * MIB, 1)
        into = [self.filled(256 * MIB, 2) for _ in range(number)]

        def ours() -> None:
            self.passed(x, *into)

        def theirs() -> None:
            if self.world.rank == 0:
                for y in into:
                    self.cupy.copyto(y, x)
                if number == 1:
                    self.streams.synchronize()

        for _ in range(2):  # the first one goes through the host
            ours()
        if self.world.rank == 0:
            showing = self.world._channel.showing
            assert showing is not None
            assert showing.is_taken_by(1), "no IPC: the line above says why"
        for y in into if self.world.rank == 1 else ():
            assert float(y[0]) == float(y[-1]) == 1
        repeats = max(1, AT_A_TIME // number)
        rates = [[number * x.nbytes / us / 1000 for us in times] for times in self.alternated(ours, theirs, repeats)]
        return self.summary(case, *rates, target=target, unit="GB/s", larger_is_better=True)

    def send_again(self, case: str, target: float | None) -> Result:
        """The first message of an array opens the memory where it lies; memory of its own, and kept to the end, so that
        no other array has lain there. Large enough that the driver does not put several into one piece."""
        first: list[float] = []
        second: list[float] = []
        kept = []
        y = self.filled(4 * MIB, 2)
        for number in range(WARM_UP + self.rounds):
            with self.cupy.cuda.using_allocator(None):  # no pool, whose segments are open already
                x = self.filled(4 * MIB, number)
            kept.append(x)
            for times in (first, second):
                times.append(self.timed(lambda x=x: self.passed(x, y), 1))
            if self.world.rank == 1:
                assert float(y[0]) == float(y[-1]) == number
        return self.summary(case, second[WARM_UP:], first[WARM_UP:], target=target)

    def filled(self, nbytes: int, value: float) -> Any:
        """A CuPy array."""
        return self.cupy.full(nbytes // 4, value, self.cupy.float32)

    def passed(self, x: Any, *into: Any) -> None:
        """x of rank 0 comes to each of these of rank 1, all under way at once."""
        send, recv, is_sender = self.world.send, self.world.recv, self.world.rank == 0
        for work in [send(x, 1) if is_sender else recv(y, 0) for y in into]:
            work.wait()

    # ------------------------------------------------------------------ collectives

    def staged(self, case: str, target: float | None) -> Result:
        """mpdist without CUDA IPC against a copy to ordinary host memory, mpi4py, and a copy back."""
        from mpi4py import MPI

        x = self.zeros(64 * MIB)
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
            result = self.compare(case, ours, naive, 2, target)
        comm.close().wait()
        return result

    def straight(self, case: str, target: float | None) -> Result:
        x = self.zeros(64 * MIB)
        straight, staged = self.world.dup().wait(), self.world.dup().wait()

        def ours() -> None:
            straight.all_reduce(x).wait()

        def theirs() -> None:
            with self.without_ipc():
                staged.all_reduce(x).wait()

        for op in (ours, ours, ours, theirs):
            self.checked(x, op)
        joining: Any = straight._channel.devices
        assert joining._team.rounds, "no IPC: the line above says why"
        result = self.compare(case, ours, theirs, 2, target)
        for comm in (straight, staged):
            comm.close().wait()
        return result

    def backend(self, case: str, target: float | None) -> Result:
        x = self.zeros(64 * MIB)

        def ours() -> None:
            self.dist.all_reduce(x)

        def theirs() -> None:
            self.dist.all_reduce(x, group=self.gloo)

        self.checked(x, ours)
        self.checked(x, theirs)
        return self.compare(case, ours, theirs, 2, target)

    def ordering(self, case: str, target: float | None) -> Result:
        """What it costs to wait for the producer's stream, where that is idle: against copies that wait for nobody."""
        from mpdist.comm.staging import pinned_of
        from mpdist.memory import as_buffer

        x = self.zeros(4 * KIB)
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

    # ------------------------------------------------------------------ training

    def data_parallel(self, case: str, target: float | None) -> Result:
        from models import Transformer, texts
        from torch.nn.parallel import DistributedDataParallel as TorchDataParallel

        from mpdist.torch import DistributedDataParallel

        torch = self.torch
        torch.manual_seed(0)
        layers, width, context, batch = next(shape for name, shape in TRANSFORMERS.items() if name in case)
        module = Transformer(layers, width, context).to(self.device)
        other = copy.deepcopy(module)
        x, y = (each.to(self.device) for each in texts(batch, context)(self.world.rank))
        model = DistributedDataParallel(module, self.world)
        others = TorchDataParallel(other, process_group=self.gloo, gradient_as_bucket_view=True)

        def stepping(model: Any, parameters: Any) -> Op:
            optimizer = torch.optim.SGD(parameters, lr=1e-4)

            def step() -> None:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

            return step

        ours, theirs = stepping(model, module.parameters()), stepping(others, other.parameters())
        ours()
        theirs()
        for a, b in zip(module.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5)
        result = self.compare(case, ours, theirs, 2, target)
        model.close()
        return result


# Each with what it is to reach.
CASES: dict[str, tuple[Case, float | None]] = {
    "IPC send 256 MiB: bandwidth / of a copy in one process": (Bench.send, 0.85),
    "the same, each waited for before the next": (Bench.send_alone, None),
    "second IPC send of an array of 4 MiB / first": (Bench.send_again, 0.1),
    "staged all_reduce 64 MiB / copy to the host, MPI, copy back": (Bench.staged, 0.4),
    "IPC all_reduce 64 MiB / staged": (Bench.straight, 0.15),
    "torch all_reduce 64 MiB / gloo": (Bench.backend, 0.08),
    **{f"DDP step, {name} / torch DDP over gloo": (Bench.data_parallel, 0.6) for name in TRANSFORMERS},
    "all_reduce 4 KiB with ordering / without": (Bench.ordering, 1.3),
}


def on_rank(options: argparse.Namespace) -> None:
    bench = Bench(options)
    results = bench.run()
    if bench.world.rank == 0:
        publish(results, options.json)
    bench.dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--json", help="append one JSON line per case to this file")
    parser.add_argument("--only", default="", help="cases that contain this word")
    options = parser.parse_args()
    if is_rank():
        on_rank(options)
        return
    require(options.only, "--only", CASES)
    require_output(options.json)
    check_gpu()
    launch(__file__, RANKS)


if __name__ == "__main__":
    main()
