"""Claim: what the MPI that this process has loaded says of GPUs, and where its library is."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

_NAMES = ("libmpi.", "libmpi_", "libmpich.")

_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA


def library_path() -> str:
    """The libmpi that this process has loaded; empty if unknown."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ""
    paths = (line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    return next((path for path in paths if _is_mpi(Path(path).name)), "")


def _is_mpi(name: str) -> bool:
    return name.startswith(_NAMES) and "_gtl_" not in name  # Cray's, a part for GPUs


def cuda_support(path: str) -> str:
    """Ask the library, when MPI is running: yes, no, or unknown where it cannot be asked."""
    try:
        library: Any = ctypes.CDLL(path or None)
    except OSError:
        return "unknown"
    for ask in (_ask_mpich, _ask_open_mpi):
        answer = ask(library)
        if answer is not None:
            return "yes" if answer else "no"
    return "unknown"


def _ask_mpich(library: Any) -> bool | None:
    """MPICH and its children; before the other, which is in MPICH, too, but ends the process where asserts are on.

    See https://www.mpich.org/static/docs/latest/www3/MPIX_GPU_query_support.html
    """
    query = getattr(library, "MPIX_GPU_query_support", None)
    if query is None:
        return None
    found = ctypes.c_int(0)
    query.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_int))
    return query(_CUDA, ctypes.byref(found)) == 0 and bool(found.value)


def _ask_open_mpi(library: Any) -> bool | None:
    """Open MPI and MVAPICH; see https://docs.open-mpi.org/en/v5.0.x/man-openmpi/man3/MPIX_Query_cuda_support.3.html"""
    query = getattr(library, "MPIX_Query_cuda_support", None)
    return None if query is None else bool(query())
