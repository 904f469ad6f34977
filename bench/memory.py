"""Memory: the largest PSS of a rank in training, under mpdist's DistributedDataParallel and torch's over gloo. 2 ranks.

    python bench/memory.py [--steps 10] [--models WORD] [--json FILE]

Each side trains in a job of its own, in which nothing but it is loaded. PSS, the
proportional set size, counts a page that n processes share as 1/n of a page; it
is read every few milliseconds, and the mean over the ranks is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import Result, lines, mpi_name, positive, require, require_output, show  # beside this script

SIDES = ("mpdist", "torch")
TARGET = 1.05
MIB = 1024**2
SAMPLE_SECONDS = 0.003


class Peak(threading.Thread):
    """Watches this process's PSS.

    Attributes:
        mib: the largest value so far.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.mib = 0.0
        self._ending = threading.Event()

    def run(self) -> None:
        while not self._ending.wait(SAMPLE_SECONDS):
            self.mib = max(self.mib, pss_mib())

    def stop(self) -> float:
        self._ending.set()
        self.join()
        return max(self.mib, pss_mib())


def pss_mib() -> float:
    """The proportional set size of this process; Linux."""
    found = re.search(r"^Pss: +([0-9]+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def train(side: str, name: str, steps: int) -> list[float]:
    """Largest PSS of each rank."""
    import torch
    from models import CASES

    torch.set_num_threads(1)
    wrap, gather, rank = sides(side)
    case = CASES[name]
    torch.manual_seed(0)
    module = case.make()
    model = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    peak = Peak()
    peak.start()
    for number in range(steps):
        x, y = case.batch(100 * rank + number % 4)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return gather(peak.stop())


def sides(side: str) -> tuple[Any, Any, int]:
    """How this side wraps a module and gathers a number, and this process's rank."""
    if side == "mpdist":
        import mpdist.torch

        comm = mpdist.init()
        wrap = lambda module: mpdist.torch.DistributedDataParallel(module, comm)  # noqa: E731
        return wrap, lambda value: comm.all_gather_object(value).wait(), comm.rank

    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")

    def gather(value: float) -> list[float]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        dist.destroy_process_group()
        return values

    return lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True), gather, dist.get_rank()


def launch(options: argparse.Namespace) -> None:
    """Each side in a job of its own."""
    from models import CASES

    names = [name for name in CASES if "tiny" not in name]
    require(options.models, "--models", names)
    require_output(options.json)
    results = []
    for name in names:
        if options.models not in name:
            continue
        mib = {side: started(side, name, options.steps) for side in SIDES}
        ours, theirs = (sum(mib[side]) / len(mib[side]) for side in SIDES)
        ratios = sorted(a / b for a, b in zip(*mib.values(), strict=True))
        results.append(
            Result(
                f"{name}: largest PSS / torch DDP over gloo", 2, mpi_name(), ours, theirs, "MiB", ours / theirs,
                ratios[0], ratios[-1], options.steps, TARGET,
            )
        )  # fmt: skip
    show(results)
    if options.json:
        options.json.write_text(lines(results))


def started(side: str, name: str, steps: int) -> list[float]:
    """One job."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result"
        words = ["--steps", str(steps), "--models", name, "--json", str(path)]
        command = [sys.executable, "-m", "mpdist", "run", "-n", "2", __file__, *words]
        environ = {**os.environ, "MPDIST_BENCH_SIDE": side, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environ)
        return json.loads(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=10)
    parser.add_argument("--models", default="", help="only models whose name has this in it")
    parser.add_argument("--json", type=Path, help="also write the lines there")
    options = parser.parse_args()
    side = os.environ.get("MPDIST_BENCH_SIDE")
    if side is None:
        launch(options)
        return
    found = train(side, options.models, options.steps)
    if os.environ["RANK"] == "0":
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
