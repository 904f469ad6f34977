"""Environment: the variables that scripts written for `torchrun` read.

`mpdist run` sets them before a script starts. Under a bare `mpirun` init_process_group sets those that are missing;
`setup_env()` does it earlier, for a script that reads them first.
"""

from __future__ import annotations

import os
import socket

import mpdist
from mpdist.torch.exchange import all_gather_records

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def setup_env() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT where they are missing.

    Starts mpdist if it is not started; all ranks call it. The port is free on rank 0's host, and nothing listens on
    it: other backends may.
    """
    world = mpdist.init()
    # All ranks take part, whatever they have: they must agree on the address.
    mine = (os.environ.get("MASTER_ADDR") or _address(), os.environ.get("MASTER_PORT") or str(_free_port()))
    address, port = all_gather_records(world, mine)[0]
    values = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    for name, value in values.items():
        os.environ.setdefault(name, str(value))


def _address() -> str:
    """Of this host, as others reach it; the loopback where it has no other name."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "127.0.0.1"
    return name


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
