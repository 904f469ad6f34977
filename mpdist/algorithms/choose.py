"""Choose: which algorithm a collective takes; the same answer on every rank.

It depends only on what is equal on all ranks: the operation, the size, where the
ranks are, and a table of thresholds that rank 0 reads at start. Whether an array
lies in shared memory differs between ranks, so it decides nothing here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from mpdist.errors import UsageError

VERSION = 1
"""Of the file of thresholds."""
NO_TABLES = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What comes of reading a file that is another."""

Table = dict[str, Any]


class Algorithm(Enum):
    """How a collective is done."""

    NATIVE = "native"
    """MPI's own call."""
    SHARED = "shared"
    """Through memory that the ranks of the node map."""
    HIERARCHICAL = "hierarchical"
    """Shared memory within each node, MPI between them."""


NEVER = sys.maxsize
KIB = 1024
BUSY_BYTES = 32 * 1024 * KIB
"""From here on MPI's call would hold the event loop for 3 ms and more, and is not faster any more."""

# Bytes of one rank's input from which on an algorithm is faster than MPI's own call. Measured by
# `mpdist bench --tune`, 2 ranks on 2 cores; operations that are missing always take MPI's call.
SHARED_FROM: dict[str, dict[str, int]] = {
    "mpich": {
        "barrier": 0,
        "all_reduce": 8 * KIB,
        "reduce": 256 * KIB,
        "reduce_scatter": 16 * KIB,
        "broadcast": 512 * KIB,
        "gather": 512 * KIB,
        "scatter": 256 * KIB,
        "all_gather": BUSY_BYTES,
        "all_to_all": BUSY_BYTES,
    },
    "openmpi": {
        "barrier": 0,
        "all_reduce": 4 * KIB,
        "reduce": 64 * KIB,
        "reduce_scatter": 8 * KIB,
        "broadcast": 512 * KIB,
        "gather": 512 * KIB,
        "scatter": 256 * KIB,
        "all_gather": BUSY_BYTES,
        "all_to_all": BUSY_BYTES,
    },
}
# The same where a node has more ranks than cores: there each exchange waits for others to get a core, and shared memory
# takes one of them. 4 ranks on 2 cores.
SHARED_FROM_ON_SCARCE_CORES: dict[str, int] = {"all_reduce": 0, "reduce_scatter": 0}
# Between nodes the link decides: each byte crosses it once instead of once for each rank. Between 2 hosts with 2 ranks
# each MPI's own call takes a third to three quarters of the time at 64 KiB, and mostly more at 256 KiB.
HIERARCHICAL_FROM: dict[str, int] = {
    "barrier": 0,
    "all_reduce": 128 * KIB,
    "reduce": 128 * KIB,
    "reduce_scatter": 128 * KIB,
    "all_gather": 64 * KIB,
    "broadcast": 128 * KIB,
}
# With one rank on each node: from how many bytes and nodes on the link is used better than by MPI's own call.
SPREAD_FROM: dict[str, tuple[int, int]] = {
    "all_reduce": (256 * KIB, 2),
    "reduce": (256 * KIB, 3),
    "reduce_scatter": (256 * KIB, 2),
    "broadcast": (512 * KIB, 3),
    "all_gather": (256 * KIB, 3),
    "all_to_all": (1024 * KIB, 3),
}
OPERATIONS = tuple(SHARED_FROM["mpich"])

# By which name the size is known from which on a reduction takes another algorithm.
PLAIN = {"all_reduce": "all_reduce", "reduce_scatter": "reduce_scatter"}
# Where MPI's call is not all, shared memory from 0 bytes on: one round of it does all, and what comes before and after
# MPI's call (integers in the place of numbers to be compared, for example) takes longer than the call.
INDIRECT = {op: f"indirect {op}" for op in PLAIN}
# With premul_sum shared memory takes several steps, which is too much for few bytes.
SCALED = {op: f"scaled {op}" for op in PLAIN}
SCALED_FROM = 8 * KIB
# An all_reduce of a few numbers is faster than MPI's call wherever all ranks share memory.
FEW = "few numbers"


@dataclass(frozen=True)
class Layout:
    """Where the ranks of a communicator are.

    Attributes:
        size: number of ranks.
        nodes: number of nodes that they are on.
        is_sharing: whether the ranks of each node can share memory.
    """

    size: int
    nodes: int
    is_sharing: bool

    @classmethod
    def of(cls, nodes: Sequence[int], is_sharing: bool) -> Layout:
        """`nodes` says for each rank which node it is on."""
        return cls(len(nodes), len(set(nodes)), is_sharing)


@dataclass(frozen=True)
class Thresholds:
    """From which size on an operation takes which algorithm.

    Attributes:
        forced: the only algorithm to be used where it exists; None: by size.
        is_given_devices: whether MPI may be given the memory of GPUs, by its own calls; then one rank on each node
            leaves everything to them.
        cut: sizes of a measured table that do not hold, by operation: shared memory is taken from BUSY_BYTES on.
    """

    shared: Mapping[str, int] = field(default_factory=dict)
    hierarchical: Mapping[str, int] = field(default_factory=dict)
    forced: Algorithm | None = None
    is_given_devices: bool = False
    cut: Mapping[str, int] = field(default_factory=dict)

    @property
    def note(self) -> str:
        """What a user must be told of the sizes that do not hold; empty if all do."""
        if not self.cut or self.forced is not None:
            return ""
        return (
            f"the table of thresholds (`mpdist info` names its file) leaves {', '.join(self.cut)} of "
            f"{BUSY_BYTES // KIB**2} MiB and more to MPI's own call, which would hold the event loop; on one node "
            "shared memory is taken nevertheless (MPDIST_ALGORITHM=native forbids it, for all sizes)"
        )


def choose(op: str, nbytes: int, layout: Layout, thresholds: Thresholds) -> Algorithm:
    """Pick the algorithm for one collective of `nbytes` a rank; the same answer on every rank."""
    start = starts(op, layout, thresholds)
    return start[1] if start is not None and nbytes >= start[0] else Algorithm.NATIVE


def starts(op: str, layout: Layout, thresholds: Thresholds) -> tuple[int, Algorithm] | None:
    """From how many bytes on which algorithm takes the place of MPI's own call; None: never."""
    if layout.size == 1 or not layout.is_sharing or thresholds.forced is Algorithm.NATIVE:
        return None
    if layout.nodes == layout.size:
        least, nodes = SPREAD_FROM.get(op, (0, sys.maxsize))
        if layout.nodes < nodes or thresholds.is_given_devices or thresholds.forced is Algorithm.SHARED:
            return None
        start = 0 if thresholds.forced is not None else max(least, thresholds.hierarchical.get(op, 0))
        return start, Algorithm.HIERARCHICAL
    algorithm = Algorithm.SHARED if layout.nodes == 1 else Algorithm.HIERARCHICAL
    if op not in (SHARED_FROM["mpich"] if algorithm is Algorithm.SHARED else HIERARCHICAL_FROM):
        return None
    if thresholds.forced is not None:
        return 0, algorithm
    table = thresholds.shared if algorithm is Algorithm.SHARED else thresholds.hierarchical
    return (table[op], algorithm) if op in table else None


def sizes(layout: Layout, thresholds: Thresholds) -> tuple[Algorithm, dict[str, int]]:
    """Which algorithm takes the place of MPI's own calls, and from how many bytes on; NEVER: for no size.

    Returns:
        It, and the sizes by name: operations, what PLAIN, INDIRECT and SCALED call them, and FEW.
    """
    found = {op: starts(op, layout, thresholds) for op in OPERATIONS}
    algorithm = next((start[1] for start in found.values() if start is not None), Algorithm.SHARED)
    start_of = {op: NEVER if start is None else start[0] for op, start in found.items()}
    is_shared = found["all_reduce"] is not None and algorithm is Algorithm.SHARED
    indirect = {INDIRECT[op]: 0 if is_shared else start_of[op] for op in PLAIN}
    few = {FEW: 0 if is_shared else NEVER}
    least = SCALED_FROM if is_shared and thresholds.forced is None else 0
    return algorithm, start_of | indirect | few | {SCALED[op]: max(start_of[op], least) for op in PLAIN}


def read_thresholds(forced: str, path: str, mpi: str, ranks: int, cores: int) -> Thresholds:
    """The thresholds of this machine: measured ones where there are, else those of the table above.

    Args:
        forced: "auto", or an Algorithm's value.
        path: of a file that `mpdist bench --tune` has written; empty: where it writes by itself.
        mpi: family of the MPI.
        ranks: on the largest node.
        cores: of it.

    Raises:
        UsageError: the file is asked for and cannot be read.
    """
    kind = mpi, ranks, cores
    tables = (table for table in read_tables(path) if (table["mpi"], table["ranks"], table["cores"]) == kind)
    measured = next((_by_algorithm(table["thresholds"]) for table in tables), {})
    known = built_in(mpi, ranks, cores)
    shared = {**known["shared"], **measured.get("shared", {})}
    return Thresholds(
        {op: min(nbytes, BUSY_BYTES) for op, nbytes in shared.items()},
        {**known["hierarchical"], **measured.get("hierarchical", {})},
        None if forced == "auto" else Algorithm(forced),
        cut={op: nbytes for op, nbytes in shared.items() if nbytes > BUSY_BYTES},
    )


def built_in(mpi: str, ranks: int, cores: int) -> dict[str, Mapping[str, int]]:
    """The tables above for this family of MPI, and so many ranks and cores of a node, by algorithm."""
    scarce = SHARED_FROM_ON_SCARCE_CORES if ranks > cores else {}
    return {"shared": {**SHARED_FROM.get(mpi, SHARED_FROM["mpich"]), **scarce}, "hierarchical": HIERARCHICAL_FROM}


def default_path() -> Path:
    """Where `mpdist bench --tune` writes."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "mpdist" / "tuning.json"


def read_tables(path: str) -> list[Table]:
    """All tables that a start reads.

    Args:
        path: as of `read_thresholds`.

    Raises:
        UsageError: the file is asked for, or there, and cannot be read.
    """
    file = Path(path) if path else _own_file()
    if file is None:
        return []
    if os.path.exists(file) and not os.path.isfile(file):
        raise UsageError(
            f"MPDIST_TUNING is {file}, which is no regular file: name one that `mpdist bench --tune` has written"
        )
    try:
        return tables_of(file)
    except NO_TABLES as error:
        raise UsageError(
            f"the table of thresholds {file} cannot be read ({type(error).__name__}: {error}); {_advice(file)}"
        ) from error


def _own_file() -> Path | None:
    """The file that nobody has asked for: there may be none, or no home, or one that belongs to somebody else."""
    try:
        path = default_path()
        if not path.is_file():  # a pipe would be waited for
            return None
        with path.open("rb"):
            return path
    except (OSError, RuntimeError):
        return None


def tables_of(path: Path) -> list[Table]:
    """The tables of a file; raises one of NO_TABLES if it is not what `mpdist bench --tune` writes."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if document["version"] != VERSION:
        raise ValueError(f"its version is {document['version']!r}, not {VERSION}")
    tables: list[Table] = document["tables"]
    for table in tables:
        _by_algorithm(table["thresholds"])
        if missing := {"mpi", "ranks", "cores"} - set(table):
            raise KeyError(*sorted(missing))
    return tables


def _advice(path: Path) -> str:
    if os.path.exists(path):  # Path.exists raises where a folder may not be searched
        return "remove it; after that `mpdist bench --tune` may write a new one"
    return "unset MPDIST_TUNING, or write the file by `mpdist bench --tune`"


def _by_algorithm(thresholds: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """{"all_reduce": {"shared_from": n}} as {"shared": {"all_reduce": n}}."""
    found: dict[str, dict[str, int]] = {"shared": {}, "hierarchical": {}}
    for op, row in thresholds.items():
        for algorithm, table in found.items():
            if row.get(f"{algorithm}_from") is not None:
                table[op] = int(row[f"{algorithm}_from"])
                if table[op] < 0:
                    raise ValueError(f"{algorithm}_from of {op} is {table[op]}, which is no size")
    return found
