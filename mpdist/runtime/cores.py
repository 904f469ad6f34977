"""Cores: which of them a rank may use, and with how many others it shares them.

Containers on one machine, and make-believe hosts, are nodes of their own to MPI, and may still have the same cores.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        machine: the same for all processes of one running kernel.
        cores: that the rank may use; a launcher may bind it to one.
    """

    machine: str
    cores: frozenset[int]

    @classmethod
    def here(cls) -> Place:
        """Of this process."""
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        return cls(_machine(), frozenset(cores))


def _machine() -> str:
    try:
        return _BOOT.read_text()
    except OSError:  # not Linux
        return socket.gethostname()


def crowd(own: Place, everywhere: Sequence[Place]) -> tuple[int, int]:
    """How many ranks must do with how many cores, where it is tightest among those that share cores with this one."""
    near = [place.cores for place in everywhere if place.machine == own.machine and place.cores & own.cores]
    crowds = [(sum(cores <= room for cores in near), len(room)) for room in set(near)]
    return max(crowds, key=lambda crowd: crowd[0] / crowd[1])
