"""Data-parallel steps: mpdist's DistributedDataParallel, torch's over gloo, torch's over mpdist's backend.

Run on 2 ranks: `mpirun -n 2 python bench/ddp.py`. Each rank computes with one thread. All sides hold the same model
and take turns, one step each in every round; times are medians over the rounds of the slower rank. `exposed` is a
step's time without that of a step with a barrier in the place of averaging. Options: --rounds, --models, --json.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel

import mpdist
from mpdist.torch import DistributedDataParallel


class Case(NamedTuple):
    """A model, and a function from a seed to a batch."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]


def mlp() -> nn.Module:
    """10 million parameters."""
    widths = [512, 1536, 1536, 1536, 1536, 10]
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Block(nn.Module):
    """Two convolutions beside a shortcut, as in ResNet-18."""

    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(),
            nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b),
        )  # fmt: skip
        is_same = stride == 1 and a == b
        self.shortcut = nn.Identity() if is_same else nn.Sequential(nn.Conv2d(a, b, 1, stride), nn.BatchNorm2d(b))

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.shortcut(x)).relu()


def resnet() -> nn.Module:
    """Like ResNet-18, for pictures of 32 x 32."""
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [Block(a, b, 1 if a == b else 2) for a, b in pairwise(widths)]
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Transformer(nn.Module):
    """4 layers, width 256, context 128."""

    def __init__(self, symbols: int = 96) -> None:
        super().__init__()
        self.words = nn.Embedding(symbols, 256)
        self.places = nn.Parameter(torch.zeros(128, 256))
        layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = nn.Linear(256, symbols)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.words(x) + self.places)).flatten(0, 1)


def tiny() -> nn.Module:
    """300 small parameters."""
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(150)))


def vectors(size: int, inputs: int, outputs: int = 10) -> Callable[[int], tuple[Tensor, Tensor]]:
    def batch(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(size, inputs, generator=generator), torch.randint(outputs, (size,), generator=generator)

    return batch


def pictures(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 3, 32, 32, generator=generator), torch.randint(10, (16,), generator=generator)


def text(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(96, (8, 128), generator=generator), torch.randint(96, (1024,), generator=generator)


CASES = {
    "MLP, batch 64": Case(mlp, vectors(64, 512)),
    "MLP, batch 8": Case(mlp, vectors(8, 512)),
    "ResNet-18-like, batch 16": Case(resnet, pictures),
    "transformer, batch 8": Case(Transformer, text),
    "300 tiny parameters": Case(tiny, vectors(8, 16, 16)),
}
STEP_TARGETS = {"MLP, batch 64": 0.75, "MLP, batch 8": 0.55}
EXPOSED, OVER_BACKEND, TINY = 0.25, 0.7, 0.3


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


def sides_of(case: Case, comm: mpdist.Communicator, groups: dict[str, Any], is_tiny: bool) -> dict[str, Side]:
    """Each with a copy of the same model."""
    torch.manual_seed(0)
    module = case.make()
    ours = copy.deepcopy(module)
    sides = {"mpdist": Side(DistributedDataParallel(ours, comm), ours)}
    for name, group in groups.items():
        theirs = copy.deepcopy(module)
        sides[name] = Side(TorchDataParallel(theirs, process_group=group, gradient_as_bucket_view=True), theirs)
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
    """Seconds of each side in each round, of the slower rank."""
    batches = [case.batch(100 * comm.rank + number) for number in range(4)]
    for number in range(6):
        for side in sides.values():
            side.step(batches[number % 4])
    for number in range(rounds):
        names = list(sides)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            comm.barrier().wait()
            sides[name].seconds.append(sides[name].step(batches[number % 4]))
    times = {}
    for name, side in sides.items():
        times[name] = np.array(side.seconds)
        comm.all_reduce(times[name], op="max").wait()
    return times


class Line(NamedTuple):
    """One line of the table."""

    case: str
    what: str
    ours_ms: float
    theirs_ms: float
    ratio: float
    target: float | None


def lines_of(name: str, times: dict[str, np.ndarray]) -> list[Line]:
    """Ratios of medians; exposed time against the step with a barrier."""
    medians = {side: 1e3 * float(statistics.median(values)) for side, values in times.items()}
    ours, barrier = medians["mpdist"], medians["barrier"]
    lines = []

    def add(what: str, a: float, b: float, target: float | None) -> None:
        lines.append(Line(name, what, a, b, a / b if b > 0 else float("nan"), target))

    for side in ("gloo", "backend"):
        if side in medians:
            add(
                f"step / torch DDP over {side}", ours, medians[side], STEP_TARGETS.get(name) if side == "gloo" else None
            )
            target = None if "tiny" in name else EXPOSED if side == "gloo" else OVER_BACKEND
            add(f"exposed / torch DDP over {side}", ours - barrier, medians[side] - barrier, target)
    if "one all_reduce each" in medians:
        add("exposed / one all_reduce each", ours - barrier, medians["one all_reduce each"] - barrier, TINY)
    add("step / step with a barrier", ours, barrier, None)
    return lines


def groups_of(comm: mpdist.Communicator) -> dict[str, Any]:
    """torch's process groups to compare with."""
    folder = tempfile.mkdtemp() if comm.rank == 0 else None
    path = Path(comm.broadcast_object(folder, src=0).wait()) / "store"
    dist.init_process_group("gloo", store=dist.FileStore(str(path), comm.size), rank=comm.rank, world_size=comm.size)
    groups = {"gloo": dist.group.WORLD}
    try:
        groups["backend"] = dist.new_group(backend="mpdist")
    except (RuntimeError, ValueError) as error:
        if comm.rank == 0:
            print(f"without torch's DDP over the backend: {error}", file=sys.stderr)
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--models", default="", help="only cases whose name has this in it")
    parser.add_argument("--json", type=Path, help="also write the lines there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    comm = mpdist.init()
    groups = groups_of(comm)
    found = []
    for name, case in CASES.items():
        if options.models not in name:
            continue
        sides = sides_of(case, comm, groups, "tiny" in name)
        times = measure(case, comm, sides, options.rounds)
        found += lines_of(name, times)
        told = sides["mpdist"].model.statistics()
        if comm.rank == 0:
            for line in [each for each in found if each.case == name]:
                met = (
                    ""
                    if line.target is None
                    else f"target {line.target:g} {'met' if line.ratio <= line.target else 'MISSED'}"
                )
                print(f"{name:26} {line.what:32} {line.ours_ms:9.2f} {line.theirs_ms:9.2f} ms {line.ratio:6.2f}  {met}")
            print(f"{name:26} {told}", flush=True)
        sides["mpdist"].model.close()
    if comm.rank == 0 and options.json:
        options.json.write_text("".join(json.dumps(line._asdict()) + "\n" for line in found))
    comm.barrier().wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
