"""Programs: the collectives of a communicator whose ranks share memory, for posting.

The first of them on a communicator makes its team. Where one of the ranks has no
memory left for it, all take MPI's own call instead.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.algorithms import native
from mpdist.algorithms.shared import direct, either, exchange, plans, reduction
from mpdist.algorithms.shared.few import are_few, few_of
from mpdist.algorithms.shared.members import Members
from mpdist.algorithms.shared.team import Team, assemble
from mpdist.memory import as_buffer
from mpdist.progress.collective import Steps

if TYPE_CHECKING:
    from mpdist.algorithms.reduction import Reduction
    from mpdist.algorithms.shared.one_round import Plan
    from mpdist.memory import Buffer
    from mpdist.progress.channel import Channel
    from mpdist.transport.mpi import Transport
    from mpdist.transport.requests import Request


def team_of(channel: Channel) -> Steps[Team | None]:
    """The team of all members of the communicator, made at the first call."""
    if not channel.has_met:
        team = yield from assemble(channel, range(channel.size))
        channel.team, channel.has_met = team, True
    return channel.team  # type: ignore[return-value]  # an object of this level, kept by a lower one


def _reductions(team: Team) -> ModuleType:
    return reduction if team.shared.reach is None else direct


def _exchanges(team: Team) -> ModuleType:
    return exchange if team.shared.reach is None else direct


def _request(team: Members, plan: Plan, x: Buffer, out: Buffer) -> Request:
    request = plan.request(team, plan, x, out)
    team.ring()
    return request


def _two_ways(team: Team, other: Callable[[Team], ModuleType]) -> ModuleType:
    return either if team.has_two_ways else other(team)


def barrier(transport: Transport, channel: Channel) -> Steps[None]:
    team = yield from team_of(channel)
    if team is None:
        yield transport.ibarrier()
    else:
        yield from team.meet()


def all_reduce(transport: Transport, channel: Channel, x: Buffer | None, out: Buffer, how: Reduction) -> Steps[Any]:
    """x None: in place."""
    if are_few(how, out.nbytes):
        return (yield from _few_all_reduce(transport, channel, x, out, how))
    team = yield from team_of(channel)
    if team is None:
        return (yield from native.all_reduce(transport, x, out, how))
    return (yield from all_reduce_in_rounds(team, x, out, how))


def _few_all_reduce(
    transport: Transport, channel: Channel, x: Buffer | None, out: Buffer, how: Reduction
) -> Steps[Any]:
    few = yield from few_of(channel)
    if few is None:
        return (yield from native.all_reduce(transport, x, out, how))
    yield _request(few, few.plan(how, out.nbytes), out if x is None else x, out)
    return out.owner


def all_reduce_in_rounds(team: Team, x: Buffer | None, out: Buffer, how: Reduction) -> Steps[Any]:
    """Of a team, through rounds, however few numbers they are: it rounds to the element type after each rank."""
    source = out if x is None else x
    plan = plans.all_reduce(team, how, out.nbytes)
    if plan is not None:
        yield _request(team, plan, source, out)
    else:
        yield from _two_ways(team, _reductions).all_reduce(team, source, out, how.op, how.size)
    return out.owner


def reduce(
    transport: Transport, channel: Channel, x: Buffer, out: Buffer | None, how: Reduction, dst: int
) -> Steps[Any]:
    team = yield from team_of(channel)
    if team is None:
        return (yield from native.reduce(transport, x, out, how, dst))
    yield from _reductions(team).reduce(team, x, out, how.op, how.size, [dst])
    return None if out is None else out.owner


def reduce_scatter(transport: Transport, channel: Channel, x: Buffer, out: Buffer, how: Reduction) -> Steps[Any]:
    team = yield from team_of(channel)
    if team is None:
        return (yield from native.reduce_scatter(transport, x, out, how))
    plan = plans.reduce_scatter(team, how, x.nbytes)
    if plan is not None:
        yield _request(team, plan, x, out)
    else:
        yield from _two_ways(team, _reductions).reduce_scatter(
            team, x, out.count, how.op, how.size, [(team.rank, out.array())]
        )
    return out.owner


def broadcast(transport: Transport, channel: Channel, x: Buffer, src: int) -> Steps[Any]:
    team = yield from team_of(channel)
    if team is None:
        yield transport.ibroadcast(x, src)
    elif (plan := plans.broadcast(team, x.element, x.nbytes, src)) is not None:
        yield _request(team, plan, x, x)
    else:
        yield from _two_ways(team, _exchanges).broadcast(team, x, src)
    return x.owner


def gather(transport: Transport, channel: Channel, x: Buffer, out: Buffer | None, dst: int) -> Steps[Any]:
    team = yield from team_of(channel)
    if team is None:
        return (yield from native.gather(transport, x, out, dst))
    yield from _exchanges(team).gather(team, x, out, dst)
    return None if out is None else out.owner


def all_gather(transport: Transport, channel: Channel, x: Buffer, out: Buffer) -> Steps[Any]:
    return (yield from _into(channel, "all_gather", transport.iall_gather, x, out))


def all_to_all(transport: Transport, channel: Channel, x: Buffer, out: Buffer) -> Steps[Any]:
    return (yield from _into(channel, "all_to_all", transport.iall_to_all, x, out))


def _into(
    channel: Channel,
    op: str,
    call: Callable[[Buffer, Buffer], Request],
    x: Buffer,
    out: Buffer,
) -> Steps[Any]:
    team = yield from team_of(channel)
    if team is None:
        yield call(x, out)
    else:
        yield from getattr(_two_ways(team, _exchanges), op)(team, x, out)
    return out.owner


def scatter(transport: Transport, channel: Channel, x: Buffer | None, out: Buffer, src: int) -> Steps[None]:
    """Even blocks of x of src; a rank's out may be of another type, as long as it has the bytes."""
    team = yield from team_of(channel)
    if team is None:
        yield transport.iscatter(x, out, src)
    else:
        yield from _exchanges(team).scatter(team, None if x is None else _as_bytes(x), _as_bytes(out), src)


def _as_bytes(buffer: Buffer) -> Buffer:
    return as_buffer(buffer.array().view(np.uint8))
