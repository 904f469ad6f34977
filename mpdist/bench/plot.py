"""Plot: time and bus bandwidth against size, all contenders in one picture.

Made to be read without a text beside it: the legend names every
line, each pair of axes says which way is better, the footer where and when.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdist.bench.case import GLOO, OURS, RESIDENT, TUNED, Case, Line
from mpdist.bench.operations import OPERATIONS
from mpdist.bench.sizes import size_text, time_text
from mpdist.errors import Unavailable, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACROSS = 3
"""Operations side by side."""
WIDTH, ROW_HEIGHT = 5.6, 3.3
"""Inches of one pair of axes."""
MARGIN = 1.3
"""Inches of title, legend and footer."""

SIZE = "size: largest array of a rank"
MANY_TICKS = 6
"""Of sizes, among which there is no room for both ends."""
FEW_TIMES = 1000
"""Between times less far apart, powers of ten alone would be few ticks, or none."""


class Style:
    """How one contender is drawn, and what it is called."""

    def __init__(self, name: str, color: str, marker: str, width: float, dashes: str = "-") -> None:
        self.name = name
        self.look: dict[str, Any] = {
            "color": color,
            "marker": marker,
            "linewidth": width,
            "linestyle": dashes,
            "markersize": 5,
        }
        self.color = color


BEST_RAW = "best raw"
# Colours that colour-blind readers tell apart (Okabe and Ito); the markers differ as well.
STYLES = {
    RESIDENT: Style("mpdist, comm.empty memory", "#009E73", "D", 2.4),
    OURS: Style("mpdist, any array", "#0072B2", "o", 2.4),
    BEST_RAW: Style("mpi4py, its fastest call", "#D55E00", "s", 1.6, "--"),
    GLOO: Style("torch gloo", "#7F7F7F", "^", 1.6, ":"),
}


def points(cases: Sequence[Case], name: str) -> list[tuple[int, Line]]:
    """Sizes and lines of one contender, or of the fastest of mpi4py's at each size."""
    found = []
    for case in sorted(cases, key=lambda case: case.nbytes):
        key = case.best_raw() if name == BEST_RAW else name
        if key is not None and key in case.lines:
            found.append((case.nbytes, case.lines[key]))
    return found


def with_suffix(path: str) -> str:
    """The picture's file as it will be called: what has no suffix becomes a PNG."""
    return path if Path(path).suffix else f"{path}.png"


def require(ops: Sequence[str], path: str | Path) -> None:
    """Find out whether `plot` will work for these operations.

    Raises:
        Unavailable: matplotlib is not installed.
        UsageError: there is nothing to plot, or pictures of this kind can't be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ModuleNotFoundError:
        raise Unavailable("mpdist bench plots with matplotlib: pip install 'mpdist[bench]'") from None
    kinds = sorted(FigureCanvasAgg.get_supported_filetypes())
    if Path(path).suffix[1:].lower() not in kinds:
        raise UsageError(
            f"mpdist bench --plot {path}: a picture of this kind can't be written, only {', '.join(kinds)}"
        )
    if not _with_sizes(ops):
        raise UsageError("mpdist bench --plot: a barrier has no size to plot against; name other operations")


def _with_sizes(ops: Sequence[str]) -> list[str]:
    return [op for op in dict.fromkeys(ops) if OPERATIONS[op].has_size]


def plot(cases: Sequence[Case], path: str | Path) -> None:
    """Write the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ops = _with_sizes([case.op for case in cases])
    rows, columns, places = places_of(len(ops))
    height = ROW_HEIGHT * rows + MARGIN
    figure = Figure(figsize=(WIDTH * columns, height), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.4 / height, 1, 1 - MARGIN / height))  # type: ignore[union-attr, call-arg]
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for op, (upper, lower) in zip(ops, places, strict=True):
        mine = [case for case in cases if case.op == op]
        _draw_times(grid[upper], op, mine)
        _draw_bandwidths(grid[lower], mine)
        if rows == 1:
            grid[upper].set_xlabel(SIZE)
    _frame(figure, cases, grid[places[0][0]])
    figure.savefig(path, dpi=110)


Place = tuple[int, int]


def places_of(ops: int) -> tuple[int, int, list[tuple[Place, Place]]]:
    """Rows and columns, and of each operation where its time and its bandwidth are.

    The bandwidth stands below the time; beside it if there is only one operation.
    """
    if ops == 1:
        return 1, 2, [((0, 0), (0, 1))]
    across = min(ACROSS, ops)
    places = [((2 * (i // across), i % across), (2 * (i // across) + 1, i % across)) for i in range(ops)]
    return 2 * -(-ops // across), across, places


def _draw_times(axes: Axes, op: str, cases: Sequence[Case]) -> None:
    from matplotlib.ticker import LogLocator

    for name, style in STYLES.items():
        found = points(cases, name)
        if found:
            sizes = [size for size, _ in found]
            axes.plot(sizes, [line.median for _, line in found], label=style.name, **style.look)
            axes.fill_between(
                sizes,
                [line.median for _, line in found],
                [line.p95 for _, line in found],
                color=style.color,
                alpha=0.12,
            )
    axes.set_yscale("log")
    axes.set_title(op, fontsize=15, fontweight="bold", loc="left")
    axes.set_title("lower is better", fontsize=9, color="0.4", loc="right")
    axes.set_ylabel("time")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > FEW_TIMES else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: time_text(value))
    _size_axis(axes, cases)


def _draw_bandwidths(axes: Axes, cases: Sequence[Case]) -> None:
    for name, style in STYLES.items():
        found = points(cases, name)
        if found:
            axes.plot([size for size, _ in found], [line.bus_bandwidth / 1e9 for _, line in found], **style.look)
    axes.set_ylim(bottom=0)
    axes.set_title("higher is better", fontsize=9, color="0.4", loc="right")
    axes.set_ylabel("bus bandwidth, GB/s")
    axes.set_xlabel(SIZE)
    _size_axis(axes, cases)


def _size_axis(axes: Axes, cases: Sequence[Case]) -> None:
    axes.set_axis_on()
    axes.set_xscale("log", base=2)
    sizes = sorted(case.nbytes for case in cases)
    axes.set_xticks(size_ticks(sizes[0], sizes[-1]))
    axes.xaxis.set_major_formatter(lambda value, _: size_text(round(value)).replace(" ", "\n"))
    axes.minorticks_off()
    axes.grid(visible=True, color="0.9")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def size_ticks(first: int, last: int) -> list[int]:
    """Both ends, and powers of 16 between them as far as there is room; without the ends where there are many."""
    ticks = [64 * 16**i for i in range(8) if first <= 64 * 16**i <= last]
    if len(ticks) >= MANY_TICKS:
        return ticks
    return sorted({first, *(each for each in ticks if 4 * first <= each <= last / 4), last})


def _frame(figure: Any, cases: Sequence[Case], first: Axes) -> None:
    """Title, legend, footer."""
    case, machine = cases[0], cases[0].machine
    nodes = f"{case.nodes} nodes" if case.nodes > 1 else "one node"
    title = f"Collectives from Python: {case.ranks} ranks on {nodes}, {machine['mpi']} {machine['mpi_version']}"
    width, height = figure.get_size_inches()
    figure.text(0.15 / width, 1 - 0.12 / height, title, fontsize=16, va="top")
    handles, labels = first.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(0.05 / width, 1 - 0.42 / height),
        ncols=4, frameon=False, fontsize=11,
    )  # fmt: skip
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    footer = (
        f"{barrier_text(cases)}{machine['processor']}, {machine['usable_cores']} cores. {versions}. "
        f"{machine['date'][:10]}. Line: median; band: up to the 95th percentile. Bandwidth as nccl-tests define it."
        f"{tuned_text(cases)}"
    )
    figure.text(0.15 / width, 0.1 / height, textwrap.fill(footer, int(width * 15)), fontsize=8, color="0.35")


def tuned_text(cases: Sequence[Case]) -> str:
    """Times of another job are not told from the others by their line."""
    is_tuned = any((case.best_raw() or "").startswith(TUNED) for case in cases)
    return " Where mpi4py is faster with a tuned MPI, its time is of a job of its own." if is_tuned else ""


def barrier_text(cases: Sequence[Case]) -> str:
    """A barrier has one size, so it is told in words."""
    barrier = next((case for case in cases if case.op == "barrier"), None)
    if barrier is None:
        return ""
    found = [(style.name, points([barrier], name)) for name, style in STYLES.items() if name != RESIDENT]
    told = ", ".join(f"{name} {time_text(line[0][1].median)}" for name, line in found if line)
    return f"barrier: {told}. "
