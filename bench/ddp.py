"""Data-parallel steps: mpdist's DistributedDataParallel, torch's over gloo, torch's over mpdist's backend.

    python bench/ddp.py [--launches 3] [--rounds 21] [--models WORD] [--json FILE]

starts itself on 2 ranks, several times, and prints the worst of the medians. Each
rank computes with one thread. All sides hold the same model and take turns, one
step each in every round; a step's time is that of the slower rank. `exposed` is a
step's time less that of a step with a barrier in the place of averaging, taken
within the same round. `bare` copies gradients together and sums them, and does
nothing else, see `BareAveraging`; mpdist copies none of large linear layers. With
MPDIST_FAKECLUSTER naming a program that makes several hosts on one machine, also
how much of the communication is hidden between 2 hosts.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel

sys.path.insert(0, str(Path(__file__).parent))

from bare import Straight, Two  # beside this script
from measure import Result, lines, mpi_name, positive, require, require_output, show
from models import CASES, Case

import mpdist
from mpdist.bench.contenders import Arrays
from mpdist.bench.rounds import turns
from mpdist.torch import DistributedDataParallel

if TYPE_CHECKING:
    from mpdist.transport.raw import Raw

STEP_TARGETS = {"MLP, batch 64": 0.75, "MLP, batch 8": 0.55}
EXPOSED, OVER_BACKEND, TINY, HIDDEN = 0.25, 0.7, 0.3, 0.8
RESAMPLES = 500
LINE_ITEMS = 16  # float32 in a line of the cache
# A median is positive if all but so many percent of the resampled ones are.
SURELY_ABOVE = 5


class Side:
    """One way to make a step."""

    def __init__(self, model: nn.Module, module: nn.Module, after: Callable[[], object] = lambda: None) -> None:
        self.model = model
        self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
        self.after = after
        self.seconds: list[float] = []

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        """Seconds of one step."""
        x, y = batch
        start = perf_counter()
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()
        self.after()
        self.optimizer.step()
        return perf_counter() - start


class BareAveraging:
    """Gradients go, halved, to memory that both ranks map as they come, and are summed at the end; nothing else."""

    def __init__(self, module: nn.Module, comm: mpdist.Communicator, raw: Raw) -> None:
        parameters = [*module.parameters()][::-1]  # about in the order of backward
        ends = list(itertools.accumulate(-(-each.numel() // LINE_ITEMS) * LINE_ITEMS for each in parameters))
        memory = comm.empty(ends[-1], np.float32)
        memory[:] = 0
        flat = torch.from_numpy(memory)
        for start, parameter in zip([0, *ends], parameters, strict=False):
            self._let_go_to(flat[start : start + parameter.numel()].view(parameter.shape), parameter)
        self._sum = Straight(Two(comm, raw), "bare", is_resident=True).all_reduce(Arrays(memory, None))

    @staticmethod
    def _let_go_to(place: Tensor, parameter: nn.Parameter) -> None:
        def go(parameter: Tensor) -> None:
            torch.mul(parameter.grad, 0.5, out=place)
            parameter.grad = place

        parameter.register_post_accumulate_grad_hook(go)

    def end(self) -> None:
        self._sum(0)


def sides_of(case: Case, comm: mpdist.Communicator, raw: Raw, groups: dict[str, Any], is_tiny: bool) -> dict[str, Side]:
    """Each with a copy of the same model."""
    torch.manual_seed(0)
    module = case.make()
    ours = copy.deepcopy(module)
    sides = {"mpdist": Side(DistributedDataParallel(ours, comm), ours)}
    for name, group in groups.items():
        theirs = copy.deepcopy(module)
        sides[name] = Side(TorchDataParallel(theirs, process_group=group, gradient_as_bucket_view=True), theirs)
    bare = copy.deepcopy(module)
    sides["bare"] = Side(bare, bare, BareAveraging(bare, comm, raw).end)
    alone = copy.deepcopy(module)
    sides["barrier"] = Side(alone, alone, lambda: comm.barrier().wait())
    if is_tiny:
        single = copy.deepcopy(module)

        def reduce_each() -> None:
            for work in [comm.all_reduce(parameter.grad, op="avg") for parameter in single.parameters()]:
                work.wait()

        sides["one all_reduce each"] = Side(single, single, reduce_each)
    return sides


def measure(case: Case, comm: mpdist.Communicator, sides: dict[str, Side], rounds: int) -> dict[str, np.ndarray]:
    """Milliseconds of each side in each round, of the slower rank."""
    batches = [case.batch(100 * comm.rank + number) for number in range(4)]
    for number in range(6):
        for side in sides.values():
            side.step(batches[number % 4])
    for number in range(rounds):
        for name in turns(sides, number):
            comm.barrier().wait()
            sides[name].seconds.append(sides[name].step(batches[number % 4]))
    times = {}
    for name, side in sides.items():
        times[name] = 1e3 * np.array(side.seconds)
        comm.all_reduce(times[name], op="max").wait()
    return times


def results_of(name: str, mpi: str, times: dict[str, np.ndarray]) -> Iterator[Result]:
    """Steps, and what averaging adds to them, against the other sides."""
    ours, barrier = times["mpdist"], times["barrier"]

    def compared(what: str, a: np.ndarray, b: np.ndarray, target: float | None) -> Result:
        return compare(f"{name}: {what}", mpi, a, b, target)

    for side in ("gloo", "backend"):
        if side not in times:
            continue
        is_gloo = side == "gloo"
        yield compared(f"step / torch DDP over {side}", ours, times[side], STEP_TARGETS.get(name) if is_gloo else None)
        target = None if "tiny" in name else EXPOSED if is_gloo else OVER_BACKEND
        yield compared(f"exposed / torch DDP over {side}", ours - barrier, times[side] - barrier, target)
    if "one all_reduce each" in times:
        single = times["one all_reduce each"] - barrier
        yield compared("exposed / one all_reduce each", ours - barrier, single, TINY)
    yield compared("step / step with a barrier", ours, barrier, None)
    bare = times["bare"]
    for side in ("gloo", "backend"):
        if side in times:
            yield compared(f"bare step / torch DDP over {side}", bare, times[side], None)
            yield compared(f"bare exposed / torch DDP over {side}", bare - barrier, times[side] - barrier, None)
    yield compared("exposed / bare exposed", ours - barrier, bare - barrier, None)


def compare(case: str, mpi: str, ours: np.ndarray, theirs: np.ndarray, target: float | None) -> Result:
    """The ratio of the medians, and its quartiles by resampling the rounds: a difference may be near zero in one.

    No ratio if the other side's time, a difference too, may as well be zero or less.
    """
    picks = np.random.default_rng(0).integers(len(ours), size=(RESAMPLES, len(ours)))
    others = np.median(theirs[picks], axis=1)
    a, b = statistics.median(ours), statistics.median(theirs)
    if np.percentile(others, SURELY_ABOVE) <= 0:
        return Result(case, 2, mpi, a, b, "ms", None, None, None, len(ours), target)
    ratios = np.median(ours[picks], axis=1) / others
    low, high = np.percentile(ratios, [25, 75])
    return Result(case, 2, mpi, a, b, "ms", a / b, float(low), float(high), len(ours), target)


def groups_of(comm: mpdist.Communicator, folder: str | None) -> dict[str, Any]:
    """torch's process groups to compare with; they meet in rank 0's folder."""
    path = Path(comm.broadcast_object(folder, src=0).wait()) / "store"
    dist.init_process_group("gloo", store=dist.FileStore(str(path), comm.size), rank=comm.rank, world_size=comm.size)
    groups = {"gloo": dist.group.WORLD}
    try:
        groups["backend"] = dist.new_group(backend="mpdist")
    except (RuntimeError, ValueError) as error:
        if comm.rank == 0:
            print(f"without torch's DDP over the backend: {error}", file=sys.stderr)
    return groups


def run_sides(comm: mpdist.Communicator, options: argparse.Namespace) -> list[Result]:
    """All models on this rank, every side in turn."""
    from mpdist.transport.raw import Raw  # not before mpdist has started

    raw = Raw()
    folder = tempfile.TemporaryDirectory() if comm.rank == 0 else None
    groups = groups_of(comm, folder.name if folder else None)
    found: list[Result] = []
    for name, case in CASES.items():
        if options.models not in name:
            continue
        sides = sides_of(case, comm, raw, groups, "tiny" in name)
        found += results_of(name, mpi_name(), measure(case, comm, sides, options.rounds))
        if comm.rank == 0:
            print(f"{name}: {sides['mpdist'].model.statistics()}", file=sys.stderr, flush=True)
        sides["mpdist"].model.close()
    comm.barrier().wait()
    dist.destroy_process_group()
    comm.barrier().wait()
    if folder:
        folder.cleanup()
    return found


def run_hosts(comm: mpdist.Communicator, options: argparse.Namespace) -> list[Result]:
    """How much of the communication between hosts is hidden behind backward: of the smaller of the two."""
    found: list[Result] = []
    for name, case in CASES.items():
        if options.models not in name or "tiny" in name:
            continue
        torch.manual_seed(0)
        module = case.make()
        side = Side(DistributedDataParallel(module, comm), module)
        for number in range(3 + options.rounds):
            side.step(case.batch(100 * comm.rank + number % 4))
        steps = side.model.statistics(options.rounds).steps
        hidden = np.array([1e3 * step.hidden for step in steps])
        smaller = np.array([1e3 * min(step.communication, step.backward) for step in steps])
        for each in (hidden, smaller):
            comm.all_reduce(each, op="avg").wait()
        what = "2 hosts, hidden communication / the smaller of communication and backward"
        result = compare(f"{name}: {what}", mpi_name(), hidden, smaller, HIDDEN)
        found.append(Result(**{**vars(result), "ranks": comm.size, "larger_is_better": True}))
        if comm.rank == 0:
            print(f"{name}: {side.model.statistics(options.rounds)}", file=sys.stderr, flush=True)
        side.model.close()
    return found


def worst(launches: list[list[Result]]) -> list[Result]:
    """Of each case the launch with the worst ratio; none at all is worse."""
    return [
        max(same, key=lambda each: math.inf if each.ratio is None else each.ratio)
        for same in zip(*launches, strict=True)
    ]


def launch(options: argparse.Namespace) -> None:
    """Start this script on 2 ranks, again and again, and on 2 hosts."""
    require(options.models, "--models", CASES)
    require_output(options.json)
    command = [sys.executable, "-m", "mpdist", "run", "-n", "2", __file__]
    results = worst([started(command, options, "sides") for _ in range(options.launches)])
    tool = os.environ.get("MPDIST_FAKECLUSTER")
    if tool:
        results += on_two_hosts([tool, "--name", "ddpbench"], options)
    show(results)
    if options.json:
        options.json.write_text(lines(results))


def on_two_hosts(cluster: list[str], options: argparse.Namespace) -> list[Result]:
    """One launch on two hosts of the fake cluster."""
    family = "mpich" if mpi_name() == "MPICH" else "openmpi"
    subprocess.run([*cluster, "up", "2", "--rate", "1gbit"], check=True, stdout=sys.stderr)
    try:
        variables = ["--env", "MPDIST_BENCH_SIDE=hosts", "--env", "OMP_NUM_THREADS=1"]
        return started([*cluster, "run", "--mpi", family, *variables, "--", sys.executable, __file__], options, "hosts")
    finally:
        subprocess.run([*cluster, "down"], check=True, stdout=sys.stderr)


def started(command: list[str], options: argparse.Namespace, side: str) -> list[Result]:
    """The results of one launch."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results"
        words = ["--rounds", str(options.rounds), "--models", options.models, "--json", str(path)]
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # mpiexec's, too
        environ = {**os.environ, "PATH": programs, "MPDIST_BENCH_SIDE": side, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, *words], check=True, env=environ)
        return [Result(**json.loads(line)) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=positive, default=3)
    parser.add_argument("--rounds", type=positive, default=21)
    parser.add_argument("--models", default="", help="only models whose name has this in it")
    parser.add_argument("--json", type=Path, help="also write the lines there")
    options = parser.parse_args()
    side = os.environ.get("MPDIST_BENCH_SIDE")
    if side is None:
        launch(options)
        return
    torch.set_num_threads(1)
    comm = mpdist.init()
    results = (run_hosts if side == "hosts" else run_sides)(comm, options)
    if comm.rank == 0:
        options.json.write_text(lines(results))


if __name__ == "__main__":
    main()
