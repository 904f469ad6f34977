"""Groups: which communicator a module is averaged over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mpdist.errors import UsageError
from mpdist.torch.data_parallel.waiting import finish

if TYPE_CHECKING:
    from mpdist.comm import Communicator


def own_communicator(comm: Communicator | None, process_group: Any) -> Communicator:
    """A duplicate of `comm`, of the group's, of torch's default group's, or of the world; collective over its ranks.

    Raises:
        UsageError: both are given, or the group is not of backend mpdist.
    """
    if comm is not None and process_group is not None:
        raise UsageError("give comm or process_group, not both")
    if comm is None and process_group is None and dist.is_available() and dist.is_initialized():
        default = dist.group.WORLD
        process_group = default if communicator_of(default) is not None else None
    if comm is None and process_group is not None:
        comm = communicator_of(process_group)
        if comm is None:
            raise UsageError(
                f"process_group is of backend {dist.get_backend(process_group)!r}; mpdist's DistributedDataParallel "
                "averages over a group of backend 'mpdist', or over comm="
            )
    if comm is None:
        from mpdist.runtime import init

        comm = init()
    duplicate: Communicator = finish(comm.dup())
    return duplicate


def communicator_of(process_group: Any) -> Communicator | None:
    """The communicator under a process group; None for another backend."""
    comm: Communicator | None = getattr(process_group, "_comm", None)
    return comm
