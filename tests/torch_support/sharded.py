"""Sharded: modules, tensors and pipelines of torch, from where older versions have them. Slow: import it where used."""

from __future__ import annotations

import inspect

from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

try:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
except ImportError:  # torch 2.4, 2.5
    from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard

try:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import Replicate, Shard, distribute_tensor

__all__ = [
    "MixedPrecisionPolicy",
    "PipelineStage",
    "Replicate",
    "ScheduleGPipe",
    "Shard",
    "distribute_tensor",
    "fully_shard",
    "scales_gradients",
]

scales_gradients = "scale_grads" in inspect.signature(ScheduleGPipe).parameters
"""Whether a pipeline divides gradients by the number of microbatches."""
