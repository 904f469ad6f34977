"""Torch backend: torch.distributed over mpdist against gloo, both in the same processes. 2 ranks on 2 cores; 1 rank.

    python bench/torch_backend.py [--rounds 15] [--json FILE] [--only WORD]

starts itself with the environment's MPI. Every case alternates the two backends round by round after a warm-up of
both, checks its result, and prints the ratio of times beside its target.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))

from measure import Result, lines, mpi_name, positive, require_output, show, summary  # beside this script
from models import mlp

import mpdist.torch.work

KIB, MIB = 1024, 1024**2
WARM_UP = 3

Op = Callable[[Any], object]


def size_text(nbytes: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


@dataclass
class Checked:
    """A case whose result is known.

    Attributes:
        source, result: tensors.
        expected: values of equal parts of the result, if each rank's source holds its number, from 1 on.
    """

    name: str
    op: Op
    source: Tensor
    result: Tensor
    expected: list[float]


class Nothing(dist.ProcessGroup):
    """A process group in Python that does nothing."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg,arg-type]
        self.done = mpdist.torch.work.DONE  # type: ignore[attr-defined]

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self.done


class Bench:
    """Both backends of every case on this rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("mpdist")
        self.ours: Any = dist.group.WORLD
        self.theirs: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.rounds: int = options.rounds
        self.only: str = options.only
        self.results: list[Result] = []

    def run(self) -> list[Result]:
        for make in self.one_rank() if self.size == 1 else self.two_ranks():
            result = make()
            self.results.append(result)
            if self.rank == 0:
                print(f"{result.case}: {result.ratio:.2f}", file=sys.stderr, flush=True)
        return self.results

    def compare(self, case: str, op: Op, number: int, target: float, *, sides: tuple[Any, Any] | None = None) -> Result:
        """Time `op(group)` with both groups, round by round."""
        sides = sides or (self.ours, self.theirs)
        for _ in range(WARM_UP):
            for side in sides:
                self.timed(op, side, max(1, number // 4))
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(self.rounds):
            for side, each in zip(sides, times, strict=True):
                each.append(self.timed(op, side, number))
        return summary(case, *times, ranks=self.size, mpi=mpi_name(), target=target)

    def timed(self, op: Op, side: Any, number: int) -> float:
        """Microseconds of one call."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(number):
            op(side)
        return (time.perf_counter() - start) / number * 1e6

    def wanted(self, case: str, make: Callable[[], Result]) -> Iterator[Callable[[], Result]]:
        if self.only in case:
            yield make

    # ------------------------------------------------------------------ cases

    def one_rank(self) -> Iterator[Callable[[], Result]]:
        x = torch.ones(1)

        def one(group: Any) -> None:
            dist.all_reduce(x, group=group)

        yield from self.wanted(case := "one call, 1 rank / gloo", lambda: self.compare(case, one, 2000, 0.6))
        nothing: Any = Nothing()
        dist.distributed_c10d._register_pg_in_world(
            nothing, backend_name="mpdist", store=None, group_name="nothing", backend_config="cpu:mpdist"
        )
        dist.distributed_c10d._world.pg_group_ranks[nothing] = {0: 0}
        yield from self.wanted(
            other := "one call, 1 rank / a group that does nothing (the difference is to be <= 10 us)",
            lambda: self.compare(other, one, 2000, 10.0, sides=(self.ours, nothing)),
        )

    def two_ranks(self) -> Iterator[Callable[[], Result]]:
        for nbytes, number, target in (
            (4, 1000, 0.3), (4 * KIB, 500, 0.15), (64 * KIB, 300, 0.15), (MIB, 50, 0.25), (25 * MIB, 3, 0.35)
        ):  # fmt: skip
            yield from self.all_reduce(nbytes, torch.float32, number, target)
        yield from self.all_reduce(25 * MIB, torch.bfloat16, 3, 0.35)
        for nbytes, number in ((4, 500), (4 * KIB, 300), (64 * KIB, 200), (MIB, 50), (25 * MIB, 3)):
            yield from self.all_reduce(nbytes, torch.float32, number, 0.5, is_async=True)
        for move in self.moves(16 * MIB):
            yield from self.wanted(move.name, lambda move=move: self.checked(move, 4, 0.4))  # type: ignore[misc]
        for batch, target in ((64, 0.85), (8, 0.65)):
            yield from self.wanted(
                case := f"DDP step, 10 M parameters, batch {batch}",
                lambda case=case, batch=batch, target=target: self.ddp(case, batch, target),  # type: ignore[misc]
            )
        yield from self.wanted(case := "FSDP2 step, small transformer", lambda: self.fsdp(case, 0.85))

    def all_reduce(
        self, nbytes: int, dtype: torch.dtype, number: int, target: float, *, is_async: bool = False
    ) -> Iterator[Callable[[], Result]]:
        name = str(dtype).removeprefix("torch.")
        case = f"all_reduce {name} {size_text(nbytes)}{', async + wait' * is_async}"
        x = torch.zeros(nbytes // dtype.itemsize, dtype=dtype)

        def op(group: Any) -> None:
            if is_async:
                dist.all_reduce(x, group=group, async_op=True).wait()
            else:
                dist.all_reduce(x, group=group)

        total = self.size * (self.size + 1) / 2
        yield from self.wanted(case, lambda: self.checked(Checked(case, op, x, x, [total]), number, target))

    def checked(self, case: Checked, number: int, target: float) -> Result:
        """Compare the times, and check the results of both groups before and after."""
        self.check(case)
        result = self.compare(case.name, case.op, number, target)
        self.check(case)
        return result

    def check(self, case: Checked) -> None:
        """Each rank gives its number, from 1 on. Afterwards the arrays are zero: sums stay so."""
        for group in (self.ours, self.theirs):
            case.result.fill_(-1)
            case.source.fill_(self.rank + 1)
            case.op(group)
            parts = case.result.chunk(len(case.expected))
            assert all(part.eq(value).all() for part, value in zip(parts, case.expected, strict=True)), case.name
            case.source.zero_()
            case.result.zero_()

    def moves(self, nbytes: int) -> Iterator[Checked]:
        whole, part = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4 // self.size)
        text = size_text(nbytes)
        other = torch.zeros_like(whole)
        # torch 2.13 renamed them
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        each = [1.0 + rank for rank in range(self.size)]
        for name, op, source, result, expected in (
            ("broadcast", lambda group: dist.broadcast(whole, 0, group=group), whole, whole, [1.0]),
            ("all_gather_into_tensor", lambda group: all_gather(whole, part, group=group), part, whole, each),
            ("reduce_scatter_tensor", lambda group: reduce_scatter(part, whole, group=group), whole, part, [sum(each)]),
            ("all_to_all_single", lambda group: dist.all_to_all_single(other, whole, group=group), whole, other, each),
        ):
            yield Checked(f"{name} {text}", op, source, result, expected)

    def ddp(self, case: str, batch: int, target: float) -> Result:
        def model(group: Any) -> nn.Module:
            torch.manual_seed(0)
            return DistributedDataParallel(mlp(), process_group=group)

        return self.training(case, model, torch.randn(batch, 512), 2, target)

    def fsdp(self, case: str, target: float) -> Result:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        def model(group: Any) -> nn.Module:
            torch.manual_seed(0)
            layers = [nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(4)]
            mesh = DeviceMesh.from_group(group, "cpu")
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            return fully_shard(nn.Sequential(*layers), mesh=mesh)

        return self.training(case, model, torch.randn(4, 32, 256), 2, target)

    def training(self, case: str, make: Callable[[Any], nn.Module], x: Tensor, number: int, target: float) -> Result:
        models = {id(group): make(group) for group in (self.ours, self.theirs)}
        optimizers = {key: torch.optim.SGD(model.parameters(), lr=1e-3) for key, model in models.items()}

        def step(group: Any) -> None:
            optimizers[id(group)].zero_grad()
            models[id(group)](x).pow(2).mean().backward()
            optimizers[id(group)].step()

        return self.compare(case, step, number, target)


def on_rank(options: argparse.Namespace) -> None:
    bench = Bench(options)
    results = bench.run()
    if bench.rank == 0:
        with open(options.out, "a") as out:
            out.write(lines(results))
    dist.destroy_process_group()


def launch(ranks: int, options: argparse.Namespace, out: str) -> None:
    words = ["--on-rank", "--out", out, "--rounds", str(options.rounds), "--only", options.only]
    command = [sys.executable, "-m", "mpdist", "run", "-n", str(ranks), __file__, *words]
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--json", help="write one JSON object a line here, too")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--on-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_rank:
        on_rank(options)
        return
    import json

    require_output(options.json)
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "results")
        for ranks in (2, 1):
            launch(ranks, options, out)
        text = Path(out).read_text()
    results = [Result(**json.loads(line)) for line in text.splitlines()]
    if not results:
        raise SystemExit(f"--only {options.only!r} is in the name of no case")
    show(results)
    if options.json:
        Path(options.json).write_text(text)


if __name__ == "__main__":
    main()
