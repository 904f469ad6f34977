"""Checkpoint: rank 0 writes what all ranks have, and any number of ranks reads it.

For data-parallel training, where all ranks hold the same. Sharded state belongs
to torch.distributed.checkpoint, which runs over the mpdist backend.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel

from mpdist.errors import CommunicationError
from mpdist.torch.data_parallel.waiting import finish

if TYPE_CHECKING:
    from mpdist.comm import Communicator


def save_checkpoint(path: str | os.PathLike[str], comm: Communicator, **parts: Any) -> None:
    """Write a checkpoint; done when it is complete in its place. Collective.

    Args:
        path: seen by rank 0; an older checkpoint stays whole until the new one is.
        parts: modules, optimizers and whatever has a `state_dict()`, and plain values. A module wrapped for data
            parallel is written as the module itself.

    Raises:
        CommunicationError: on all ranks, if rank 0 could not write.
    """
    problem = ""
    if comm.rank == 0:
        try:
            _write(Path(path), {name: _state_of(part) for name, part in parts.items()})
        except (OSError, RuntimeError) as error:  # torch.save has its own words for a missing folder
            problem = str(error)
    _agree(comm, problem, f"save_checkpoint({os.fspath(path)!r})")


def load_checkpoint(path: str | os.PathLike[str], comm: Communicator, **parts: Any) -> dict[str, Any]:
    """Read a checkpoint, on any number of ranks. Collective.

    Args:
        path: seen by rank 0, which hands it to the others.
        parts: modules, optimizers and whatever has a `load_state_dict()`, under the names that were saved.

    Returns:
        What else is in it: plain values, and states for which no part was given.

    Raises:
        CommunicationError: on all ranks, if rank 0 could not read.
    """
    problem, data = "", b""
    if comm.rank == 0:
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            problem = str(error)
    _agree(comm, problem, f"load_checkpoint({os.fspath(path)!r})")
    state = torch.load(io.BytesIO(_shared(comm, data)), map_location="cpu", weights_only=True)
    missing = sorted(parts.keys() - state.keys())
    if missing:
        raise KeyError(f"{os.fspath(path)} has {sorted(state)}, and no {', '.join(missing)}")
    for name, part in parts.items():
        _unwrapped(part).load_state_dict(state.pop(name))
    return dict(state)


def _unwrapped(part: Any) -> Any:
    return part.module if isinstance(part, TorchDataParallel) else part


def _state_of(part: Any) -> Any:
    part = _unwrapped(part)
    return part.state_dict() if hasattr(part, "state_dict") else part


def _write(path: Path, state: Mapping[str, Any]) -> None:
    """Under another name first, so that there is a whole checkpoint at any time."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(dict(state), draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _agree(comm: Communicator, problem: str, what: str) -> None:
    """Raise on all ranks if rank 0 has a problem."""
    text = _shared(comm, problem.encode())
    if text:
        raise CommunicationError(f"{what} on '{comm.name}' (rank {comm.rank}): rank 0 says: {bytes(text).decode()}")


def _shared(comm: Communicator, data: bytes) -> bytes:
    """The bytes of rank 0."""
    length = np.array([len(data)])
    finish(comm.broadcast(length, src=0))
    room = np.frombuffer(bytearray(data if comm.rank == 0 else int(length[0])), np.uint8)
    finish(comm.broadcast(room, src=0))
    return room.tobytes()
