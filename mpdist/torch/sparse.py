"""Sparse all_reduce: every rank collects the entries of all, and adds them up.

Indices and values travel as they are, each rank's as many as it has; behind the indices the sizes of their axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpdist.errors import CollectiveMismatch
from mpdist.gradients.agreement import ranks_text
from mpdist.torch.errors import WrongCall, translated
from mpdist.torch.reductions import SUM, kind_of
from mpdist.torch.staging import check_strided, readable

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work as TorchWork

    from mpdist.torch.group import Group


def all_reduce(group: Group, tensor: Tensor, op: Any, opts: Any) -> TorchWork:
    """The sum of sparse COO tensors of one shape, in place.

    Raises:
        WrongCall: the tensor is of another layout, or the op is another.
        OperationFailed: the ranks' tensors are of different shapes; on all ranks, when all have arrived.
    """
    if not tensor.is_sparse:
        check_strided(tensor)
    if op != SUM:
        raise WrongCall(f"all_reduce of sparse tensors sums only, got {kind_of(op)}; use to_dense()")
    own = tensor.detach().coalesce()
    indices = own.indices()
    sizes = indices.new_tensor(own.shape[: own.sparse_dim()])
    posted_rows = group._comm.all_gather([torch.cat([indices.t(), sizes[None]])])
    posted = group._comm.all_gather([readable(own.values())])

    def add_up() -> None:
        rows, values = posted_rows.result(), posted.result()
        _check_shapes(group, rows, values)
        with torch.no_grad():
            total = torch.sparse_coo_tensor(
                torch.cat([each[:-1] for each in rows]).t(),
                torch.cat(list(values)),
                own.shape,
                dtype=own.dtype,
                check_invariants=False,  # where it is not said, torch 2.13 warns; torch has made these tensors
            )
            tensor.copy_(total.coalesce())

    posted_rows.forget()
    return group._hand(posted, opts, [tensor], add_up)


def _check_shapes(group: Group, rows: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    shapes = [
        f"shape {(*each[-1].tolist(), *of.shape[1:])}, sparse_dim {each.shape[1]}"
        for each, of in zip(rows, values, strict=True)
    ]
    ranks: dict[str, list[int]] = {}
    for rank, shape in enumerate(shapes):
        ranks.setdefault(shape, []).append(rank)
    if len(ranks) > 1:
        found = "; ".join(f"{ranks_text(who)}: {shape}" for shape, who in ranks.items())
        text = f"all_reduce of sparse tensors on {group._channel.where()} differs between ranks: {found}"
        raise translated(CollectiveMismatch(text, dict(enumerate(shapes))))
