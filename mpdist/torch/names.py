"""Names: what torch calls an operation of a process group, in each of its versions.

torch 2.13 renamed several methods, and 2.14 added one. We write each method under its new name, and give it the old
ones too: from C++ and from Python each version finds the one that it knows. Pure data, tested without torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

# Ours -> what other versions of torch call it.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "all_gather_single": ("_allgather_base",),
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced",),
    "gather_single": ("gather_into_tensor",),
    "reduce_scatter_single": ("_reduce_scatter_base",),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced",),
    "all_to_all_single": ("alltoall_base",),
}

OPERATIONS: tuple[str, ...] = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "broadcast",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "gather",
    "gather_single",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "all_to_all_single",
    "alltoall",
    "barrier",
    "send",
    "recv",
    "recv_anysource",
)
"""All that a group can do, as we name it."""

Group = TypeVar("Group", bound=type)


def with_all_names(group: Group, wrap: Callable[[Any], Any]) -> Group:
    """Give a class each operation under all its names, wrapped."""
    for name in OPERATIONS:
        plain = getattr(group, name)
        method: Any = functools.wraps(plain)(wrap(plain))
        setattr(group, name, method)
        for other in OTHER_NAMES.get(name, ()):
            setattr(group, other, method)
    return group
