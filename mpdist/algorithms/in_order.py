"""In order: reductions in the order of ranks, on a communicator whose ranks share memory.

Where one of the ranks has no memory left for the team, all take the programs for
ranks anywhere, which give the same bits; MPI's own calls promise no order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpdist.algorithms import ordered
from mpdist.algorithms.shared import programs as shared

if TYPE_CHECKING:
    from types import ModuleType

    from mpdist.progress.channel import Channel
    from mpdist.progress.collective import Steps
    from mpdist.transport.mpi import Transport


def all_reduce(transport: Transport, channel: Channel, *arguments: Any) -> Steps[Any]:
    team = yield from shared.team_of(channel)
    if team is None:
        return (yield from ordered.all_reduce(transport, channel, *arguments))
    return (yield from shared.all_reduce_in_rounds(team, *arguments))


def reduce(transport: Transport, channel: Channel, *arguments: Any) -> Steps[Any]:
    programs = yield from _programs(channel)
    return (yield from programs.reduce(transport, channel, *arguments))


def reduce_scatter(transport: Transport, channel: Channel, *arguments: Any) -> Steps[Any]:
    programs = yield from _programs(channel)
    return (yield from programs.reduce_scatter(transport, channel, *arguments))


def _programs(channel: Channel) -> Steps[ModuleType]:
    team = yield from shared.team_of(channel)
    return ordered if team is None else shared
