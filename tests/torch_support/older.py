"""Older: what tests use of torch, from where older versions of it have it."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import ScheduleGPipe

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
    "Replicate",
    "Shard",
    "distribute_tensor",
    "fully_shard",
    "has_events_of_two_threads",
    "hears_of_invariants",
    "keeps_order",
    "loads_in_a_part",
    "scales_gradients",
    "shapes_of",
    "shards_on_cpu",
]

keeps_order = "sort_ranks" in inspect.signature(dist.new_group).parameters
"""Whether new_group can leave its ranks as they are given."""

scales_gradients = "scale_grads" in inspect.signature(ScheduleGPipe).parameters
"""Whether a pipeline divides gradients by the number of microbatches."""

hears_of_invariants = not torch.__version__.startswith(("2.11.", "2.12."))
"""Whether a sparse tensor made with check_invariants=False comes without the warning that nothing was said."""

shards_on_cpu = torch.__version__ >= "2.7" or not torch.version.cuda
"""Whether FSDP2 needs no GPU where torch is built for CUDA."""

loads_in_a_part = torch.__version__ >= "2.5"
"""Whether some of the ranks can load a checkpoint: older versions gather the keys of all."""


def shapes_of(stage: type, x: torch.Tensor) -> dict[str, Any]:
    """Arguments for a pipeline's stage, which older versions do not find out from what it is given."""
    given = inspect.signature(stage).parameters["input_args"]
    return {"input_args": (x,)} if given.default is given.empty else {}


def has_events_of_two_threads() -> bool:
    """Whether a profiler shows an event that ends on another thread than it began on."""
    record: Any = torch._C._profiler._RecordFunctionFast("event", [])  # type: ignore[attr-defined]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        record.__enter__()
        thread = threading.Thread(target=record.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
    return any(event.name == "event" for event in profiler.events())
