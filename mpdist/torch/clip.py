"""Clipping: the norm of gradients that are spread over ranks.

After DistributedDataParallel all ranks hold the same gradients, and torch's own
`clip_grad_norm_` is right. Where each rank holds other parameters (stages of a
pipeline, shards), the norm is that of all of them together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpdist.torch.waiting import finish

if TYPE_CHECKING:
    from mpdist.comm import Communicator


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    comm: Communicator,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that their norm over all ranks is at most `max_norm`; collective.

    Args:
        parameters: those of this rank, which no other rank holds; none is a rank with nothing to clip.
        norm_type: 2, or infinity for the largest absolute value.

    Returns:
        The norm before, the same on all ranks, on the CPU.

    Raises:
        RuntimeError: on all ranks, with `error_if_nonfinite`, if the norm is infinite or not a number.
    """
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    gradients = [parameter.grad for parameter in given if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(gradient, norm_type).double() for gradient in gradients]
    total: Tensor = torch.zeros((), dtype=torch.float64, device="cpu")
    if norms:
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type).cpu()
    if norm_type == float("inf"):
        finish(comm.all_reduce(total, op="max"))
    else:
        total = total**norm_type
        finish(comm.all_reduce(total))
        total = total ** (1 / norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the norm of all gradients on '{comm.name}' (rank {comm.rank}) is {total.item()}")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    if gradients:
        torch._foreach_mul_(gradients, factor.item())
    return total
