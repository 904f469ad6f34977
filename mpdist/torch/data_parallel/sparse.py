"""Sparse gradients, as embeddings with `sparse=True` have them: rows of all ranks are gathered and added."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpdist.errors import UsageError
from mpdist.torch.waiting import finish

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpdist.comm import Communicator
    from mpdist.torch.data_parallel.notes import Notes
    from mpdist.torch.data_parallel.slot import Slot


def sparse_parameters(module: torch.nn.Module) -> set[Tensor]:
    """The parameters whose gradients are sparse."""
    return {
        part.weight
        for part in module.modules()
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse
    }


def average_all(comm: Communicator, slots: Sequence[Slot], notes: Notes, divisor: float, is_absent: bool) -> None:
    """Average the gradients that are sparse, and that some rank has."""
    sparse = [slot for slot in slots if slot.is_sparse]
    used = notes.used() if sparse else []
    for slot in sparse:
        if used[slot.index]:
            average(comm, slot, divisor, is_absent)


def average(comm: Communicator, slot: Slot, divisor: float, is_absent: bool) -> None:
    """Replace the gradient by the sum over the ranks, divided; a rank without one contributes no rows."""
    parameter = slot.parameter
    gradient = None if is_absent else parameter.grad
    if gradient is not None and gradient.layout is not torch.sparse_coo:
        raise UsageError(
            f"{slot.name} belongs to an embedding with sparse=True, and got a dense gradient; "
            "say sparse=False if it is used elsewhere too"
        )
    if gradient is None:
        indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty((0, *parameter.shape[1:]))
    else:
        gradient = gradient.coalesce()
        indices, values = gradient.indices(), gradient.values()
    rows = finish(comm.all_gather([indices.reshape(-1).contiguous()]))
    blocks = finish(comm.all_gather([values.contiguous().reshape(-1)]))
    if is_absent:
        return
    all_rows = torch.cat([_as_tensor(block) for block in rows]).reshape(1, -1)
    all_values = torch.cat([_as_tensor(block) for block in blocks]).reshape(-1, *parameter.shape[1:])
    if not all_rows.numel() and parameter.grad is None:
        return
    # Said explicitly, for torch 2.13 warns where it is left out; each rank's torch has made its rows within bounds.
    summed = torch.sparse_coo_tensor(all_rows, all_values / divisor, parameter.shape, check_invariants=False)
    parameter.grad = summed.coalesce()


def _as_tensor(block: object) -> Tensor:
    return block if isinstance(block, Tensor) else torch.as_tensor(block)
