"""Model: predicts all_reduce for any number of nodes from a few measured constants.

    python bench/model.py [FILE.jsonl ...] [--local 2] [--step 0.5]

FILEs are written by `mpdist bench --json`, where MPDIST_ALGORITHM=shared: else some
of the times are those of MPI's own calls. Without one it measures 2, 3 and 4 ranks
itself, and, with MPDIST_FAKECLUSTER naming a program that makes several hosts on
one machine, 2 hosts with 1 and with 2 ranks each. Fitted are only the runs of 2
ranks; how far off the predictions are for all others is printed, then what follows
for 2 to 1024 nodes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import costs  # beside this script
from costs import Layout, Line, Machine
from measure import positive_seconds

from mpdist.bench.case import OURS, RESIDENT, Case, read
from mpdist.bench.sizes import parse_size, size_text, time_text

# Bandwidth is the link's; alpha is an assumption: TCP through the kernel on the slow ones, RDMA on the fast one.
NETWORKS = {
    "1 Gbit/s": Line(50e-6, 8 / 1e9),
    "25 Gbit/s": Line(20e-6, 8 / 25e9),
    "200 Gbit/s": Line(3e-6, 8 / 200e9),
}
NODES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SIZES = {"1 KiB": 1024, "64 KiB": 64 * 1024, "1 MiB": 1024**2, "25 MB": 25 * 10**6, "500 MB": 500 * 10**6}
SHORT = {
    "ring": "ring",
    "recursive doubling": "doubling",
    "reduce-scatter + all-gather": "rs+ag",
    "shared memory": "shared",
    "hierarchical": "hierarch.",
}
GRADIENTS = (25 * 10**6, 500 * 10**6)
# About two thirds of a step are the backward pass, during which gradients are averaged.
HIDDEN = 2 / 3
FAKE = "MPDIST_FAKECLUSTER"
# With these mpdist takes its own algorithms for all sizes, between nodes the hierarchical ones.
FORCED = {"MPDIST_ALGORITHM": "shared"}
# Below, Python's own steps are most of the time.
SHARED_FROM = parse_size("64K")
OPS = "ping_pong,all_reduce,all_gather,reduce_scatter"


def layout_of(case: Case) -> Layout:
    return Layout(case.nodes, case.ranks // case.nodes)


def is_forced(case: Case) -> bool:
    """Whether mpdist's times are those of its own algorithms."""
    return FORCED.items() <= case.machine["variables"].items()


def points(cases: Sequence[Case], op: str, layout: Layout, name: str, least: int = 0) -> tuple[list[int], list[float]]:
    """Sizes and seconds of one contender; `raw` is the faster of mpi4py's calls."""
    found = []
    for case in cases:
        key = case.best_raw() if name == "raw" else name
        if case.op == op and layout_of(case) == layout and case.nbytes >= least and key and key in case.lines:
            found.append((case.nbytes, case.lines[key].median))
    return [size for size, _ in found], [seconds for _, seconds in found]


def fitted(cases: Sequence[Case]) -> Machine:
    """The constants, from the runs of 2 ranks; the link's from 2 nodes with 1 rank each, if there is such a run."""
    pair = Layout(1, 2)
    messages = points(cases, "ping_pong", pair, "raw")
    if len(set(messages[0])) < 2:
        raise SystemExit("no ping_pong of 2 ranks on one node, in two sizes, with mpi4py's times: --rivals raw")
    message = costs.fit_line(*messages)
    apart = points(cases, "ping_pong", Layout(2, 1), "raw")
    link = costs.fit_link(*apart) if len(set(apart[0])) > 2 else NETWORKS["1 Gbit/s"]
    columns: list[list[float]] = [[], [], []]  # sigma, mu, gamma
    measured: list[float] = []
    forced = [case for case in cases if is_forced(case)]
    for op, copied, added in (("all_gather", 1.0, 0.0), ("reduce_scatter", 0.0, 0.5), ("all_reduce", 0.5, 0.5)):
        sizes, seconds = points(forced, op, pair, RESIDENT, SHARED_FROM)
        columns[0] += [1.0] * len(sizes)
        columns[1] += [copied * size for size in sizes]
        columns[2] += [added * size for size in sizes]
        measured += seconds
    if not measured:
        raise SystemExit(
            f"no all_gather, reduce_scatter or all_reduce of 2 ranks from {size_text(SHARED_FROM)} on, measured where "
            "MPDIST_ALGORITHM=shared"
        )
    sigma, mu, gamma = costs.fit(columns, measured)
    return Machine(message, link, gamma, Line(sigma, mu), cases[0].machine["usable_cores"])


def where(case: Case, machine: Machine) -> Machine:
    """The machine with the cores that a node had there: make-believe hosts share those of the one machine."""
    cores = case.machine["usable_cores"]
    return replace(machine, cores=max(cores // case.nodes, 1) if FAKE in case.machine["variables"] else cores)


def predictions(cases: Sequence[Case], machine: Machine) -> Iterator[tuple[str, Layout, float, float]]:
    """Algorithm, layout, predicted and measured seconds of every all_reduce that was measured."""
    for case in cases:
        if case.op != "all_reduce":
            continue
        layout, raw, machine = layout_of(case), case.best_raw(), where(case, machine)
        if raw is not None:
            yield "MPI's own", layout, costs.best(case.nbytes, layout, machine, costs.FLAT)[1], case.lines[raw].median
        if case.nbytes < SHARED_FROM or layout.local == 1 or not is_forced(case):
            continue
        if layout.nodes > 1:
            yield "hierarchical", layout, costs.hierarchical(case.nbytes, layout, machine), case.lines[OURS].median
            continue
        private, resident = (cost(case.nbytes, layout, machine) for cost in (costs.private_memory, costs.shared_memory))
        yield "shared memory, private arrays", layout, private, case.lines[OURS].median
        if RESIDENT in case.lines:
            yield "shared memory, comm.empty", layout, resident, case.lines[RESIDENT].median


def show_fit(machine: Machine) -> None:
    print("Constants, fitted to 2 ranks")
    print(f"  message in a node   alpha {time_text(machine.message.alpha)}, {bandwidth_text(machine.message.beta)}")
    print(f"  message over a link alpha {time_text(machine.link.alpha)}, {bandwidth_text(machine.link.beta)}")
    print(f"  adding              {bandwidth_text(machine.gamma)}")
    print(
        f"  shared memory       sigma {time_text(machine.shared.alpha)}, copying {bandwidth_text(machine.shared.beta)}"
    )


def bandwidth_text(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.3g} GB/s" if seconds_per_byte else "no time of its own"


def show_errors(cases: Sequence[Case], machine: Machine) -> None:
    found: dict[tuple[str, Layout], list[tuple[float, float]]] = {}
    for name, layout, predicted, measured in predictions(cases, machine):
        found.setdefault((name, layout), []).append((predicted, measured))
    print("\nMedian error of the predicted all_reduce")
    for (name, layout), pairs in sorted(found.items(), key=lambda item: (item[0][0], item[0][1].ranks)):
        where = f"{layout.nodes} x {layout.local} ranks"
        print(f"  {name:30} {where:12} {costs.median_error(pairs):5.0%} of {len(pairs)} sizes")
    unseen = [pair for (_, layout), pairs in found.items() if layout.ranks > 2 for pair in pairs]
    if unseen:
        print(f"  all that was not fitted        {'':12} {costs.median_error(unseen):5.0%} of {len(unseen)}")


def show_winners(machine: Machine, local: int) -> None:
    print(
        f"\nFastest all_reduce, {local} ranks a node on {machine.cores} cores; how much faster than the best flat one"
    )
    for network, link in NETWORKS.items():
        there = Machine(machine.message, link, machine.gamma, machine.shared, machine.cores)
        print(f"\n{network}, alpha {time_text(link.alpha)}")
        print("  nodes  " + "".join(f"{size:>24}" for size in SIZES))
        for nodes in NODES:
            layout = Layout(nodes, local)
            cells = []
            for nbytes in SIZES.values():
                name, seconds = costs.best(nbytes, layout, there, costs.algorithms(layout))
                _, flat = costs.best(nbytes, layout, there, costs.FLAT)
                cells.append(f"{SHORT[name]} {time_text(seconds)} x{flat / seconds:.1f}")
            print(f"  {nodes:5}  " + "".join(f"{cell:>24}" for cell in cells))


def show_efficiency(machine: Machine, local: int, step: float) -> None:
    print(
        f"\nTraining efficiency, {time_text(step)} of computing a step; the gradients averaged after the backward pass "
        f"/ during it ({HIDDEN:.0%} of the step hide it)"
    )
    for gradient in GRADIENTS:
        print(f"\n{gradient / 1e6:.0f} MB of gradients")
        print("  nodes  " + "".join(f"{network:>32}" for network in NETWORKS))
        print("  " + " " * 5 + "  " + "".join(f"{'flat':>16}{'hierarchical':>16}" for _ in NETWORKS))
        for nodes in NODES:
            layout = Layout(nodes, local)
            cells = []
            for link in NETWORKS.values():
                there = Machine(machine.message, link, machine.gamma, machine.shared, machine.cores)
                for seconds in (
                    costs.best(gradient, layout, there, costs.FLAT)[1],
                    costs.hierarchical(gradient, layout, there),
                ):
                    after, during = costs.efficiency(step, seconds), costs.efficiency(step, seconds, HIDDEN)
                    cells.append(f"{after:.0%} / {during:.0%}")
            print(f"  {nodes:5}  " + "".join(f"{cell:>16}" for cell in cells))


def measured() -> list[Case]:
    """Run `mpdist bench` on 2, 3 and 4 ranks, and on make-believe hosts where there is something to make them."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "cases")
        words = ["-m", "mpdist", "bench", "--rivals", "raw", "--seconds", "0.3"]
        words += ["--json", str(results)]
        for ranks in (2, 3, 4):
            command = [sys.executable, *words, "--ops", OPS, "--sizes", "8..64M", "-n", str(ranks)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **FORCED})
        if FAKE in os.environ:
            from collectives import cluster

            words += ["--ops", "ping_pong,all_reduce", "--sizes", "8..4M"]
            with cluster(os.environ[FAKE], "2", "--rate", "1gbit") as run:
                for local in ("1", "2"):
                    command = ["--ranks-per-host", local, "--timeout", "200", "--", sys.executable, *words]
                    run(command, {**os.environ, **FORCED, "OMP_NUM_THREADS": "1"})
        return read(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE.jsonl")
    parser.add_argument("--local", type=int, default=2, help="ranks on each node (default 2)")
    parser.add_argument(
        "--step", type=positive_seconds, default=0.5, help="seconds that one training step computes (default 0.5)"
    )
    options = parser.parse_args()
    if options.local < 1:
        parser.error(f"--local is {options.local}; a node has at least 1 rank")
    try:
        cases = [case for path in options.files for case in read(path)]
    except (OSError, ValueError, TypeError, KeyError) as error:
        parser.error(f"no file of `mpdist bench --json`: {type(error).__name__}: {error}")
    cases = cases or measured()
    machine = fitted(cases)
    show_fit(machine)
    show_errors(cases, machine)
    show_winners(machine, options.local)
    show_efficiency(machine, options.local, options.step)


if __name__ == "__main__":
    main()
