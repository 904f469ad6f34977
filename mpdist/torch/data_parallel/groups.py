"""Groups: which communicator a module is averaged over."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mpdist.comm import Communicator
from mpdist.errors import UsageError
from mpdist.torch.waiting import finish


def told(
    comm: Communicator | dist.ProcessGroup | None, process_group: Any, device_mesh: Any
) -> tuple[Communicator | None, Any]:
    """The communicator and the process group that the options name; at most one of them.

    Raises:
        UsageError: several are given, or something else.
    """
    if dist.is_available() and isinstance(comm, dist.ProcessGroup):
        if process_group is not None:
            raise UsageError("two process groups are given, as comm and as process_group")
        comm, process_group = None, comm
    if comm is not None and not isinstance(comm, Communicator):
        raise UsageError(
            f"comm is {comm!r}; it must be a communicator or a process group. Leave device_ids out, or on a GPU give "
            "it by name"
        )
    if device_mesh is not None:
        if process_group is not None:
            raise UsageError("give process_group or device_mesh, not both")
        if device_mesh.ndim != 1:
            raise UsageError(f"device_mesh has {device_mesh.ndim} dimensions; give one of them: device_mesh['name']")
        process_group = device_mesh.get_group(0)
    if comm is not None and process_group is not None:
        raise UsageError("give comm or process_group, not both")
    return comm, process_group


def own_communicator(comm: Communicator | None, process_group: Any) -> Communicator:
    """A duplicate of `comm`, of the group's, of torch's default group's, or of the world; collective over its ranks.

    Raises:
        UsageError: the group is not of backend mpdist.
    """
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
    duplicate._channel.advice = ADVICE
    return duplicate


ADVICE = (
    "unequal numbers of batches? model.join(), drop_last=True, mpdist.torch.check; several wrapped modules? their "
    "backwards must come in the same order on all ranks; collectives of your own within model.join()? ranks that have "
    "no more inputs do not come to them"
)


def communicator_of(process_group: Any) -> Communicator | None:
    """The communicator under a process group; None for another backend."""
    comm: Communicator | None = getattr(process_group, "_comm", None)
    return comm
