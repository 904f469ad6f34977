"""Launcher: which `mpiexec` starts the ranks, and which words it needs.

The environment's own launcher comes first (beside the interpreter), then PATH.
It must belong to the MPI library that mpi4py loads: with another one's launcher
every rank believes it is rank 0 of 1 (`mpdist info` and the runtime say so).

MPICH needs nothing when there are more ranks than cores: it yields by itself;
MPIR_CVAR_POLLS_BEFORE_YIELD made no difference at 4 ranks on 2 cores, and
MPIR_CVAR_ENABLE_HEAVY_YIELD a barrier 40 times slower (500 us instead of 12 us).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mpdist.errors import Unavailable
from mpdist.transport.facts import both_wheels, to_install

VERSION_SECONDS = 20.0


class Kind(Enum):
    """Families of launchers, by the options that they understand."""

    MPICH = "mpich"
    OPENMPI = "openmpi"
    OTHER = "other"


# `mpiexec` first; Debian and others install several MPIs side by side under the longer names.
NAMES = {
    Kind.MPICH: ("mpiexec", "mpiexec.hydra", "mpiexec.mpich", "mpirun"),
    Kind.OPENMPI: ("mpiexec", "mpiexec.openmpi", "mpirun", "mpirun.openmpi", "orterun"),
}
ANY_NAMES = tuple(dict.fromkeys(name for names in NAMES.values() for name in names))

# Set where the ranks may be started on other hosts even without a host file.
SCHEDULERS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_HOSTS", "PE_HOSTFILE", "COBALT_NODEFILE", "FLUX_JOB_ID")

_BINDING = re.compile(r"bind|overload|cpu-?(set|list)|rankfile|^-+rf(=|$)", re.IGNORECASE)

# Open MPI passes only its own variables on to other hosts.
EXPORTED_PREFIXES = ("MPDIST_", "PYTHON")


@dataclass(frozen=True)
class Launcher:
    """A usable mpiexec.

    Attributes:
        version: the line of `mpiexec --version` that carries it.
    """

    path: str
    kind: Kind
    version: str


@dataclass(frozen=True)
class Placement:
    """What decides about the launcher's options, apart from its kind.

    Attributes:
        is_bound: the user has said to which cores the ranks are bound.
    """

    ranks: int
    cores: int
    is_root: bool = False
    hostfile: str | None = None
    extra: Sequence[str] = ()
    is_local: bool = True
    is_bound: bool = False


def launch_command(launcher: Launcher, place: Placement, exported: Iterable[str], program: Sequence[str]) -> list[str]:
    """The command line that starts `program` on every rank."""
    return [launcher.path, *_OPTIONS[launcher.kind](place, exported), *place.extra, *program]


def _mpich_options(place: Placement, exported: Iterable[str]) -> list[str]:
    hosts = ["-f", place.hostfile] if place.hostfile else []
    return ["-n", str(place.ranks), *hosts]


def _openmpi_options(place: Placement, exported: Iterable[str]) -> list[str]:
    options = ["-n", str(place.ranks)]
    if place.is_root:
        options.append("--allow-run-as-root")
    if place.hostfile:
        options += ["--hostfile", place.hostfile]
        if not place.is_bound:
            options += ["--bind-to", ":overload-allowed"]  # else a host with more slots than cores is refused
    if place.is_local:
        options.append("--oversubscribe")  # slots are cores: 2 ranks on 1 core with 2 threads would be refused
        if place.ranks > place.cores:
            options += ["--bind-to", "none"]
    for name in exported:
        options += ["-x", name]
    return options


def _other_options(place: Placement, exported: Iterable[str]) -> list[str]:
    if place.hostfile:
        raise Unavailable("mpdist run: this mpiexec is unknown; give its host file by --launcher-arg")
    return ["-n", str(place.ranks)]


_OPTIONS = {Kind.MPICH: _mpich_options, Kind.OPENMPI: _openmpi_options, Kind.OTHER: _other_options}


def launch_variables(kind: Kind, place: Placement) -> dict[str, str]:
    """Environment variables that the ranks of this MPI need."""
    if kind is Kind.OPENMPI and place.is_local and place.ranks > place.cores:
        return {"OMPI_MCA_mpi_yield_when_idle": "1"}
    return {}


def exported_variables(environ: Mapping[str, str]) -> list[str]:
    """Names of the variables that must reach ranks on other hosts."""
    return sorted(name for name in environ if name.startswith(EXPORTED_PREFIXES))


def is_local(hostfile: str | None, extra: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether all ranks certainly run on this host."""
    return not hostfile and not extra and not any(name in environ for name in SCHEDULERS)


def is_bound(extra: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether the launcher's own words say to which cores Open MPI binds the ranks."""
    variables = (name for name in environ if name.startswith(("PRTE_MCA_", "OMPI_MCA_")))
    return any(_BINDING.search(word) for word in (*extra, *variables))


def core_count() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def parse_version(text: str) -> tuple[Kind, str]:
    """Family and version line, from what `mpiexec --version` prints."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any("Open MPI" in line or "OpenRTE" in line or "PRRTE" in line for line in lines):
        return Kind.OPENMPI, lines[0]
    if any("HYDRA" in line for line in lines):
        number = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("Version:")), "?")
        return Kind.MPICH, f"hydra {number}"
    if any("Intel(R) MPI" in line for line in lines):
        return Kind.MPICH, lines[0]
    return Kind.OTHER, lines[0] if lines else "prints no version"


def candidates(names: Sequence[str], executable: str, environ: Mapping[str, str]) -> list[str]:
    """Existing launchers, best first: beside the interpreter, then along PATH."""
    folders = [Path(executable).parent, *map(Path, environ.get("PATH", "").split(os.pathsep))]
    paths = (folder / name for folder in folders for name in names)
    return list(dict.fromkeys(str(path) for path in paths if path.is_file() and os.access(path, os.X_OK)))


def find_launcher(wanted: Kind | None = None) -> Launcher:
    """The launcher of this environment, of the wanted family if one is named.

    Raises:
        Unavailable: there is none; the text says what was found instead, and what to install.
    """
    seen = []
    for path in candidates(NAMES[wanted] if wanted else ANY_NAMES, sys.executable, os.environ):
        try:
            launcher = inspect_launcher(path)
        except Unavailable as error:
            seen.append(str(error))
            continue
        if wanted in (None, launcher.kind):
            return launcher
        seen.append(f"{path} ({launcher.version})")
    what = f"no mpiexec of {wanted.value}" if wanted else "no mpiexec"
    extra = (wanted or Kind.MPICH).value
    advice = both_wheels() or f"Install one: {to_install(extra)}; or load your site's MPI module"
    raise Unavailable(f"{what} beside {sys.executable} or on PATH; found: {', '.join(seen) or 'nothing'}. {advice}.")


def inspect_launcher(path: str) -> Launcher:
    """Ask a launcher which one it is.

    Raises:
        Unavailable: it can't be run.
    """
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True, text=True, timeout=VERSION_SECONDS, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{path} --version failed: {error}") from error
    kind, version = parse_version(done.stdout + done.stderr)
    return Launcher(path, kind, version)
