"""Machine: where a rank runs, where it is pinned to, and what is written beside every figure."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

CPU_FILE = "/proc/cpuinfo"
CAN_PIN = hasattr(os, "sched_setaffinity")


def core_for(number: int, cores: Sequence[int]) -> int:
    """Ranks of a machine take its cores in turn, and share them where there are more ranks."""
    return sorted(cores)[number % len(cores)]


def pin(core: int) -> None:
    """Keep this thread, and those that it will start, on one core."""
    os.sched_setaffinity(0, {core})


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


def today() -> str:
    """Date and time in UTC, to the minute."""
    return datetime.now(UTC).isoformat(timespec="minutes")
