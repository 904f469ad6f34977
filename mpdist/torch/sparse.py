"""Sparse all_reduce: every rank collects the entries of all, and adds them up.

Indices and values travel as they are, each rank's as many as it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpdist.torch.errors import WrongCall
from mpdist.torch.reductions import SUM, kind_of
from mpdist.torch.staging import check_strided, readable

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work as TorchWork

    from mpdist.torch.group import Group


def all_reduce(group: Group, tensor: Tensor, op: Any, opts: Any) -> TorchWork:
    """The sum of sparse COO tensors of one shape, in place.

    Raises:
        WrongCall: the tensor is of another layout, or the op is another.
    """
    if not tensor.is_sparse:
        check_strided(tensor)
    if op != SUM:
        raise WrongCall(f"all_reduce of sparse tensors sums only, got {kind_of(op)}; use to_dense()")
    own = tensor.detach().coalesce()
    posted_indices = group._comm.all_gather([readable(own.indices().t())])
    posted = group._comm.all_gather([readable(own.values())])

    def add_up() -> None:
        indices, values = posted_indices.result(), posted.result()
        with torch.no_grad():
            total = torch.sparse_coo_tensor(
                torch.cat(list(indices)).t(),
                torch.cat(list(values)),
                own.shape,
                dtype=own.dtype,
                check_invariants=False,  # where it is not said, torch 2.13 warns; torch has made these tensors
            )
            tensor.copy_(total.coalesce())

    posted_indices.forget()
    return group._hand(posted, opts, [tensor], add_up)
