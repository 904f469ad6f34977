"""Tuning: from which size on another algorithm is faster than MPI's own, and the file that says so.

Two jobs, each with one algorithm forced, are compared through what does not
change between them, mpi4py's blocking call: the machine may be faster in one job
than in the other. `algorithms/choose.py` reads the file. Everything but `load`
and `save` is pure.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpdist.algorithms.choose import BUSY_BYTES, NO_TABLES, VERSION, Table, default_path, tables_of
from mpdist.bench.case import OURS, RAW_NOW, Case
from mpdist.bench.operations import ITEM_BYTES, OPERATIONS, length
from mpdist.errors import UsageError

ANCHOR = RAW_NOW

Thresholds = dict[str, dict[str, int]]


def cut(sizes: Sequence[int], ratios: Sequence[float], known: int) -> int:
    """The size from which on to take the other algorithm.

    One noisy size must not decide: it is the cut at which the product of all
    chosen times is smallest. Times say nothing about sizes outside of those that
    were measured: there `known` holds.

    Args:
        sizes: in bytes, rising.
        ratios: time of the other algorithm / time of the first, at each size.
        known: from which size on to take it as far as is known otherwise.
    """
    best, place, total = 0.0, len(sizes), 0.0
    for i in range(len(sizes) - 1, -1, -1):
        total -= math.log(ratios[i])
        if total > best:
            best, place = total, i
    if place == len(sizes):
        return max(sizes[-1] + 1, known)
    return min(sizes[0], known) if place == 0 else sizes[place]


def input_bytes(case: Case) -> int:
    """Bytes of one rank's input, by which `choose` decides; of a scatter, whose input only the root has, a block."""
    op = OPERATIONS[case.op]
    what = op.out if case.op == "scatter" else op.x
    return length(what, case.nbytes // ITEM_BYTES, case.ranks) * ITEM_BYTES


def compare(native: Sequence[Case], other: Sequence[Case]) -> dict[str, tuple[list[int], list[float]]]:
    """For each operation the input sizes that both have, and time of the other / time of native."""
    before = {(case.op, case.nbytes): case.ratio(OURS, ANCHOR) for case in native if ANCHOR in case.lines}
    found: dict[str, tuple[list[int], list[float]]] = {}
    for case in sorted(other, key=lambda case: case.nbytes):
        if (case.op, case.nbytes) in before and ANCHOR in case.lines:
            sizes, ratios = found.setdefault(case.op, ([], []))
            sizes.append(input_bytes(case))
            ratios.append(case.ratio(OURS, ANCHOR) / before[case.op, case.nbytes])
    return found


def thresholds(
    native: Sequence[Case], others: Mapping[str, Sequence[Case]], known: Mapping[str, Mapping[str, int]]
) -> Thresholds:
    """The `thresholds` of a table.

    Args:
        others: cases measured with another algorithm forced, by its name.
        known: what holds here without a file, by algorithm and operation.
    """
    found: Thresholds = {}
    for algorithm, cases in others.items():
        for op, (sizes, ratios) in compare(native, cases).items():
            if op in known[algorithm]:
                found.setdefault(op, {})[f"{algorithm}_from"] = cut(sizes, ratios, known[algorithm][op])
    return found


def held(found: Mapping[str, Mapping[str, int]]) -> Thresholds:
    """What of it holds: within a node shared memory is taken from BUSY_BYTES on, whatever was measured."""
    return {
        op: {name: min(nbytes, BUSY_BYTES) if name == "shared_from" else nbytes for name, nbytes in row.items()}
        for op, row in found.items()
    }


def replaced(tables: Sequence[Table], new: Table) -> list[Table]:
    """The tables with the new one in place of that of its kind, whose other operations and algorithms are kept."""
    old: Table = next((table for table in tables if _kind(table) == _kind(new)), {"thresholds": {}})
    merged = {op: {**old["thresholds"].get(op, {}), **row} for op, row in new["thresholds"].items()}
    mine = {**new, "thresholds": {**old["thresholds"], **merged}}
    return [*(table for table in tables if _kind(table) != _kind(new)), mine]


def _kind(table: Table) -> tuple[object, ...]:
    return table["mpi"], table["ranks"], table["cores"]


def tuning_path(environ: Mapping[str, str]) -> Path:
    """Where the file is: MPDIST_TUNING, else among the user's settings.

    Raises:
        UsageError: no file is named, and the user has no home.
    """
    named = environ.get("MPDIST_TUNING")
    try:
        return Path(named) if named else default_path()
    except RuntimeError as error:
        raise UsageError(f"mpdist bench --tune: {error}; name the file to write by MPDIST_TUNING") from error


def require_writable(path: Path) -> None:
    """Find out whether `save` can write the file; its folder is made.

    Raises:
        UsageError: it can't.
    """
    fresh = _beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.touch()
        fresh.unlink()
    except OSError as error:
        raise UsageError(
            f"mpdist bench --tune: {path} can't be written: {error.strerror}; name another file by MPDIST_TUNING"
        ) from error


def load(path: Path) -> list[Table]:
    """The tables of a file; none if there is no file.

    Raises:
        UsageError: it is no tuning file, and is not to be overwritten.
    """
    if not os.path.exists(path):  # Path.exists raises where a folder may not be searched
        return []
    if not path.is_file():
        raise UsageError(f"mpdist bench --tune: {path} is no regular file; name another by MPDIST_TUNING")
    try:
        return tables_of(path)
    except NO_TABLES as error:
        raise UsageError(
            f"{path} is no tuning file that could be added to ({type(error).__name__}: {error}); remove it, or name "
            "another by MPDIST_TUNING"
        ) from error


def save(path: Path, tables: Sequence[Table]) -> None:
    """Write the file; whoever reads it meanwhile sees the old one or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = _beside(path)
    fresh.write_text(json.dumps({"version": VERSION, "tables": tables}, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}")
