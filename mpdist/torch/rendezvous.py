"""Rendezvous: how the ranks of a job find each other. MPI knows already.

* mpi:// has rank and size from MPI, and the store over MPI.
* env:// is the same for "mpdist" and for "mpi" where that means it, checked against RANK and WORLD_SIZE where they are
  set; for other backends it is torch's own, with the variables that an MPI launcher does not set filled in.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from torch._C._distributed_c10d import PrefixStore

import mpdist
from mpdist.torch.callers import variable_of_caller
from mpdist.torch.environment import VARIABLES, setup_env
from mpdist.torch.errors import WrongCall
from mpdist.torch.mpi_name import meant_by
from mpdist.torch.registration import NAME
from mpdist.torch.store import DEFAULT_TIMEOUT, MpiStore
from mpdist.transport.facts import launched_as

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Found = Iterator[tuple["Store", int, int]]

_meetings = itertools.count()
"""Each meeting has keys of its own: those of an earlier one are still there."""


def over_mpi(url: str, timeout: timedelta = DEFAULT_TIMEOUT, **_: Any) -> Found:
    """init_method="mpi://"."""
    world = mpdist.init()
    query = {name: int(values[0]) for name, values in parse_qs(urlsplit(url).query).items()}
    _check(world.rank, world.size, query.get("rank", -1), query.get("world_size", -1), "init_process_group was given")
    store = _store()
    store.set_timeout(timeout)
    yield PrefixStore(f"{next(_meetings)}", store), world.rank, world.size


@functools.cache
def _store() -> MpiStore:
    """Of all meetings: a store lives as long as the process."""
    return MpiStore("meeting")


def by_environment(url: str, stock: Callable[..., Found], **options: Any) -> Found:
    """init_method="env://", which is torch's default."""
    if _backend_of_caller() == NAME:
        setup_env()
        _check_environment()
        yield from over_mpi(url, **options)
        return
    if launched_as(os.environ) is not None and not all(name in os.environ for name in VARIABLES):
        setup_env()
    yield from stock(url, **options)


def as_torch_built_with_mpi(**options: Any) -> Found:
    """For init_process_group("mpi"): rank and size are MPI's, whatever else is in the environment."""
    setup_env()
    if mpdist.init().size == 1:  # torchrun, say: each process would train alone, without a word
        _check_environment()
    yield from over_mpi("mpi://", **options)


def _check_environment() -> None:
    world = mpdist.init()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _check(world.rank, world.size, rank, size, "RANK and WORLD_SIZE in the environment say")


def _check(rank: int, size: int, given_rank: int, given_size: int, who: str) -> None:
    if given_rank not in (-1, rank) or given_size not in (-1, size):
        raise WrongCall(
            f"{who} rank {given_rank} of {given_size}, but MPI has started this process as rank {rank} of {size}: both "
            "must agree. Start the script by `mpirun -n N` or `mpdist run -n N`, and leave rank, world_size, RANK and "
            "WORLD_SIZE to it; before a library that sets them by itself call mpdist.torch.setup_env()"
        )


def _backend_of_caller() -> str:
    """The backend that init_process_group was called with, which torch does not tell its handlers."""
    names = meant_by(str(variable_of_caller("init_process_group", "backend") or "").lower())
    return NAME if NAME in names else names
