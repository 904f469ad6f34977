"""Creation: a process group for torch, over a communicator of its own."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

import mpdist
from mpdist.config import Config
from mpdist.memory.heap import keep_freed
from mpdist.torch.callers import variable_of_caller
from mpdist.torch.errors import WrongCall, translated
from mpdist.torch.process_group import ProcessGroup
from mpdist.torch.progress import Progress
from mpdist.torch.registration import NAME
from mpdist.torch.waiting import finish

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from mpdist import Communicator
    from mpdist.progress.engine import Engine

_progress: Progress | None = None
_generation = count(1)  # of default groups, of which a program may have one after the other
_suffix = ""


def create(options: Any, backend_options: object = None) -> ProcessGroup:
    """A group of these ranks; collective over its members.

    Raises:
        WrongCall: torch was given another rank or number of ranks than MPI has, or several backends for the group; or
            the default group, of another backend, numbers the ranks otherwise than MPI.
    """
    check_backends(_backends_of_caller())
    world = mpdist.init()
    ranks = list(options.global_ranks_in_group)
    if not ranks:
        _check_place(world, options.group_rank, options.group_size)
    elif not isinstance(dist.group.WORLD, ProcessGroup):  # whose ranks were compared with MPI's
        _check_numbering(world, options.store, len(ranks))
    try:
        comm = finish(world.subgroup(ranks) if ranks else world.dup())
    except mpdist.MpdistError as error:
        raise translated(error) from error
    group = ProcessGroup(comm, options.store, progress_of(world), _timeout_of(options.timeout))
    keep_freed(comm._channel.engine.keep_bytes)
    comm.name = comm._channel.name = _name(options.group_id if ranks else None)
    return group


def _name(group_id: str | None) -> str:
    """Another one for each group, though torch numbers them anew with each default group; None for that."""
    global _suffix
    if group_id is None:
        generation = next(_generation)
        _suffix = f"#{generation}" if generation > 1 else ""
    return ("default group" if group_id is None else f"group {group_id}") + _suffix


def _timeout_of(given: timedelta) -> timedelta:
    """MPDIST_TIMEOUT where the program gave none: then torch gives its own default."""
    return timedelta(seconds=Config.read().timeout) if given == default_pg_timeout else given


def progress_of(world: Communicator) -> Progress:
    """The thread for asynchronous operations; one for all groups, started when first needed."""
    global _progress
    if _progress is None:
        _progress = Progress(world._channel.engine)
        _stop_with(_progress, world._channel.engine)
    return _progress


def _stop_with(progress: Progress, engine: Engine) -> None:
    """End our threads where mpdist ends its own: none may call MPI when it is stopped."""
    stop_thread = engine.stop_thread

    def stop_all() -> None:
        progress.stop()
        stop_thread()

    engine.stop_thread = stop_all  # type: ignore[method-assign]  # of this one engine


def _check_place(world: Communicator, rank: int, size: int) -> None:
    if (rank, size) != (world.rank, world.size):
        raise WrongCall(
            f"init_process_group was given rank {rank} of {size}, but MPI has started this process as rank "
            f"{world.rank} of {world.size}: both must agree. Start the script by `mpirun -n {size}` or "
            f"`mpdist run -n {size}`, and leave rank, world_size, RANK and WORLD_SIZE to it"
        )


def _check_numbering(world: Communicator, store: Store, members: int) -> None:
    """Each compares its own ranks, and all hear of a difference: else those whose ranks agree would wait for others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (world.rank, world.size):
        text = (
            f"rank {rank} of {size} of the default group, of {dist.get_backend()}, is rank {world.rank} of "
            f"{world.size} of MPI; all must be numbered alike. Start the script by `mpirun -n {size}` or "
            f"`mpdist run -n {size}`, and leave rank, world_size, RANK and WORLD_SIZE to it"
        )
        store.set("numbered otherwise", text)
    if store.add("compared", 1) == members:
        store.set("all compared", "")
    store.get("all compared")
    if store.check(["numbered otherwise"]):
        raise WrongCall(f'new_group(backend="{NAME}"): {store.get("numbered otherwise").decode()}')


def check_backends(backends: Mapping[str, str]) -> None:
    """torch would take ours for all devices, and drop the others or leave them aside.

    Raises:
        WrongCall: another backend is among them.
    """
    if set(backends.values()) <= {NAME}:
        return
    given = ",".join(f"{device}:{backend}" for device, backend in backends.items())
    other = next(backend for backend in backends.values() if backend != NAME)
    raise WrongCall(
        f'"{given}": a group of {NAME} has no other backend beside it. Make it with "{NAME}", and a second group for '
        f'the other devices: new_group(backend="{other}")'
    )


def _backends_of_caller() -> Mapping[str, str]:
    """For each type of device the backend that the group is to have, which torch does not tell its creators."""
    config = variable_of_caller("_new_process_group_helper", "backend_config")
    return {} if config is None else dict(config.get_device_backend_map())
