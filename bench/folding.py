"""Folding: the speed of what one rank does with its share of a collective in shared memory.

Measures Folder.fold on one core, from memory (8 Mi elements) and from cache
(64 Ki elements), against NumPy doing the same work in float32: np.add of as many
elements for a fold, np.copyto for one source. Both sides alternate; the best of
the rounds counts, as others may use the machine. Runs without MPI:

    python bench/folding.py [--torch]

Without --torch the 16-bit types are computed in NumPy alone. Prints a line per
case: ms per call, GB/s of sources and destinations, ratio of the times.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from measure import positive  # beside this script

from mpdist.memory import BY_NAME, Element, Folder, as_op, narrow_into

COUNTS = {"memory": 8 << 20, "cache": 64 << 10}
# (element, op, sources, destinations)
CASES = [
    ("float32", "sum", 2, 1), ("float32", "sum", 2, 2), ("float32", "sum", 4, 1), ("float32", "avg", 2, 1),
    ("float64", "sum", 2, 1), ("int32", "max", 3, 2), ("complex64", "avg", 2, 1),
    ("bfloat16", "sum", 2, 1), ("bfloat16", "sum", 2, 2), ("bfloat16", "avg", 2, 1), ("bfloat16", "sum", 4, 1),
    ("float16", "sum", 2, 1), ("float16", "avg", 2, 1), ("float16", "avg", 3, 1), ("float16", "sum", 4, 1),
]  # fmt: skip
TARGETS = {("bfloat16", "sum", 2, 1): 1.0, ("float32", "sum", 2, 1): 1.05}


def stored(element: Element, count: int, seed: int) -> np.ndarray:
    """Random values between -1 and 1, as a gradient might have."""
    values = np.random.default_rng(seed).uniform(-1, 1, count).astype(np.float32)
    if not element.is_half:
        return (values * 1000).astype(element.storage)
    out = np.empty(count, element.storage)
    narrow_into(values, out, element)
    return out


def seconds(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def compare(ours: Callable[[], object], theirs: Callable[[], object], count: int, rounds: int) -> tuple[float, float]:
    """The best time of each, alternating."""
    repeats = max(1, (1 << 20) // count)
    times = [(seconds(ours, repeats), seconds(theirs, repeats)) for _ in range(rounds)]
    return min(a for a, _ in times), min(b for _, b in times)


def measure(name: str, op: str, sources: int, outs: int, where: str, rounds: int) -> dict[str, object]:
    element, count = BY_NAME[name], COUNTS[where]
    xs = [stored(element, count, seed) for seed in range(sources)]
    results = [np.empty_like(xs[0]) for _ in range(outs)]
    a, b, c = (np.ones(count, np.float32) for _ in range(3))
    folder = Folder(as_op(op), element, sources)
    ours, theirs = compare(lambda: folder.fold(xs, results), lambda: np.add(a, b, out=c), count, rounds)
    moved = (sources + outs) * xs[0].nbytes
    return {
        "case": f"{op} of {sources} {name} to {outs}, from {where}", "ms": ours * 1e3, "GB/s": moved / ours / 1e9,
        "np.add float32 ms": theirs * 1e3, "ratio": ours / theirs, "target": TARGETS.get((name, op, sources, outs)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--torch", action="store_true", help="load torch first, so that its kernels are used")
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    if arguments.torch:
        import torch  # noqa: F401
    for where in COUNTS:
        for case in CASES:
            row = measure(*case, where, arguments.rounds)
            if arguments.json:
                print(json.dumps(row | {"torch": arguments.torch}))
                continue
            print(
                f"{row['case']:40s} {row['ms']:8.3f} ms {row['GB/s']:6.1f} GB/s {row['ratio']:6.2f} x np.add float32",
                end="",
            )
            print("" if row["target"] is None else f"  (target {row['target']})")


if __name__ == "__main__":
    main()
