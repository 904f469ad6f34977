"""Bench: measure collectives against mpi4py and torch gloo, or find this machine's thresholds.

Started by hand it starts the job, or jobs, through `mpdist run`: MPI reads its
tuning variables when it starts, and mpdist which algorithm is forced, so each
setting is a job of its own. Started by a launcher it is a rank of the job, and
rank 0 shows what was measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpdist.algorithms.choose import OPERATIONS as CHOSEN_OPERATIONS
from mpdist.algorithms.choose import built_in
from mpdist.bench import gloo, plot, tuning
from mpdist.bench.case import OURS, RAW_LATER, RAW_NOW, RESIDENT, Case, append, read, with_tuned
from mpdist.bench.machine import memory
from mpdist.bench.operations import ITEM_BYTES, OPERATIONS, PING_PONG
from mpdist.bench.present import present, require
from mpdist.bench.sizes import parse_sizes, size_text
from mpdist.bench.tuning import ANCHOR
from mpdist.cli.child import Ended, ended_by_signals, run_child
from mpdist.errors import MpdistError, Unavailable, UsageError
from mpdist.transport.facts import FAMILIES, launched_as

RIVALS = ("raw", "tuned", "gloo")
CONTENDERS_OF = {"raw": (RAW_NOW, RAW_LATER), "gloo": ("gloo",)}
TUNED_JOB = (OURS, RESIDENT, RAW_NOW, RAW_LATER)
# Those with more than one algorithm.
TUNED_OPERATIONS = tuple(op for op in OPERATIONS if op in CHOSEN_OPERATIONS)

# Tunings from the libraries' own descriptions of their variables (`mpivars`, `ompi_info --all`). MPICH: collectives of
# a node through larger pieces of its shared segment. Open MPI: the collectives that use shared memory, which are off by
# default.
TUNINGS = {
    "MPICH": {
        "MPIR_CVAR_REDUCE_INTRANODE_BUFFER_TOTAL_SIZE": "1048576",
        "MPIR_CVAR_BCAST_INTRANODE_BUFFER_TOTAL_SIZE": "1048576",
        "MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM": "release_gather",
        "MPIR_CVAR_REDUCE_POSIX_INTRA_ALGORITHM": "release_gather",
        "MPIR_CVAR_BCAST_POSIX_INTRA_ALGORITHM": "release_gather",
    },
    "Open MPI": {"OMPI_MCA_coll_sm_priority": "100", "OMPI_MCA_coll_sm_fragment_size": "65536"},
}


@dataclass(frozen=True)
class Defaults:
    """Of the options that are not given.

    Attributes:
        seconds: for the rounds of one operation at one size; all together takes less than 5 minutes.
    """

    sizes: str
    factor: int
    seconds: float


COMPARE = Defaults("8..64M", 4, 0.5)
RANKS = 2
TUNE = Defaults("8..16M", 2, 0.2)
# Ranks share the cores: a pool of threads in each only gets in the way.
SINGLE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def names(text: str, known: Sequence[str], what: str) -> list[str]:
    """The names in `a,b`.

    Raises:
        UsageError: one of them is not known.
    """
    found = [name.strip().replace("-", "_") for name in text.split(",")]
    unknown = [name for name in found if name not in known]
    if unknown:
        raise UsageError(f"{what} {text!r}: {unknown[0]!r} is none; choose from {', '.join(known)}")
    return found


def bench(options: argparse.Namespace) -> int:
    """Carry out `mpdist bench`; returns the exit status."""
    launched = launched_as(os.environ)
    if options.tune:
        refuse_beside_tune(options)
    if launched is not None:
        refuse_under_launcher(options)
    options.ranks = launched.size if launched else options.ranks or RANKS
    options.ops = ops_of(options, options.ranks)
    options.rivals = names(options.rivals, RIVALS, "--rivals") if options.rivals else default_rivals()
    if "gloo" in options.rivals and not gloo.is_installed():
        raise Unavailable("mpdist bench --rivals gloo: torch is not installed: pip install 'mpdist[torch]'")
    default = TUNE if options.tune else COMPARE
    options.sizes = parse_sizes(options.sizes or default.sizes, options.factor or default.factor)
    if not options.hostfile:
        refuse_beyond(memory(), options.sizes)
    options.seconds = options.seconds or default.seconds
    options.plot = plot.with_suffix(options.plot) if options.plot else None
    if launched is not None:
        return run_rank(options)
    try:
        with ended_by_signals():
            return tune(options) if options.tune else compare(options)
    except (JobFailed, Ended) as failed:
        return failed.status


def ops_of(options: argparse.Namespace, ranks: int) -> list[str]:
    """The operations to be measured; all that there are for so many ranks, if none is named.

    Raises:
        UsageError: one is not known, or so few ranks give no time that says anything.
    """
    if options.tune and ranks == 1:
        raise UsageError("mpdist bench --tune: with 1 rank there is nothing to choose; use -n 2 or more")
    known = TUNED_OPERATIONS if options.tune else tuple(OPERATIONS)
    if options.ops is None:
        return [op for op in known if op != PING_PONG or ranks > 1]
    ops = names(options.ops, known, "--ops")
    if PING_PONG in ops and ranks == 1:
        raise UsageError(f"mpdist bench --ops {options.ops}: {PING_PONG} takes 2 ranks, not 1; use -n 2 or more")
    return ops


def refuse_under_launcher(options: argparse.Namespace) -> None:
    """What is for the start of jobs means nothing in one that a launcher has started.

    Raises:
        UsageError: it is given.
    """
    given = {
        "--tune": options.tune,
        "-n": options.ranks,
        "--mpi": options.mpi != "auto",
        "--mpiexec": options.mpiexec,
        "--hostfile": options.hostfile,
        "--launcher-arg": options.launcher_arg,
        "--rivals tuned": "tuned" in (options.rivals or ""),
    }
    found = next((option for option, value in given.items() if value), None)
    if found:
        raise UsageError(
            f"mpdist bench {found} is for jobs that it starts by itself, and this is a rank of a job; leave it out, or "
            "start mpdist bench without a launcher"
        )


def refuse_beyond(limit: int, sizes: Sequence[int]) -> None:
    """No array of a rank can be larger than the machine's memory.

    Raises:
        UsageError: one would be.
    """
    if sizes[-1] > limit:
        raise UsageError(
            f"mpdist bench --sizes: {size_text(sizes[-1])} is more than this machine's memory, {size_text(limit)}"
        )


def refuse_beside_tune(options: argparse.Namespace) -> None:
    """Options that mean nothing for `--tune` are not passed over in silence.

    Raises:
        UsageError: one of them is given.
    """
    given = [name for name in ("json", "plot", "rivals") if getattr(options, name)]
    if given:
        option = f"--{given[0]}"
        raise UsageError(
            f"mpdist bench --tune writes thresholds, and nothing for {option}; leave {option} out, or --tune"
        )


class JobFailed(Exception):
    """A job of the benchmark failed, and has said why."""

    def __init__(self, status: int) -> None:
        self.status = status


def run_rank(options: argparse.Namespace) -> int:
    """As a rank of a job that a launcher has started."""
    from mpdist.bench.job import Task, run_job
    from mpdist.runtime import run

    launched = launched_as(os.environ)
    is_first = launched is not None and launched.rank == 0
    refusal = refusal_of(options) if is_first and not options.results else None
    contenders = options.contender or contenders_of(options.rivals)
    cases = run(run_job, Task(options.ops, options.sizes, contenders, options.seconds), refusal is None)
    if refusal is not None:
        raise refusal
    if is_first and options.results:
        append(options.results, cases)
    elif is_first:
        present(cases, options.json, options.plot)
    return 0


def refusal_of(options: argparse.Namespace) -> MpdistError | None:
    """Why the cases could not be presented as they are to be; the other ranks must hear of it before it is raised."""
    try:
        require(options.ops, options.json, options.plot)
    except MpdistError as error:
        return error
    return None


def compare(options: argparse.Namespace) -> int:
    """Measure mpdist and its rivals; MPI with its own settings, then tuned. A second job that fails loses no first."""
    require(options.ops, options.json, options.plot)
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        cases = run_job_of(options, Path(folder, "default"), contenders_of(options.rivals))
        mpi = cases[0].machine["mpi"]
        if "tuned" in options.rivals and mpi not in TUNINGS:
            print(f"mpdist bench: no tuning of {mpi} is known, so there is no second job", file=sys.stderr, flush=True)
        elif "tuned" in options.rivals:
            tuning = TUNINGS[mpi]
            print(f"mpdist bench: again, with {shown(tuning)}", file=sys.stderr, flush=True)
            try:
                cases = with_tuned(cases, run_job_of(options, Path(folder, "tuned"), TUNED_JOB, tuning))
            except (JobFailed, Ended) as failed:
                print("mpdist bench: no times of a tuned MPI, for its job failed", file=sys.stderr, flush=True)
                status = failed.status
    present(cases, options.json, options.plot)
    return status


def contenders_of(rivals: Sequence[str]) -> list[str]:
    """Who takes part in one job against these rivals; a tuned MPI needs a job of its own."""
    return [OURS, RESIDENT, *(name for rival in rivals for name in CONTENDERS_OF.get(rival, ()))]


def default_rivals() -> list[str]:
    """All that are there."""
    return [name for name in RIVALS if name != "gloo" or gloo.is_installed()]


def shown(variables: Mapping[str, str]) -> str:
    """`A=1 B=2`."""
    return " ".join(f"{name}={value}" for name, value in variables.items())


def tune(options: argparse.Namespace) -> int:
    """Measure each algorithm forced, and write from which size on it is the faster one."""
    path = tuning.tuning_path(os.environ)
    tables = tuning.load(path)
    tuning.require_writable(path)
    with tempfile.TemporaryDirectory() as folder:
        native = run_forced(options, Path(folder, "native"), "native")
        algorithm = "hierarchical" if native[0].nodes > 1 else "shared"
        other = run_forced(options, Path(folder, algorithm), algorithm)
    first = native[0]
    mpi = FAMILIES.get(first.machine["mpi"], "other")
    ranks, cores = first.machine["local_ranks"], first.machine["usable_cores"]
    found = tuning.thresholds(native, {algorithm: other}, built_in(mpi, ranks, cores))
    held = tuning.held(found)
    new = {"mpi": mpi, "ranks": ranks, "cores": cores, "thresholds": held}
    tuning.save(path, tuning.replaced(tables, new))
    for op, limits in found.items():
        name = f"{algorithm}_from"
        print(f"{op:15} {algorithm} {limit_text(op, limits[name], held[op][name])}")
    print(f"mpdist bench: written to {path}, for {ranks} ranks on {cores} cores, {mpi}")
    return 0


def limit_text(op: str, measured: int, held: int) -> str:
    """From which size on, and why not from the size that was measured."""
    text = threshold_text(op, held)
    if measured == held:
        return text
    return f"{text} (measured: {threshold_text(op, measured)}; but MPI's own call would hold the event loop)"


def threshold_text(op: str, nbytes: int) -> str:
    """`from 4 KiB on`, `above 64 KiB`; of what has no size `always` or `never`."""
    if not OPERATIONS[op].has_size:
        return "never" if nbytes else "always"
    if nbytes % ITEM_BYTES:  # one more than the largest size at which it was measured, and slower
        return f"above {size_text(nbytes - 1)}"
    return f"from {size_text(nbytes)} on"


def run_forced(options: argparse.Namespace, results: Path, algorithm: str) -> list[Case]:
    """Cases with one algorithm forced, and mpi4py as the anchor."""
    print(f"mpdist bench: with MPDIST_ALGORITHM={algorithm}", file=sys.stderr, flush=True)
    # The file that is to be written need not be there yet, and what lies elsewhere must not count.
    empty = results.with_name("empty.json")
    tuning.save(empty, [])
    variables = {"MPDIST_ALGORITHM": algorithm, "MPDIST_TUNING": str(empty)}
    return run_job_of(options, results, [OURS, ANCHOR], variables)


def run_job_of(
    options: argparse.Namespace, results: Path, contenders: Sequence[str], variables: Mapping[str, str] | None = None
) -> list[Case]:
    """Start one job, and return the cases that it leaves in the file `results`.

    Raises:
        JobFailed: it did not end well; it has said why.
        Ended: a signal ended it.
    """
    command = [sys.executable, "-m", "mpdist", "run", *launch_words(options), "-m", "mpdist", "bench"]
    command += ["--ops", ",".join(options.ops), "--sizes", ",".join(map(str, options.sizes))]
    command += ["--seconds", str(options.seconds), "--results", str(results)]
    command += [f"--contender={name}" for name in contenders]
    status = run_child(command, {**SINGLE_THREAD, **os.environ, **(variables or {})})
    if status:
        raise JobFailed(status)
    return read(results)


def launch_words(options: argparse.Namespace) -> list[str]:
    """The options of `mpdist run`."""
    words = ["-n", str(options.ranks), "--mpi", options.mpi]
    if options.mpiexec:
        words += ["--mpiexec", options.mpiexec]
    if options.hostfile:
        words += ["--hostfile", options.hostfile]
    return [*words, *(f"--launcher-arg={word}" for word in options.launcher_arg)]
