"""Alone: steps of torch's DistributedDataParallel, each backend in processes of its own, as a user runs them.

    python bench/alone.py [--launches 5] [--steps 60] [--json FILE]

starts jobs of 2 ranks by turns: the backend mpdist under the environment's MPI, gloo without MPI, as torchrun
starts it. What the two do to a process counts here, the memory that it keeps among it; bench/torch_backend.py has
both in one.
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

from measure import publish, rank_environ, summary  # beside this script
from models import mlp

RANKS = 2
BATCHES = {64: 0.85, 8: 0.65}
WARM_UP = 10


def on_rank(backend: str, batch: int, steps: int, out: Path) -> None:
    """Train, and write the median milliseconds of a step; it ends when all ranks have taken it."""
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    torch.manual_seed(0)
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
    if dist.get_rank() == 0:
        out.write_text(str(statistics.median(times[WARM_UP:])))
    dist.destroy_process_group()


def one_job(backend: str, batch: int, steps: int, out: Path) -> float:
    """Milliseconds of a step."""
    words = [__file__, "--on-rank", backend, "--batch", str(batch), "--steps", str(steps), "--out", str(out)]
    if backend == "mpdist":
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
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", help="append one JSON line per case to this file")
    parser.add_argument("--on-rank", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_rank:
        on_rank(options.on_rank, options.batch, options.steps, options.out)
        return
    results = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "milliseconds")
        for batch, target in BATCHES.items():
            times: dict[str, list[float]] = {"mpdist": [], "gloo": []}
            for _ in range(options.launches):
                for backend, each in times.items():
                    each.append(one_job(backend, batch, options.steps, out))
            case = f"DDP step, 10 M parameters, batch {batch}, each backend alone"
            results.append(summary(case, *times.values(), ranks=RANKS, mpi=mpi_here(), unit="ms", target=target))
    publish(results, options.json)


def mpi_here() -> str:
    """Without starting MPI in this process."""
    from mpdist.cli.launcher import find_launcher

    return {"mpich": "MPICH", "openmpi": "Open MPI"}[find_launcher().kind.value]


if __name__ == "__main__":
    main()
