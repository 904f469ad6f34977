"""Machine: where a rank runs, where it is pinned to, and what is written beside every figure."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

CPU_FILE = "/proc/cpuinfo"
THREADS = "/proc/self/task"
CAN_PIN = hasattr(os, "sched_setaffinity")


def core_for(number: int, cores: Sequence[int]) -> int:
    """Ranks of a machine take its cores in turn, and share them where there are more ranks."""
    return sorted(cores)[number % len(cores)]


def pin(core: int) -> None:
    """Keep this process on one core: MPI and others may have started threads of their own."""
    threads = [int(path.name) for path in Path(THREADS).iterdir()] if os.path.isdir(THREADS) else [0]
    for thread in threads:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(thread, {core})


def versions() -> dict[str, str]:
    """Of what the figures depend on; without those that are not installed."""
    found = {"python": platform.python_version()}
    for package in ("mpdist", "mpi4py", "numpy", "torch"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def processor() -> str:
    """Its name."""
    try:
        lines = Path(CPU_FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def memory() -> int:
    """Bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def today() -> str:
    """Date and time in UTC, to the minute."""
    return datetime.now(UTC).isoformat(timespec="minutes")
