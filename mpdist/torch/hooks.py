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

from mpdist.errors import UsageError


def bf16_compress(group: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook: `model.register_comm_hook(None, mpdist.torch.bf16_compress)`.

    Args:
        group: the process group; None for the default group.

    Raises:
        UsageError: None, and there is no default group.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise UsageError(
            "bf16_compress takes torch's default process group, and there is none: call "
            'torch.distributed.init_process_group("mpdist") first, or give register_comm_hook a group in place of None'
        )
    gradients: Tensor = bucket.buffer()
    half = gradients.to(torch.bfloat16).div_(group.size())
    reduced = dist.all_reduce(half, group=group, async_op=True).get_future()

    def widen(future: Any) -> Tensor:
        gradients.copy_(future.value()[0])
        return gradients

    return reduced.then(widen)  # type: ignore[no-any-return]
