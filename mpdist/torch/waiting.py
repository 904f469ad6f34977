"""Waiting inside torch: its calls are plain calls, also where an event loop runs around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from mpdist.progress import Work

T = TypeVar("T")


def finish(work: Work[T]) -> T:
    """The result, waited for on this thread even if it is that of a running event loop, which stands still anyway."""
    if not work._done:
        work._channel.engine.wait(work)
    return work.result()
