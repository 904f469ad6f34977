"""Checkpoint: rank 0 writes what all ranks have, and any number of ranks reads it.

For data-parallel training, where all ranks hold the same. Sharded state belongs
to torch.distributed.checkpoint, which runs over the mpdist backend.
"""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel

from mpdist.errors import CommunicationError, UsageError
from mpdist.memory import as_buffer
from mpdist.memory.refusals import named
from mpdist.torch.sharded import is_fully_sharded, is_sharded
from mpdist.torch.waiting import finish

if TYPE_CHECKING:
    from mpdist.comm import Communicator
    from mpdist.progress.collective import Steps
    from mpdist.transport.mpi import Transport

_SHARDED = (
    "is sharded, and rank 0 has its own part only: save it with torch.distributed.checkpoint, or gather it first, by "
    "get_model_state_dict() of torch.distributed.checkpoint.state_dict with full_state_dict=True"
)


def save_checkpoint(path: str | os.PathLike[str], comm: Communicator, **parts: Any) -> None:
    """Write a checkpoint; done when it is complete in its place. Collective: all ranks call it, and rank 0 writes.

    Args:
        path: seen by rank 0; an older checkpoint stays whole until the new one is, which gets its mode. Of a symbolic
            link it is the target that is replaced.
        parts: modules, optimizers and whatever has a `state_dict()`, and plain values: what torch.load reads with
            `weights_only=True`. A module wrapped for data parallel is written as the module itself.

    Raises:
        CommunicationError: on all ranks, if rank 0 could not write, or not read what it wrote, or has only its shard
            of something. An older checkpoint is still there.
        UsageError: a module is sharded by FullyShardedDataParallel.
    """
    where = _where("save_checkpoint", path, comm)
    for name, part in parts.items():
        if is_fully_sharded(part):
            raise UsageError(f"{where}: {name} {_SHARDED}")
    problem = None
    if comm.rank == 0:
        try:
            _write(Path(path), {name: _state_of(part) for name, part in parts.items()})
        except Exception as error:  # whatever it is, the others must hear of it
            problem = error
    _agree(comm, problem, "save_checkpoint", where)


def load_checkpoint(path: str | os.PathLike[str], comm: Communicator, **parts: Any) -> dict[str, Any]:
    """Read a checkpoint, on any number of ranks. Collective.

    Args:
        path: seen by rank 0, which hands it to the others.
        parts: modules, optimizers and whatever has a `load_state_dict()`, under the names that were saved.

    Returns:
        What else is in it: plain values, and states for which no part was given.

    Raises:
        CommunicationError: on all ranks, if rank 0 could not read.
        UsageError: on all ranks, if what it read is no whole checkpoint, or a part cannot be loaded; the parts before
            that one have been.
    """
    where = _where("load_checkpoint", path, comm)
    for name, part in parts.items():
        if not hasattr(part, "load_state_dict"):
            raise UsageError(
                f"{where}: {name} is {named(part)}, which has no load_state_dict(); leave it out: plain values are in "
                "the dict that comes back"
            )
    problem, data = None, b""
    if comm.rank == 0:
        try:
            data = Path(path).read_bytes()
        except Exception as error:
            problem = error
    _agree(comm, problem, "load_checkpoint", where)
    data = _told(comm, data, "load_checkpoint")
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        text = f"{_fault(data)} ({type(error).__name__}: {error})"
        raise UsageError(f"{where}: {text}") from error
    missing = sorted(parts.keys() - state.keys())
    if missing:
        raise UsageError(f"{where}: the file has {sorted(state)}, and no {', '.join(missing)}")
    for name, part in parts.items():
        try:
            _unwrapped(part).load_state_dict(state.pop(name))
        except Exception as error:
            raise UsageError(f"{where}: {name} does not take what was saved under its name: {error}") from error
    return dict(state)


def _where(what: str, path: str | os.PathLike[str], comm: Communicator) -> str:
    return f"{what}({os.fspath(path)!r}) on '{comm.name}' (rank {comm.rank})"


def _fault(data: bytes) -> str:
    """What is wrong with a file that does not load, and what to do."""
    if not data:
        return "the file is empty, as what wrote it was stopped, or the disk is full: load an older checkpoint"
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return (
            f"the file's {len(data)} bytes are no whole checkpoint, but cut off or of another kind: copy it anew, or "
            "load an older one; save_checkpoint leaves only whole ones"
        )
    return (
        f"the file's {len(data)} bytes are damaged, or hold what torch.load does not read with weights_only=True: copy "
        "it anew, or write it with save_checkpoint"
    )


def _unwrapped(part: Any) -> Any:
    """The module itself, of one that is wrapped for data parallel or compiled, in whatever order."""
    while True:
        if isinstance(part, TorchDataParallel):
            part = part.module
        elif isinstance(part, torch.nn.Module) and "_orig_mod" in part._modules:
            part = part._orig_mod
        else:
            return part


def _state_of(part: Any) -> Any:
    part = _unwrapped(part)
    return part.state_dict() if hasattr(part, "state_dict") else part


def _write(path: Path, state: Mapping[str, Any]) -> None:
    """Under another name first, so that there is a whole checkpoint at any time."""
    shard = _shard(state)
    if shard is not None:
        raise UsageError(f"{shard} {_SHARDED}")
    path = path.resolve()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists():
            draft.touch(0o600)  # until it is complete, nobody reads what the file's mode would hide
        _save(state, draft)
        if path.exists():
            shutil.copymode(path, draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _save(state: Mapping[str, Any], draft: Path) -> None:
    """Save, and see whether it can be loaded again.

    Raises:
        UsageError: it cannot; the text names the entry.
    """
    try:
        torch.save(dict(state), draft)
        _read_back(draft)
    except Exception as error:
        culprit = _culprit("", state)
        if culprit is None:
            raise
        name, value = culprit
        raise UsageError(
            f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which torch.load does not read with "
            "weights_only=True: save tensors, numbers, strings, and dicts and lists of them (x.item(), "
            "torch.as_tensor(x), str(x)), or allow the class with torch.serialization.add_safe_globals where it is "
            "saved and loaded"
        ) from error


def _shard(state: Any) -> str | None:
    """The name of an entry of which rank 0 has its shard only."""
    seen: set[int] = set()
    left: deque[tuple[str, Any]] = deque([("", state)])
    while left:
        name, value = left.popleft()
        if is_sharded(value):
            return name
        if not isinstance(value, Mapping | list | tuple) or id(value) in seen:
            continue
        seen.add(id(value))
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, entry in entries:
            if isinstance(entry, torch.Tensor | Mapping | list | tuple):
                left.append((f"{name}[{key!r}]" if name else str(key), entry))
    return None


def _culprit(name: str, value: Any) -> tuple[str, Any] | None:
    """The innermost entry that does not come back from a file, and its name; None if all of it does."""
    if _comes_back(value):
        return None
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, list | tuple):
        entries = enumerate(value)
    for key, entry in entries:
        inner = _culprit(f"{name}[{key!r}]" if name else str(key), entry)
        if inner is not None:
            return inner
    return name, value


def _comes_back(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception:
        return False
    return True


def _read_back(file: Path) -> None:
    """Load, and drop it. On "meta" no elements are read; quantized tensors do not load there."""
    try:
        torch.load(file, map_location="meta", weights_only=True)
    except Exception:
        torch.load(file, map_location="cpu", weights_only=True)


def _agree(comm: Communicator, problem: Exception | None, what: str, where: str) -> None:
    """Raise on all ranks if rank 0 has a problem."""
    text = _told(comm, b"" if problem is None else f"{type(problem).__name__}: {problem}".encode(), what)
    if text:
        raise CommunicationError(f"{where}: rank 0 says: {text.decode()}") from problem


def _told(comm: Communicator, data: bytes, what: str) -> bytes:
    """The bytes of rank 0, when all ranks have them: one that calls another collective, or none, is named."""
    told: bytes = finish(comm._post_with_headers(what, _to_all, str, data))
    return told


def _to_all(transport: Transport, data: bytes) -> Steps[bytes]:
    length = np.array([len(data)])
    yield transport.ibroadcast(as_buffer(length), 0)
    room = np.frombuffer(bytearray(data if transport.rank == 0 else int(length[0])), np.uint8)
    yield transport.ibroadcast(as_buffer(room), 0)
    yield transport.ibarrier()
    return room.tobytes()
