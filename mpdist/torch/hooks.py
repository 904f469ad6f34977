"""Hooks: how DDP may compress gradients on a CPU.

torch refuses its own bfloat16 hook, by its name, unless the backend is NCCL. The sum is formed in float32 and
rounded once; the gradients are divided before, as torch's hooks do.

DDP looks at a hook's annotations, and does not know them as strings: so there is no `from __future__` here.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket


def bf16_compress(group: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook: `model.register_comm_hook(None, mpdist.torch.bf16_compress)`.

    Args:
        group: the process group; None for the default group.
    """
    group = dist.group.WORLD if group is None else group
    assert group is not None
    gradients: Tensor = bucket.buffer()
    half = gradients.to(torch.bfloat16).div_(group.size())
    reduced = dist.all_reduce(half, group=group, async_op=True).get_future()

    def widen(future: Any) -> Tensor:
        gradients.copy_(future.value()[0])
        return gradients

    return reduced.then(widen)  # type: ignore[no-any-return]
