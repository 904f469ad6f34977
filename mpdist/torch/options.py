"""Options: what torch hands to an operation, read whatever form it has.

`opts` is one of torch's option records. The short forms of some methods take the value itself in its place
(`group.allreduce(tensor, ReduceOp.SUM)`), and a bare tensor where a list of one is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from mpdist.torch.errors import WrongCall

NO_TIMEOUT = timedelta(0)


def only(tensors: Tensor | Sequence[Tensor], what: str) -> Tensor:
    """The one tensor of a list; several would be several devices, of which a rank has one."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise WrongCall(f"{what} takes one tensor, got {len(tensors)}; use the coalesced form for several")
    return tensors[0]


def only_list(lists: Sequence[Sequence[Tensor]] | Sequence[Tensor], what: str, size: int) -> Sequence[Tensor]:
    """The one list in a list of lists, of `size` tensors; the short form gives that list itself."""
    inner: Any = lists
    if len(lists) and not isinstance(lists[0], Tensor):
        if len(lists) != 1:
            raise WrongCall(f"{what} takes one list of tensors, got {len(lists)}")
        inner = lists[0]
    if len(inner) != size:
        raise WrongCall(f"{what} needs one tensor for each of the {size} ranks, got {len(inner)}")
    return inner  # type: ignore[no-any-return]


def is_async(opts: Any) -> bool:
    """Whether the caller wants a Work to wait for later; C++ always does."""
    return bool(getattr(opts, "asyncOp", True))


def seconds_of(opts: Any) -> float | None:
    """The operation's own timeout; None if it has none."""
    timeout = opts if isinstance(opts, timedelta) else getattr(opts, "timeout", None)
    return timeout.total_seconds() if timeout is not None and timeout > NO_TIMEOUT else None


def root_of(opts: Any) -> int:
    """The root's rank in the group."""
    return opts if isinstance(opts, int) else int(opts.rootRank)
