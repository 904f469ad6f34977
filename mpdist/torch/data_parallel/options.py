"""Options: what torch's class takes or has and ours does not, or does anyway."""

from __future__ import annotations

from collections.abc import Mapping

from mpdist.errors import UsageError

# What torch ignores on the CPU too, or what is always so here.
IGNORED = ("dim", "check_reduction", "batched_grad_copy")

# What to do instead.
REFUSED = {
    "mixed_precision": "run forward under torch.autocast, or convert the module",
    "bucket_cap_mb_list": "bucket_cap_mb is for all buckets",
    "delay_all_reduce_named_params": "gradients are averaged within the backward that makes them",
    "param_to_hook_all_reduce": "gradients are averaged within the backward that makes them",
    "skip_all_reduce_unused_params": "freeze what is never used: requires_grad_(False)",
}

# The same for methods, which need torch's own reducer.
REFUSED_METHODS = {
    "_register_builtin_comm_hook": "take register_comm_hook() with one of torch's default_hooks",
    "_register_accum_grad_hook": "gradients are averaged without it",
    "_distributed_broadcast_coalesced": "take the broadcast of .comm",
    "_register_buffer_comm_hook": "say broadcast_buffers=False, and reduce buffers yourself",
}


def refused_method(name: str) -> UsageError:
    """What a call of it raises."""
    return UsageError(f"{name}() is for torch's own DistributedDataParallel only: {REFUSED_METHODS[name]}")


def check(options: Mapping[str, object]) -> None:
    """Raise UsageError for what is refused, TypeError for what torch does not know either."""
    for name, value in options.items():
        if name in IGNORED:
            continue
        if name not in REFUSED:
            raise TypeError(f"DistributedDataParallel got an unexpected keyword argument {name!r}")
        if value:
            raise UsageError(f"{name}={value!r} is for torch's own DistributedDataParallel only: {REFUSED[name]}")
