"""Probe: make the trial in processes of their own, again and again, until each operation has its answer.

Two ranks under the library's own mpiexec, where there is one: a rank alone talks to
nobody, and its reductions reduce nothing. Else one rank, without a launcher; what needs
two stays unknown. Both start as if this process had no launcher: its variables would
make them ranks of this job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from mpdist.transport.cuda_aware.table import REDUCTIONS, Answer, Finding

TRIAL = "mpdist.transport.cuda_aware.trial"

# A first start may load gigabytes of libraries over a network.
START_SECONDS = 90.0
OPERATION_SECONDS = 20.0
END_SECONDS = 2.0
LOOK_SECONDS = 0.02

# Variables that tell a process its place in a job, and those that would send the ranks to other hosts.
_OF_LAUNCHERS = (
    *("PMI", "PRTE_", "OMPI_", "HYDI_", "HYDRA_", "MPIEXEC_", "MPI_LOCAL", "MV2_COMM_WORLD_", "I_MPI_HYDRA_"),
    *("SLURM_", "PBS_", "LSB_", "PE_HOSTFILE", "COBALT_", "FLUX_", "PALS_", "ALPS_", "JSM_"),
)
_SETTINGS = ("OMPI_MCA_", "UCX_", "FI_", "MPIR_CVAR_", "MPICH_", "MV2_", "I_MPI_", "PSM2_", "HCOLL_")
_NO_SETTINGS = (
    *("MV2_COMM_WORLD_", "I_MPI_HYDRA_", "OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type", "OMPI_MCA_ess"),
    *(
        "OMPI_MCA_initial_wdir",
        "OMPI_MCA_num_procs",
        "OMPI_MCA_orte",
        "OMPI_MCA_pmix",
        "OMPI_MCA_prte",
        "OMPI_MCA_rmaps",
    ),
)

# Two ranks on any number of cores, as any user: the rank that asks runs here, too. Open MPI 4 and 5.
_FOR_LAUNCHER = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_hwloc_base_binding_policy": "none", "PRTE_MCA_hwloc_default_binding_policy": "none",
}  # fmt: skip


@dataclass
class Report:
    """What the trial has written.

    Attributes:
        ranks: 0 if it has not begun.
        begun: the operation that is under way; empty if none is.
    """

    ranks: int = 0
    answers: dict[str, Answer] = field(default_factory=dict)
    begun: str = ""
    has_ended: bool = False
    problem: str = ""


def parse(text: str, operations: Sequence[str]) -> Report:
    """Whole lines; what is no word of the trial is passed over."""
    report = Report()
    for line in text.splitlines(keepends=True):
        word, _, rest = line.rstrip("\n").partition(" ")
        if not line.endswith("\n"):
            continue
        if word == "ranks" and rest in ("1", "2"):
            report.ranks = int(rest)
        elif word == "problem":
            report.problem = report.problem or rest
        elif word == "begin" and rest in operations:
            report.begun = rest
        elif word in ("ok", "fails") and rest and rest == report.begun:
            report.answers[rest] = Answer(word)
            report.begun = ""
        elif line == "end\n":
            report.has_ended = True
    return report


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that no launcher has started; what steers MPI stays."""
    return {name: value for name, value in environ.items() if not name.startswith(_OF_LAUNCHERS) or _is_setting(name)}


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that steer MPI."""
    return {name: value for name, value in environ.items() if _is_setting(name)}


def _is_setting(name: str) -> bool:
    return name.startswith(_SETTINGS) and not name.startswith(_NO_SETTINGS)


def launcher_of(library: str) -> str | None:
    """The mpiexec that was installed with this library."""
    for folder in list(Path(library).parents)[:4]:
        path = folder / "bin" / "mpiexec"
        if path.is_file() and os.access(path, os.X_OK):
            return str(path)
    return None


def probe(library: str, device: int, operations: Sequence[str], is_over: threading.Event) -> Finding:
    """Try these operations with the memory of a GPU; blocks, until `is_over` is set at the latest."""
    launcher = launcher_of(library) if library else None
    finding = Finding({}, "this interpreter cannot be started again")
    commands = [([launcher, "-n", "2"], 2)] if launcher else []
    for command, ranks in [*commands, ([], 1)] if sys.executable else []:
        finding = _probe(command, ranks, device, operations, is_over)
        if finding.answers or is_over.is_set():
            break
    return finding


def _probe(
    command: Sequence[str], ranks: int, device: int, operations: Sequence[str], is_over: threading.Event
) -> Finding:
    answers: dict[str, Answer] = {}
    left = [op for op in operations if ranks > 1 or op not in REDUCTIONS]
    while left and not is_over.is_set():
        report, has_died = _run(command, ranks, device, left, is_over)
        answers |= report.answers
        if report.begun:
            answers[report.begun] = Answer.CRASHES if has_died else Answer.HANGS
        elif not report.has_ended:
            return Finding(answers, report.problem or f"it {'ended' if has_died else 'hung'} before it had begun")
        left = [op for op in left if op not in answers]
    return Finding(answers, "it was broken off" if is_over.is_set() else "")


def _run(
    command: Sequence[str], ranks: int, device: int, operations: Sequence[str], is_over: threading.Event
) -> tuple[Report, bool]:
    """One run; its report, and whether it ended by itself."""
    with tempfile.TemporaryDirectory(prefix="mpdist-") as folder:
        path = Path(folder, "report")
        path.touch()
        trial = [str(path), str(device), str(ranks), str(int(2 * OPERATION_SECONDS)), *operations]
        try:
            process = subprocess.Popen(
                [*command, sys.executable, "-P", "-m", TRIAL, *trial],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environ(),
                start_new_session=True,
            )
        except OSError as error:
            return Report(problem=f"{type(error).__name__}: {error}"), True
        try:
            has_died = _watch(process, path, is_over)
        finally:
            _end(process)
        return parse(path.read_text(errors="replace"), operations), has_died


def _environ() -> dict[str, str]:
    here = {"PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder), "PYTHONFAULTHANDLER": "0"}
    return without_launcher(os.environ) | here | _FOR_LAUNCHER


def _watch(process: subprocess.Popen[bytes], path: Path, is_over: threading.Event) -> bool:
    """Until it ends; False if nothing was written for too long."""
    written, until = 0, monotonic() + START_SECONDS
    while process.poll() is None:
        if is_over.wait(LOOK_SECONDS) or monotonic() > until:
            return False
        if path.stat().st_size != written:
            written, until = path.stat().st_size, monotonic() + OPERATION_SECONDS
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """What a launcher leaves behind ends by itself, see trial.py."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
