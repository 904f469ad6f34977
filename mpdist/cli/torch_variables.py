"""Torch's variables: what scripts written for `torchrun` read before they start.

`mpdist run` gives all ranks WORLD_SIZE, MASTER_ADDR and MASTER_PORT; each warden adds RANK, LOCAL_RANK and
LOCAL_WORLD_SIZE, which the launcher tells it. Nothing listens on the port: it is for backends that want one.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

LOOPBACK = "127.0.0.1"
COMMON = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def common_variables(ranks: int, hosts: Sequence[str], environ: Mapping[str, str], *, is_local: bool) -> dict[str, str]:
    """The variables that are the same on all ranks; a master that is given stays.

    Args:
        hosts: lines of the host file; the first host is taken for rank 0's.
        is_local: all ranks run on this host.
    """
    found = {"WORLD_SIZE": str(ranks), "MASTER_PORT": environ.get("MASTER_PORT") or str(_free_port())}
    host = environ.get("MASTER_ADDR") or (LOOPBACK if is_local else first_host(hosts))
    return found | ({"MASTER_ADDR": host} if host else {})


def first_host(lines: Sequence[str]) -> str:
    """Of a host file of either MPI: `name`, `name:4` or `name slots=4`; empty if there is none."""
    for line in lines:
        words = line.partition("#")[0].split()
        if words:
            return words[0].partition(":")[0]
    return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
