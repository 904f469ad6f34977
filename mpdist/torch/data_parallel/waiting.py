"""Waiting inside torch: backward and forward are plain calls, also where an event loop runs around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from mpdist.gradients.talk import Talk
    from mpdist.progress import Work

T = TypeVar("T")


def finish(work: Work[T]) -> T:
    """The result, waited for on this thread even if it is that of a running event loop, which stands still anyway."""
    if not work.done():
        work._channel.engine.wait(work)
    return work.result()


def hold(talk: Talk[T]) -> T:
    """Hold a conversation with the other ranks to its end."""
    answer: Any = None
    while True:
        try:
            work = talk.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        answer = finish(work)
