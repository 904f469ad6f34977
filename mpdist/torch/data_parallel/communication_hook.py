"""Communication hook: what reduces the buckets in place of our all_reduce, as `register_comm_hook` gives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from mpdist.torch.data_parallel import mistakes
from mpdist.torch.data_parallel.bucket import Bucket
from mpdist.torch.data_parallel.waiting import wait_for_hook

if TYPE_CHECKING:
    from mpdist.comm import Communicator

# The function and its state.
Hook: TypeAlias = tuple[Callable[[Any, Any], "torch.futures.Future[Any]"], object]


def start(hook: Hook, buckets: Sequence[Bucket], where: str) -> None:
    """Call it for the buckets that have started, one after the other has ended.

    What it does at the end of its first message, in whatever thread, may be another message: those of two buckets
    would come in different orders on the ranks.

    Args:
        buckets: all that have started, in their order.
        where: on which communicator, in words.

    Raises:
        UsageError: it returned no Future.
    """
    for bucket in buckets:
        if bucket.future is None:
            bucket.start_hook(*hook)
            if not isinstance(bucket.future, torch._C.Future):
                raise mistakes.no_future(where, hook[0], bucket.future)
        assert bucket.future is not None
        if not bucket.future.done():
            return


def wait(comm: Communicator, hook: Hook, bucket: Bucket, where: str) -> None:
    """Wait until its Future of a bucket is complete, with a result or an exception.

    Raises:
        WorkTimeout: it was not within the communicator's timeout.
    """
    future = bucket.future
    assert future is not None
    if not future.done():
        wait_for_hook(comm, future, mistakes.future_of(where, hook[0], bucket))
