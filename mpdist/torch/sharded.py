"""Sharded: tensors and modules of which each rank holds its own part, as FSDP and tensor parallelism make them.

torch's modules of them are not loaded here: what is not loaded has made none.
"""

from __future__ import annotations

import sys

import torch

_TENSORS = (
    ("torch.distributed.tensor", "DTensor"),
    ("torch.distributed._tensor", "DTensor"),  # torch 2.4
    ("torch.distributed._shard.sharded_tensor", "ShardedTensor"),
)


def is_sharded(x: object) -> bool:
    """Whether it is a tensor of torch's that is shared out over ranks."""
    return isinstance(x, torch.Tensor) and any(_is(x, *kind) for kind in _TENSORS)


def is_fully_sharded(module: object) -> bool:
    """Whether FullyShardedDataParallel has any part of it, whose `state_dict()` is a collective."""
    parts = module.modules() if isinstance(module, torch.nn.Module) else ()
    return any(_is(part, "torch.distributed.fsdp", "FullyShardedDataParallel") for part in parts)


def _is(x: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(x, kind)
