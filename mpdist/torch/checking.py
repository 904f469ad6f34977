"""check: what people get wrong in data-parallel training, found and named before it costs a night."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from linecache import getlines
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel
from torch.nn.parameter import is_lazy

from mpdist.errors import CollectiveMismatch, DeviceFailed, Unavailable, UsageError
from mpdist.gradients.agreement import check_descriptions, ranks_text
from mpdist.memory.accelerator import accelerator_of
from mpdist.memory.buffer import TORCH_DEVICES
from mpdist.torch.data_parallel.buffers import is_sparse
from mpdist.torch.data_parallel.outputs import tensors_in
from mpdist.torch.data_parallel.start import describe, refusals
from mpdist.torch.data_parallel.waiting import hold
from mpdist.torch.devices import streams_of
from mpdist.torch.sharded import is_sharded
from mpdist.torch.waiting import finish

if TYPE_CHECKING:
    from mpdist.comm import Communicator

# With fewer samples on a rank, batch norm's means and variances are mostly noise.
NORM_SAMPLES = 16

# So many tensors are named.
NAMED = 4


@dataclass
class Findings:
    """What `check` found, the same on all ranks.

    Attributes:
        problems: what makes training wrong.
        hints: what is wrong often, but may be meant.
    """

    problems: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.problems or self.hints)

    def __str__(self) -> str:
        lines = [f"problem: {text}" for text in self.problems] + [f"hint: {text}" for text in self.hints]
        return "\n".join(lines) or "nothing found"

    def raise_problems(self) -> None:
        """Raise UsageError if there are problems; hints pass."""
        if self.problems:
            raise UsageError("\n".join(self.problems))


def check(model: nn.Module, batch: Any = None, *, loader: Any = None, comm: Communicator | None = None) -> Findings:
    """Look for mistakes; collective, and changes nothing.

    Args:
        model: wrapped or not.
        batch: this rank's first batch, tensors in any nesting.
        loader: this rank's DataLoader, or anything with a length; one without is left out.
        comm: the ranks that train together; missing: the world.
    """
    if comm is None:
        from mpdist.runtime import init

        comm = init()
    module = model.module if isinstance(model, TorchDataParallel) else model
    findings = Findings()
    findings.problems += _devices(comm, module)
    findings.problems += _differences(comm, module, is_wrapped=module is not model)
    findings.problems += _batch_norm(comm, module, batch)
    findings.problems += _lengths(comm, loader)
    findings.hints += _same_data(comm, batch)
    findings.hints += _sampler(comm, loader)
    findings.hints += _shared_devices(comm, module)
    return findings


def _devices(comm: Communicator, module: nn.Module) -> Iterator[str]:
    devices = sorted({str(parameter.device) for parameter in module.parameters()})
    for rank, count in enumerate(_gathered(comm, len(devices))):
        if count > 1:
            where = f" ({', '.join(devices)})" if rank == comm.rank else ""
            yield f"on rank {rank} the module's parameters are on {count} devices{where}: move it to one"


def _differences(comm: Communicator, module: nn.Module, is_wrapped: bool) -> Iterator[str]:
    """Forms first: values can be compared only where those are equal; what is wrapped has been taken as it is."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for what, named in (("parameters", [*module.named_parameters()]), ("buffers", [*module.named_buffers()])):
        try:
            hold(check_descriptions(comm, what, [describe(name, tensor) for name, tensor in named]))
        except CollectiveMismatch as error:
            yield f"{error}: build the same module on all ranks"
            continue
        named = [(name, tensor) for name, tensor in named if not is_sharded(tensor)]  # each rank has another part
        if not is_wrapped:
            yield from refusals(what, [(name, tensor) for name, tensor in named if name not in ignored])
        named = [(name, tensor) for name, tensor in named if not is_lazy(tensor)]
        different = _different_values(comm, [tensor for _, tensor in named])
        if different:
            names = ", ".join(named[index][0] for index, _ in different[:NAMED])
            ranks = sorted({rank for _, others in different for rank in others})
            yield (
                f"{len(different)} of {len(named)} {what} begin with other values on {ranks_text(ranks)} than on rank "
                f"0 ({names}{', ...' if len(different) > NAMED else ''}): set the same seed before the module is made, "
                "or wrap it in DistributedDataParallel, which gives all ranks those of rank 0"
            )


def _different_values(comm: Communicator, tensors: Sequence[Tensor]) -> list[tuple[int, list[int]]]:
    """Index and ranks of the tensors that are not what they are on rank 0."""
    digests = np.array([_digest([tensor]) for tensor in tensors], np.int64)
    if not len(digests):
        return []
    everyone = finish(comm.all_gather(digests))
    found = []
    for index in range(len(tensors)):
        others = [rank for rank in range(comm.size) if everyone[rank][index] != everyone[0][index]]
        if others:
            found.append((index, others))
    return found


def _batch_norm(comm: Communicator, module: nn.Module, batch: Any) -> Iterator[str]:
    from mpdist.torch.sync_batch_norm import SyncBatchNorm

    names = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and not isinstance(part, SyncBatchNorm | nn.SyncBatchNorm)
    ]
    samples = min(_gathered(comm, _samples(batch)))
    if names and 0 < samples < NORM_SAMPLES:
        yield (
            f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: plain batch norm sees {samples} "
            "samples of a rank's own; take mpdist.torch.convert_sync_batchnorm(module), or GroupNorm"
        )


def _samples(batch: Any) -> int:
    """Samples in a batch; 0 where it has no tensor."""
    return next((tensor.size(0) for tensor in tensors_in(batch) if tensor.dim()), 0)


def _lengths(comm: Communicator, loader: Any) -> Iterator[str]:
    lengths = {rank: length for rank, length in enumerate(_gathered(comm, _length(loader))) if length >= 0}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{length} on rank {rank}" for rank, length in islice(lengths.items(), 16))
        yield (
            f"the numbers of batches differ ({listed}), so some rank will wait for a backward that never comes: take "
            "DistributedSampler, or `with model.join():`"
        )


def _length(loader: Any) -> int:
    """Batches of a loader; -1 where it cannot say, as a DataLoader of an IterableDataset."""
    try:
        return len(loader)
    except TypeError:
        return -1


def _same_data(comm: Communicator, batch: Any) -> Iterator[str]:
    tensors = [*tensors_in(batch)]
    ranks_of: dict[int, list[int]] = {}
    for rank, digest in enumerate(_gathered(comm, _digest(tensors) if tensors else comm.rank)):
        ranks_of.setdefault(digest, []).append(rank)
    same = [ranks_text(ranks) for ranks in ranks_of.values() if len(ranks) > 1]
    if same:
        yield (
            f"{', and so have '.join([f'{same[0]} have the same first batch', *same[1:]])}: give each its part of the "
            "data, with DistributedSampler(dataset, comm.size, comm.rank)"
        )


def _sampler(comm: Communicator, loader: Any) -> Iterator[str]:
    sampler: Any = getattr(loader, "sampler", None)
    is_distributed = isinstance(sampler, torch.utils.data.DistributedSampler)
    dealt = set(_gathered(comm, sampler.num_replicas if is_distributed else comm.size))
    if dealt != {comm.size}:
        numbers = " or ".join(map(str, sorted(dealt - {comm.size})))
        yield (
            f"the DistributedSampler deals the data to {numbers} ranks, and here are {comm.size}: give it "
            "num_replicas=comm.size, rank=comm.rank, or some data is seen by nobody, or twice"
        )
    never_set = is_distributed and sampler.shuffle and sampler.epoch == 0 and not _is_set_by_a_caller()
    if any(_gathered(comm, int(never_set))):
        yield (
            "the DistributedSampler is in epoch 0, as it is if nobody sets it: call loader.sampler.set_epoch(epoch) at "
            "the start of each epoch, or all have the same order"
        )


def _is_set_by_a_caller() -> bool:
    """Whether a file of the program that is running now names `set_epoch`: the loop is not there yet."""
    frame: FrameType | None = sys._getframe()
    files = set()
    while frame is not None:
        files.add(frame.f_code.co_filename)
        frame = frame.f_back
    files.discard(__file__)
    return any("set_epoch(" in line for file in files for line in getlines(file))


def _shared_devices(comm: Communicator, module: nn.Module) -> Iterator[str]:
    """Ranks of a node that use one device while others have nothing to do."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    index, count, number = -1, 0, -1
    if device.type in TORCH_DEVICES:
        index, count, number = device.index, streams_of(device).device_count(), _number_of(device)
    nodes = comm._channel.engine.nodes
    users: dict[tuple[int, int], list[int]] = {}
    indices, counts = _gathered(comm, index), _gathered(comm, count)
    for rank, used in enumerate(_gathered(comm, number)):
        if used >= 0:
            users.setdefault((nodes[comm.ranks[rank]], used), []).append(rank)
    for (node, _), ranks in users.items():
        in_use, there = len([where for where, _ in users if where == node]), counts[ranks[0]]
        if len(ranks) > 1 and in_use < there:
            yield (
                f"{ranks_text(ranks)} use device {indices[ranks[0]]} of their node, which has {there}, {in_use} in "
                f"use: call torch.{device.type}.set_device(world.local_rank % {there}) before anything is put there"
            )


def _number_of(device: torch.device) -> int:
    """The same in all processes of the node, which may count their devices differently (CUDA_VISIBLE_DEVICES)."""
    try:
        return accelerator_of(TORCH_DEVICES[device.type](device.index)).identity()
    except (Unavailable, DeviceFailed):
        return int(device.index)


def _digest(tensors: Sequence[Tensor]) -> int:
    """64 bits of the values."""
    state = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        for part in _parts(tensor.detach()):
            if not part.is_meta:
                plain = part.cpu().resolve_conj().resolve_neg()
                state.update(plain.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(state.digest(), "little", signed=True)


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensor, or the indices and values of a sparse one, or what is nested in it."""
    if tensor.is_nested:
        return tuple(part for each in tensor.unbind() for part in _parts(each))
    if not is_sparse(tensor):
        return (tensor,)
    listed = tensor.to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]  # torch's
    return listed.indices(), listed.values()


def _gathered(comm: Communicator, number: int) -> list[int]:
    """This number of each rank."""
    numbers: list[int] = finish(comm.all_gather(np.array([number], np.int64))).reshape(-1).tolist()
    return numbers
