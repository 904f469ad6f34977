"""Waiting inside backward and forward: for a conversation of all ranks, and for the Future of a communication hook."""

from __future__ import annotations

import math
import socket
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from mpdist.config import Config
from mpdist.errors import WorkTimeout
from mpdist.runtime.last_words import write_error
from mpdist.torch.waiting import finish

if TYPE_CHECKING:
    import torch

    from mpdist.comm import Communicator
    from mpdist.gradients.talk import Talk

T = TypeVar("T")

# A wait that is longer looks at its limits.
SHORT_SECONDS = 1.0
# What a hook has posted has the same limit as its Future, and its error says more: so the Future's comes later.
LATER_SECONDS = 2.0


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


def wait_for_hook(comm: Communicator, future: torch.futures.Future[Any], what: str) -> None:
    """Drive until the Future is complete, and say so where that takes long.

    Args:
        what: the Future in words.

    Raises:
        WorkTimeout: not within the communicator's timeout.
    """
    engine = comm._channel.engine
    start = monotonic()

    def waits_until(end: float) -> bool:
        """Whether it still waits then."""
        seconds = None if end == math.inf else max(end - monotonic(), 0.0)
        return not engine.drive_while(lambda: not future.done(), seconds)

    if not waits_until(start + SHORT_SECONDS):
        return
    config = Config.read()
    limit = config.timeout if comm.timeout is None else comm.timeout
    report = start + config.report_after if config.report_after else math.inf
    end = start + limit + LATER_SECONDS if limit else math.inf
    if report < end and waits_until(report):
        write_error(
            f"mpdist: rank {comm.rank} ({socket.gethostname()}) waits for {what} which is not complete after "
            f"{config.report_after:g} s; if no operation of the hook is reported, nothing completes it"
        )
    if waits_until(end):
        raise WorkTimeout(
            f"{what} is not complete after {limit:g} s; a hook's Future must be completed, by set_result() or "
            "set_exception(), whatever happens"
        )
