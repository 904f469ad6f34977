"""The name "mpi": torch knows it, its wheels have nothing behind it, and with mpdist it means "mpdist".

So `init_process_group("mpi")` of a script written for a torch built with MPI works with a wheel, and so do frameworks
that know a fixed list of names. A torch that has MPI of its own keeps it. Called at registration: this is light.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mpdist.errors import UsageError
from mpdist.torch.registration import NAME

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MPI = "mpi"

_taken = False


def as_mpi() -> None:
    """Let `torch.distributed.is_mpi_available()` say yes, so that frameworks that ask it choose "mpi" by themselves.

    The name "mpi" means mpdist without it, too. `MPDIST_AS_MPI=1` calls it when the backend is registered. Local to
    this process; call it before the framework is imported, on every rank. May be called again.

    Raises:
        UsageError: this torch is built with MPI: "mpi" is not mpdist there.
    """
    import torch
    from torch.distributed import distributed_c10d

    take_mpi()
    if not _taken:
        raise UsageError(
            f'mpdist cannot be "mpi" for torch {torch.__version__}, which is built with MPI: "mpi" is its own there. '
            'Use the name "mpdist", and take MPDIST_AS_MPI out of the environment'
        )
    distributed_c10d._MPI_AVAILABLE = True


def meant_by(backend: str) -> str:
    """What to give to torch for the name of a backend, or for one to each type of device."""
    return re.sub(rf"\b{MPI}\b", NAME, backend.lower()) if _taken else backend


def take_mpi() -> None:
    """Let torch make our groups where "mpi" is asked for, and call them so; not where it has MPI of its own."""
    global _taken
    from torch.distributed import distributed_c10d

    if _taken or distributed_c10d.is_mpi_available():
        return
    _taken = True
    stock = distributed_c10d._new_process_group_helper

    # All groups are made by this function of torch. Ours has another name in a traceback, see creation.py.
    @functools.wraps(stock)
    def new_group(
        size: int, rank: int, ranks: Sequence[int], backend: str, store: Store, *args: Any, **options: Any
    ) -> Any:
        meant = meant_by(backend)
        if meant == backend:
            return stock(size, rank, ranks, backend, store, *args, **options)
        if not ranks and size == -1:  # torch leaves it to MPI to know rank and size, and has no store there
            store, rank, size = _meet(options["timeout"])
        made = stock(size, rank, ranks, distributed_c10d.Backend(meant), store, *args, **options)
        world = distributed_c10d._world
        if made[0] in world.pg_map:  # it is not on ranks that are not in the group
            world.pg_map[made[0]] = (backend, world.pg_map[made[0]][1])
        return made

    distributed_c10d._new_process_group_helper = new_group  # type: ignore[assignment]  # with fewer types


def _meet(timeout: timedelta) -> tuple[Store, int, int]:
    from torch._C._distributed_c10d import PrefixStore

    from mpdist.torch.rendezvous import as_torch_built_with_mpi

    store, rank, size = next(as_torch_built_with_mpi(timeout=timeout))
    return PrefixStore("default_pg", store), rank, size
