"""Older: what tests use of torch, from where older versions of it have it."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
import torch.distributed as dist

keeps_order = "sort_ranks" in inspect.signature(dist.new_group).parameters
"""Whether new_group can leave its ranks as they are given."""

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
