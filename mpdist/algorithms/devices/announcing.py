"""Announcing: a channel whose collectives tell, when their turn comes, that this member comes with host memory.

Only channels on which arrays of devices go the short way are of this class: others
pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from mpdist.progress.channel import Channel
from mpdist.progress.collective import Collective, single_step

if TYPE_CHECKING:
    from mpdist.progress.collective import Program, Steps, Words
    from mpdist.transport.requests import Request


class Teller(Protocol):
    """Who tells it."""

    def tell_host(self, number: int) -> None:
        """This member comes to a collective with host memory."""


class DeviceCollective(Collective[Any]):
    """A collective that itself tells as what this member comes."""


class AnnouncingChannel(Channel):
    """See above."""

    def post(
        self,
        op: str,
        program: Program,
        details: Callable[[], str],
        *arguments: Any,
        kind: Any = Collective,
        is_unchecked: bool | None = None,
    ) -> Any:
        if issubclass(kind, DeviceCollective):
            return super().post(op, program, details, *arguments, kind=kind, is_unchecked=is_unchecked)
        with self.engine.lock:  # nobody else takes this number
            told = _told(program, self, self.sequence + 1)
            return super().post(op, told, details, *arguments, kind=kind, is_unchecked=is_unchecked)

    def post_direct(
        self,
        op: str,
        words: Words,
        result: Any,
        call: Callable[..., Request],
        *arguments: Any,
        caller: int = 0,
        is_unchecked: bool | None = True,
    ) -> Collective[Any]:
        posted: Collective[Any] = self._post_indirect(op, words, result, call, arguments, is_unchecked)
        return posted


def begin(channel: Channel, teller: Teller) -> None:
    """From the next collective on tell; those that wait for their turn, too."""
    channel.teller = teller
    channel.at_once = None
    if type(channel) is Channel:
        channel.__class__ = AnnouncingChannel
    for work in channel.queued():
        if not isinstance(work, DeviceCollective) and work._steps is not None:
            work._steps = _first_telling(work._steps, teller, work.sequence)


def end(channel: Channel) -> None:
    """Tell no longer: nobody waits for it."""
    if type(channel) is AnnouncingChannel:
        channel.__class__ = Channel  # type: ignore[assignment]  # back to what it was


def _told(program: Program, channel: Channel, number: int) -> Program:
    def steps(*arguments: Any) -> Steps[Any]:
        return _first_telling(program(*arguments), channel.teller, number)

    return single_step(steps) if hasattr(program, "is_single_step") else steps


def _first_telling(steps: Steps[Any], teller: Any, number: int) -> Steps[Any]:
    teller.tell_host(number)
    return (yield from steps)
