"""Few works: the Works of all_reduces of a few numbers that have shown theirs when they are made."""

from __future__ import annotations

from collections.abc import Generator
from types import FrameType
from typing import TYPE_CHECKING, Any

from mpdist.algorithms.shared.few import READ_AT, Few, FewAllReduce, FewPlan
from mpdist.progress.channel import running_task
from mpdist.progress.collective import Direct

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel
    from mpdist.progress.collective import Place
    from mpdist.progress.roll import Call


class Ended(Direct[Any]):
    """One that was over when it was posted.

    What it has is set where it is made: a function of Python for it takes three times as long.
    """

    op = "all_reduce"
    _done = True

    __init__ = object.__init__

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result
        yield


def wait(
    channel: Channel, few: Few, plan: FewPlan, call: Call, x: Any, to: Any, at: int, caller: FrameType
) -> Direct[Any]:
    """The Work of the last all_reduce that this member has shown; under the Engine's lock.

    Args:
        call: as it was signed.
        x: the array; its numbers are those of `to` from `at` on.
    """
    place = caller.f_code, caller.f_lasti
    channel.recent.append(("all_reduce", call[1], place))
    return _listed(channel, plan, call, x, FewAllReduce.of_shown(few, plan, (to, at)), place)


def _listed(
    channel: Channel, plan: FewPlan, call: Call, x: Any, request: FewAllReduce, place: Place | None
) -> Direct[Any]:
    work = Direct(channel, "all_reduce", x, call[1], running_task())
    work._place = place
    work._request = request
    work.sequence = channel.sequence
    channel.engine.active.append(work)
    channel.collectives.append(work)
    return work


def interrupted(channel: Channel, few: Few, plan: FewPlan, call: Call, x: Any, to: Any, at: int, number: int) -> None:
    """A signal's handler has raised while the all_reduce of this number was posted; under the Engine's lock.

    One that others may have seen goes on, but nobody has its Work, and the communicator refuses further use.
    """
    if few.number < number:  # nobody knows of it, so it may be posted again
        if channel.signer is not None:
            channel.signer.take_back(channel.sequence + 1)
        return
    if few.mine[READ_AT] < number:
        pending, active = few.pending, channel.engine.active
        has_request = pending and pending[-1]._number == number
        request = pending[-1] if has_request else FewAllReduce.of_shown(few, plan, (to, at))
        if not any(getattr(work, "_request", None) is request for work in active):
            _listed(channel, plan, call, x, request, None)
    channel.lost_hold_of("all_reduce")
