"""Cases: one operation at one size, the times of all contenders, and where and when that was.

One JSON line each, so that two runs can be compared, and a model be fitted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpdist.bench.operations import MESSAGES_EACH_TIME, OPERATIONS
from mpdist.errors import UsageError

# Names of the contenders, and what stands before a name when the MPI was tuned.
OURS, RESIDENT = "mpdist", "mpdist, comm.empty"
RAW_NOW, RAW_LATER = "raw blocking", "raw non-blocking"
GLOO = "gloo"
TUNED = "tuned "
# What takes longer is not measured at the operation's larger sizes, where it would only take longer still.
SLOW_SECONDS = 0.3


@dataclass(frozen=True)
class Line:
    """One contender.

    Attributes:
        median, p95: seconds, over the rounds, of the slowest rank.
        algorithm_bandwidth, bus_bandwidth: bytes per second, as nccl-tests define them; 0 for a barrier.
        repetitions: in each round.
    """

    median: float
    p95: float
    algorithm_bandwidth: float
    bus_bandwidth: float
    rounds: int
    repetitions: int


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    Attributes:
        nbytes: as nccl-tests count them, see `operations`.
        lines: by name of the contender; mpdist's is always there, those that were too slow at smaller sizes are not.
        machine: versions, processor, date, and all else that tells one run from another; `tuned_variables`: those of
            the second job, in which the MPI was tuned.
    """

    op: str
    nbytes: int
    ranks: int
    nodes: int
    lines: Mapping[str, Line]
    machine: Mapping[str, Any]

    def best_raw(self, ours: str = OURS) -> str | None:
        """The fastest of mpi4py's lines, each against the line `ours` of its own job; None if there is none."""
        raw = [name for name in self.lines if is_raw(name) and beside(name, ours) in self.lines]
        return max(raw, key=lambda name: self.ratio(beside(name, ours), name), default=None)

    def ratio_to_raw(self, ours: str = OURS) -> float | None:
        """Median of `ours` over that of the fastest of mpi4py's lines, both of the same job."""
        raw = self.best_raw(ours)
        return None if raw is None else self.ratio(beside(raw, ours), raw)

    def ratio(self, ours: str, theirs: str) -> float:
        """Median of one over median of the other: smaller is better for the first."""
        return self.lines[ours].median / self.lines[theirs].median

    def slow(self) -> list[str]:
        """Contenders that take so long that they are left out at larger sizes."""
        return [name for name, line in self.lines.items() if line.median > SLOW_SECONDS]


def is_raw(name: str) -> bool:
    """Whether it is one of mpi4py's lines."""
    return name.removeprefix(TUNED) in (RAW_NOW, RAW_LATER)


def beside(name: str, ours: str) -> str:
    """The line of `ours` that took turns with this one."""
    return TUNED + ours if name.startswith(TUNED) else ours


def line_of(op: str, nbytes: int, ranks: int, seconds: Sequence[float], repetitions: int) -> Line:
    """Summary of the rounds of one contender."""
    each = np.array(seconds) / MESSAGES_EACH_TIME.get(op, 1)
    median = float(np.median(each))
    bandwidth = nbytes / median
    return Line(
        median, float(np.percentile(each, 95)), bandwidth, bandwidth * OPERATIONS[op].bus(ranks), len(each), repetitions
    )


def with_tuned(cases: Iterable[Case], tuned: Iterable[Case]) -> list[Case]:
    """The cases, with the lines of another job, whose MPI was tuned, beside their own."""
    others = {(case.op, case.nbytes): case for case in tuned}
    return [_joined(case, others.get((case.op, case.nbytes))) for case in cases]


def _joined(case: Case, tuned: Case | None) -> Case:
    if tuned is None:
        return case
    lines = {TUNED + name: line for name, line in tuned.lines.items()}
    machine = {**case.machine, "tuned_variables": tuned.machine["variables"]}
    return replace(case, lines={**case.lines, **lines}, machine=machine)


def to_json(case: Case) -> str:
    """One line, without its end."""
    return json.dumps(asdict(case))


def from_json(text: str) -> Case:
    """The case of one line.

    Raises:
        UsageError: it is no such line.
    """
    try:
        record = json.loads(text)
        lines = {name: Line(**line) for name, line in record.pop("lines").items()}
        return Case(lines=lines, **record)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"not a line of `mpdist bench --json`: {text[:80]!r} ({error})") from error


def read(path: str | Path) -> list[Case]:
    """All cases of a file."""
    with open(path, encoding="utf-8") as file:
        return [from_json(text) for text in file if text.strip()]


def append(path: str | Path, cases: Iterable[Case]) -> None:
    """Add cases to a file, one line each."""
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(f"{to_json(case)}\n" for case in cases)
