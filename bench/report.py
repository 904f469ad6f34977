"""Report: the JSON lines of the benchmarks of both MPIs as one table of bench/RESULTS.md.

python bench/report.py MPICH.jsonl OPENMPI.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def by_case(path: str) -> dict[tuple[str, int], Row]:
    """The lines of a file, the last one of each case."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    return {(line["case"], line["ranks"]): line for line in lines}


def cells(row: Row | None) -> str:
    """Ratio with quartiles, target, and both times."""
    if row is None:
        return "| - | - | - "
    ratio = "-" if row["ratio"] is None else f"**{row['ratio']:.2f}** ({row['low']:.2f} - {row['high']:.2f})"
    return f"| {ratio} | {verdict(row)} | {times(row)} "


def times(row: Row) -> str:
    """`143; 180 ms`."""
    ours, theirs, unit = row["ours"], row["theirs"], row["unit"]
    if unit == "us" and min(ours, theirs) >= 1000:
        ours, theirs, unit = ours / 1000, theirs / 1000, "ms"
    return f"{ours:.3g}; {theirs:.3g} {unit}"


def verdict(row: Row) -> str:
    """`<= 0.8 met`."""
    target = row.get("target")
    if target is None or row["ratio"] is None:
        return ""
    is_more = row.get("larger_is_better", False)
    is_met = row["ratio"] >= target if is_more else row["ratio"] <= target
    return f"{'>=' if is_more else '<='} {target:g} {'met' if is_met else 'missed'}"


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit((__doc__ or "").strip())
    first, second = (by_case(path) for path in sys.argv[1:])
    print("| what / against what | ranks | MPICH | target | times | Open MPI | target | times |")
    print("|---|---|---|---|---|---|---|---|")
    for case in dict.fromkeys([*first, *second]):
        print(f"| {case[0]} | {case[1]} {cells(first.get(case))}{cells(second.get(case))}|")


if __name__ == "__main__":
    main()
