"""Measuring: two sides alternate in one run, medians of the rounds, a ratio against its target.

The machine may be shared and its cores far apart for whole runs, so a time by
itself says little: only ratios of times from the same run are compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import numpy as np

_RANK = "MPDIST_BENCH_RANK"

Side = Callable[[int], Awaitable[float]]
"""Does something n times on this rank, and returns the seconds that it took."""


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        case: what was measured.
        ours, theirs: median over the rounds, in `unit`.
        ratio: median over the rounds of ours / theirs; None: theirs cannot be told from nothing.
        low, high: its quartiles.
        target, stretch: the ratio is to be at most this; at least, if `larger_is_better`.
    """

    case: str
    ranks: int
    mpi: str
    ours: float
    theirs: float
    unit: str
    ratio: float | None
    low: float | None
    high: float | None
    rounds: int
    target: float | None = None
    stretch: float | None = None
    larger_is_better: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the target is reached; also where there is none, or no ratio to hold against it."""
        if self.target is None or self.ratio is None:
            return True
        return self.ratio >= self.target if self.larger_is_better else self.ratio <= self.target


def summary(
    case: str,
    ours: list[float],
    theirs: list[float],
    *,
    ranks: int,
    mpi: str,
    unit: str = "us",
    target: float | None = None,
    stretch: float | None = None,
    larger_is_better: bool = False,
) -> Result:
    """Medians, and the quartiles of the ratio."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, _, high = np.percentile(ratios, [25, 50, 75])
    return Result(
        case, ranks, mpi, statistics.median(ours), statistics.median(theirs), unit,
        statistics.median(ratios), float(low), float(high), len(ratios), target, stretch, larger_is_better,
    )  # fmt: skip


def mpi_name() -> str:
    """The column of the table: `MPICH` or `Open MPI`."""
    from mpi4py import MPI

    return "MPICH" if "MPICH" in MPI.Get_library_version() else "Open MPI"


def rank_environ() -> dict[str, str]:
    """Variables of the ranks that a benchmark starts: one thread each."""
    return {**os.environ, _RANK: "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def is_rank() -> bool:
    """Whether this process is one of them, and not the one that starts them."""
    return _RANK in os.environ


def positive(text: str) -> int:
    """The type of an option that counts."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def positive_seconds(text: str) -> float:
    """The type of an option that is a time."""
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


def require(word: str, option: str, known: Iterable[str]) -> None:
    """Find out before anything is measured whether a word chooses any case; ends the process if not."""
    names = list(known)
    if not any(word in name for name in names):
        raise SystemExit(f"{option} {word!r} is in none of: {'; '.join(names)}")


def require_output(path: str | Path | None) -> None:
    """The same of whether the table can be shown, and the lines be written."""
    if find_spec("rich") is None:
        raise SystemExit("this benchmark prints with rich: pip install 'mpdist[bench]'")
    require_writable(path)


def require_writable(path: str | Path | None) -> None:
    """The same of the file that --json names, if it does; what wasn't there is not left behind."""
    if not path:
        return
    is_new = not os.path.exists(path)
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise SystemExit(f"--json {path} can't be written: {error.strerror}") from None
    if is_new:
        os.unlink(os.path.realpath(path))


def launch(script: str, ranks: int) -> None:
    """Run a script, with this process's arguments, by the environment's MPI."""
    command = [sys.executable, "-m", "mpdist", "run", "-n", str(ranks), script, *sys.argv[1:]]
    subprocess.run(command, check=True, env=rank_environ())


def publish(results: list[Result], path: str | None) -> None:
    """The table on the screen, and the lines at the end of a file."""
    show(results)
    if path:
        with open(path, "a") as file:
            file.write(lines(results))


def show(results: list[Result], stream: IO[str] | None = None) -> None:
    """The table on the screen."""
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "ranks", "mpdist", "other", "ratio", "quartiles", "target", "")
    for each in results:
        sign = ">=" if each.larger_is_better else "<="
        has_verdict = each.target is not None and each.ratio is not None
        verdict = "" if not has_verdict else "[green]met[/]" if each.is_met else "[red]missed[/]"
        table.add_row(
            each.case, str(each.ranks), f"{each.ours:.4g} {each.unit}", f"{each.theirs:.4g} {each.unit}",
            "-" if each.ratio is None else f"{each.ratio:.2f}",
            "" if each.ratio is None else f"{each.low:.2f} - {each.high:.2f}",
            "" if each.target is None else f"{sign} {each.target:g}", verdict,
        )  # fmt: skip
    Console(file=stream, width=140).print(table)


def lines(results: list[Result]) -> str:
    """One JSON object a line, so that two runs can be compared."""
    return "".join(json.dumps(asdict(each)) + "\n" for each in results)
