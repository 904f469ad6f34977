"""Alone: steps of DistributedDataParallel, mpdist's own and torch's by each backend, in processes of their own.

    python bench/alone.py [--launches 5] [--steps 60] [--json FILE]

starts jobs of 2 ranks by turns, as a user would: mpdist's DistributedDataParallel without any group of torch's; torch's
by the backend mpdist, both under the environment's MPI; and by gloo without MPI, as torchrun starts it. What they do to
a process counts here, the memory that it keeps among it; bench/ddp.py and bench/torch_backend.py have all in one.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))

from measure import positive, publish, rank_environ, require_output, summary  # beside this script
from models import mlp

import mpdist
import mpdist.torch

RANKS = 2
OWN = "own"
# Of a step by gloo: with torch's class, and with mpdist's own.
BATCHES = {64: {"mpdist": 0.85, OWN: 0.75}, 8: {"mpdist": 0.65, OWN: 0.55}}
WARM_UP = 10


def on_rank(backend: str, batch: int, steps: int, out: Path) -> None:
    """Train, and write the median milliseconds of a step; it ends when all ranks have taken it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: torch.nn.Module
    if backend == OWN:
        rank = mpdist.init().rank
        model = mpdist.torch.DistributedDataParallel(mlp())
    else:
        dist.init_process_group(backend)
        rank = dist.get_rank()
        model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(batch, 512)
    times = []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        times.append((time.perf_counter() - start) * 1e3)
    if rank == 0:
        out.write_text(str(statistics.median(times[WARM_UP:])))
    if backend != OWN:
        dist.destroy_process_group()


def one_job(backend: str, batch: int, steps: int, out: Path) -> float:
    """Milliseconds of a step."""
    words = [__file__, "--on-rank", backend, "--batch", str(batch), "--steps", str(steps), "--out", str(out)]
    if backend != "gloo":
        subprocess.run(
            [sys.executable, "-m", "mpdist", "run", "-n", str(RANKS), *words], check=True, env=rank_environ()
        )
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
        ranks = [
            subprocess.Popen([sys.executable, *words], env=rank_environ() | common | {"RANK": str(rank)})
            for rank in range(RANKS)
        ]
        statuses = [rank.wait() for rank in ranks]
        if any(statuses):
            raise SystemExit(f"a rank of {backend} has failed")
    return float(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--launches", type=positive, default=5)
    parser.add_argument("--steps", type=positive, default=60)
    parser.add_argument("--json", help="append one JSON line per case to this file")
    parser.add_argument("--on-rank", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_rank:
        on_rank(options.on_rank, options.batch, options.steps, options.out)
        return
    require_output(options.json)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "milliseconds")
        for batch, targets in BATCHES.items():
            times: dict[str, list[float]] = {**{backend: [] for backend in targets}, "gloo": []}
            for _ in range(options.launches):
                for backend, each in times.items():
                    each.append(one_job(backend, batch, options.steps, out))
            for backend, target in targets.items():
                case = f"DDP step, 10 M parameters, batch {batch}, {backend} and gloo alone"
                pair = times[backend], times["gloo"]
                results.append(summary(case, *pair, ranks=RANKS, mpi=mpi_here(), unit="ms", target=target))
    publish(results, options.json)


def mpi_here() -> str:
    """Without starting MPI in this process."""
    from mpdist.cli.launcher import find_launcher

    return {"mpich": "MPICH", "openmpi": "Open MPI"}[find_launcher().kind.value]


if __name__ == "__main__":
    main()
