"""Waiting inside backward and forward for a conversation of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from mpdist.torch.waiting import finish

if TYPE_CHECKING:
    from mpdist.gradients.talk import Talk

T = TypeVar("T")


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
