"""Caches: how fast one core writes what another has read, and reads what it has written.

    python bench/caches.py [--rounds 100]

Two processes, each on a core of its own, pass a block of shared memory to and fro.
Where the cores share a cache, that takes little more than a copy within one core.
Where they do not, each line that is written must first be taken from the other
core, and the kernel's copies suffer least. This decides whether two ranks' private
arrays go through slots (mpdist/algorithms/shared/pace.py), and it is what the fast
and slow states of a virtual machine differ in. A block that is written in many
places by turns has left the other core's cache before a place is written again:
so rounds through slots are spread (mpdist/algorithms/shared/spread.py). Runs without MPI.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from measure import positive  # beside this script

from mpdist.transport.reach import Reach, Remote, let_others_reach

SIZES = (256 * 1024, 1024 * 1024)
SPREAD_BYTES, PLACES = 64 * 1024, (1, 2, 8, 32)


def shared(count: int, dtype: Any) -> np.ndarray:
    """Memory that a forked process has at the same address."""
    return np.frombuffer(mmap.mmap(-1, count * np.dtype(dtype).itemsize), dtype)


def steps(block: np.ndarray, role: int, other: int) -> Mapping[str, Callable[[], object]]:
    """By which means the first process writes the block, and the second reads it."""
    own, second = np.ones(block.size, np.float32), np.ones(block.size, np.float32)
    address = block.__array_interface__["data"][0]
    remote = Remote(Reach({0: other}), 0, address, block.size, block.dtype)
    if role == 0:
        return {
            "np.copyto": lambda: np.copyto(block, own),
            "np.add": lambda: np.add(own, second, out=block),
            "the kernel": lambda: remote.write(own),
        }
    return {
        "np.copyto": lambda: np.copyto(own, block),
        "np.add": lambda: np.add(own, block, out=second),
        "the kernel": lambda: remote.read_into(own),
    }


def spread(places: np.ndarray, role: int) -> Callable[[], object]:
    """The first process writes the rows in turn, the second reads them."""
    own, turn = np.ones(places.shape[1], np.float32), itertools.cycle(places)
    return lambda: np.copyto(next(turn), own) if role == 0 else np.copyto(own, next(turn))


def passed(step: Callable[[], object], flag: np.ndarray, role: int, rounds: int) -> float:
    """Median microseconds of a step that follows the other process's."""
    times = []
    for _ in range(rounds):
        while flag[0] % 2 != role:
            pass
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
        flag[0] += 1
    return float(np.median(times)) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=positive, default=100)
    rounds = parser.parse_args().rounds
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.exit(1, "caches.py: this needs two cores\n")
    let_others_reach()
    blocks = [shared(nbytes // 4, np.float32) for nbytes in SIZES]
    places = shared(max(PLACES) * SPREAD_BYTES // 4, np.float32).reshape(max(PLACES), -1)
    flag, result = shared(1, np.int64), shared(2, np.float64)
    parent = os.getpid()
    child = os.fork()
    role = 0 if child else 1
    os.sched_setaffinity(0, {cores[role]})
    cases = [
        (f"{block.nbytes // 1024} KiB, by {name}", step)
        for block in blocks
        for name, step in steps(block, role, child or parent).items()
    ]
    size = f"{SPREAD_BYTES // 1024} KiB"
    cases += [(f"{size}, in {count} places by turns", spread(places[:count], role)) for count in PLACES]
    for name, step in cases:
        result[role] = passed(step, flag, role, rounds)
        passed(lambda: None, flag, role, 2)  # after which the other's result is there
        if role == 0:
            print(f"{name:>30}: written in {result[0]:6.1f} us, read in {result[1]:6.1f} us")
    if role:
        os._exit(0)
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()
