"""Table: the cases on the screen."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import IO

from mpdist.bench.case import GLOO, OURS, RESIDENT, Case, Line
from mpdist.bench.sizes import size_text, time_text
from mpdist.errors import Unavailable

GIGA = 1e9
WIDTH = 112
"""Columns of the screen that no figure is cut at; a narrower terminal wraps the lines."""

COLUMNS = (
    *("size", "mpdist", "p95", "comm.\nempty", "mpi4py", "gloo"),
    *("mpdist /\nmpi4py", "empty /\nmpi4py", "mpdist /\ngloo", "GB/s", "bus\nGB/s", "mpi4py's"),
)


def require() -> None:
    """Find out whether `show` will work.

    Raises:
        Unavailable: rich is not installed.
    """
    try:
        importlib.import_module("rich.table")
    except ModuleNotFoundError:
        raise Unavailable("mpdist bench prints with rich: pip install 'mpdist[bench]'") from None


def show(cases: Sequence[Case], stream: IO[str] | None = None) -> None:
    """Print a row for each case."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title(cases), caption=CAPTION, box=SIMPLE_HEAD, padding=(0, 0), show_edge=False)
    table.title_justify = table.caption_justify = "left"
    table.add_column("operation", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True, vertical="bottom")
    previous = None
    for case in cases:
        if previous not in (None, case.op):
            table.add_section()
        table.add_row(case.op if case.op != previous else "", size_text(case.nbytes) if case.nbytes else "", *row(case))
        previous = case.op
    console = Console(file=stream)
    console.width = max(console.width, WIDTH)
    console.print(table)


CAPTION = (
    "Medians of the rounds, of the slowest rank; p95 of mpdist's. mpi4py: its fastest call, blocking or not, MPI tuned "
    "or not. Ratios are of times of one job: below 1 mpdist is faster. GB/s is size / time, bus GB/s what nccl-tests "
    "call busbw."
)


def title(cases: Sequence[Case]) -> str:
    """Where, on what and when."""
    if not cases:
        return "no cases"
    case, machine = cases[0], cases[0].machine
    nodes = f" on {case.nodes} nodes" if case.nodes > 1 else ""
    pins = ", ".join("-" if core is None else str(core) for core in machine["pinned_to"])
    return (
        f"{case.ranks} ranks{nodes}, pinned to cores {pins} of {machine['usable_cores']}, {machine['processor']}; "
        f"{machine['mpi']} {machine['mpi_version']}, mpdist {machine['versions']['mpdist']}, {machine['date']}"
    )


def row(case: Case) -> list[str]:
    """The cells of one case, from mpdist's time on."""
    lines, raw = case.lines, case.best_raw()
    best = lines[raw] if raw else None
    ours, resident, gloo = lines[OURS], lines.get(RESIDENT), lines.get(GLOO)
    return [
        time_text(ours.median),
        time_text(ours.p95),
        _time(resident),
        _time(best),
        _time(gloo),
        _ratio(case.ratio_to_raw(OURS)),
        _ratio(case.ratio_to_raw(RESIDENT)),
        _ratio(case.ratio(OURS, GLOO) if gloo else None),
        _bandwidth(ours.algorithm_bandwidth),
        _bandwidth(ours.bus_bandwidth),
        _bandwidth(best.bus_bandwidth) if best else "",
    ]


def _time(line: Line | None) -> str:
    return time_text(line.median) if line else ""


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3g}"


def _bandwidth(bytes_per_second: float) -> str:
    gigabytes = bytes_per_second / GIGA
    return "" if not gigabytes else f"{gigabytes:.1f}" if gigabytes >= 10 else f"{gigabytes:.3f}"
