"""Hierarchical: shared memory within each node, MPI between them, so that no byte crosses a link twice.

With one rank on each node, what is left of it: ways over the link that MPI's own calls don't take.

all_reduce        reduce slices in the node, exchange each over its rail, reduce and gather it (or MPI's own call, where
                  that does as well), hand the slices out in the node
reduce            as all_reduce
reduce_scatter    reduce the rows of each rail in the node, exchange them over the rail and reduce them
all_gather        from node to node over the rails, hand out in the node
broadcast         hand out in the root's node, a slice over each rail, from node to node, gather the slices in the nodes
all_to_all        with one rank on each node: with one other after the other
barrier           in the node, over one rail, in the node

Sums of 16-bit types cross as float32 where they stand for several ranks, for they
are rounded once, at the end; inputs and results cross as they are. Floating point
numbers are compared by us, for MPI promises nothing for NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.algorithms import across, chain, crossing, native
from mpdist.algorithms.cluster import Cluster, assemble_cluster
from mpdist.algorithms.shared import exchange, reduction
from mpdist.algorithms.shared.reduction import cuts
from mpdist.memory import as_buffer

if TYPE_CHECKING:
    from mpdist.algorithms.reduction import Reduction
    from mpdist.memory import Buffer
    from mpdist.progress.channel import Channel
    from mpdist.progress.collective import Steps
    from mpdist.transport.mpi import Transport


def cluster_of(channel: Channel) -> Steps[Cluster | None]:
    """The cluster of the communicator, made at the first call."""
    if not channel.has_met:
        cluster = yield from assemble_cluster(channel)
        channel.team, channel.has_met = cluster, True
    return channel.team  # type: ignore[return-value]  # an object of this level, kept by a lower one


def barrier(transport: Transport, channel: Channel) -> Steps[None]:
    cluster = yield from cluster_of(channel)
    if cluster is None:
        yield transport.ibarrier()
        return
    yield from cluster.team.meet()
    if cluster.team.rank == 0 and cluster.rail is not None:
        yield cluster.rail.ibarrier()
    yield from cluster.team.meet()


def all_reduce(transport: Transport, channel: Channel, x: Buffer | None, out: Buffer, how: Reduction) -> Steps[Any]:
    """x None: in place."""
    cluster = yield from cluster_of(channel)
    if cluster is None:
        return (yield from native.all_reduce(transport, x, out, how))
    yield from across.all_reduce(cluster, out if x is None else x, out, how)
    return out.owner


def reduce(
    transport: Transport, channel: Channel, x: Buffer, out: Buffer | None, how: Reduction, dst: int
) -> Steps[Any]:
    """As all_reduce, whose result all but dst throw away: Open MPI's own call takes seconds for 16 MiB."""
    cluster = yield from cluster_of(channel)
    if cluster is None:
        return (yield from native.reduce(transport, x, out, how, dst))
    target = as_buffer(np.empty(x.count, x.element.storage)) if out is None else out
    yield from across.all_reduce(cluster, x, target, how)
    return None if out is None else out.owner


def reduce_scatter(transport: Transport, channel: Channel, x: Buffer, out: Buffer, how: Reduction) -> Steps[Any]:
    cluster = yield from cluster_of(channel)
    rail = None if cluster is None else cluster.rail
    if cluster is None or rail is None or not cluster.is_even:
        return (yield from native.reduce_scatter(transport, x, out, how))
    team, nodes = cluster.team, len(cluster.nodes)
    if team.size == 1 and how.op.factor is None:
        parts = x.array().reshape(nodes, out.count)
    else:
        parts = np.empty((nodes, out.count), np.float32 if how.element.is_half else how.element.storage)
        mine = [(members[team.rank], parts[number]) for number, members in enumerate(cluster.nodes)]
        yield from reduction.reduce_scatter(team, x, out.count, how.op, None, mine)
    yield from crossing.reduce_scatter(cluster, rail, parts, out.array(), how)
    return out.owner


def all_gather(transport: Transport, channel: Channel, x: Buffer, out: Buffer) -> Steps[Any]:
    cluster = yield from cluster_of(channel)
    if cluster is None or cluster.rail is None or not cluster.is_even:
        yield transport.iall_gather(x, out)
        return out.owner
    team, nodes = cluster.team, len(cluster.nodes)
    if team.size == 1:
        yield from chain.all_gather(channel.engine, cluster.rail, x, out)
        return out.owner
    railed = as_buffer(team.shared.empty((nodes, x.count), x.element.storage))
    yield from chain.all_gather(channel.engine, cluster.rail, x, railed)
    rows = out.array().reshape(channel.size, x.count)
    pulls = [
        (member, number, rows[cluster.nodes[number][member]])
        for member in [team.rank, *team.after_own()]
        for number in range(nodes)
    ]
    yield from exchange.exchange(team, "all_gather", railed, nodes, x.count, railed.element, range(team.size), pulls)
    return out.owner


def all_to_all(transport: Transport, channel: Channel, x: Buffer, out: Buffer) -> Steps[Any]:
    cluster = yield from cluster_of(channel)
    rail = None if cluster is None or len(cluster.nodes) < channel.size else cluster.rail
    if rail is None:
        yield transport.iall_to_all(x, out)
    else:
        yield from chain.all_to_all(channel.engine, rail, x, out)
    return out.owner


def broadcast(transport: Transport, channel: Channel, x: Buffer, src: int) -> Steps[Any]:
    cluster = yield from cluster_of(channel)
    if cluster is None:
        yield transport.ibroadcast(x, src)
        return x.owner
    team, root_node = cluster.team, cluster.node_of(src)
    if cluster.node == root_node and team.size > 1:
        yield from exchange.broadcast(team, x, cluster.nodes[root_node].index(src))
    whole = x.array()
    at = cuts(x.count, cluster.rails, cluster.rails)
    if cluster.rail is not None:
        own = as_buffer(whole[at[team.rank] : at[team.rank + 1]])
        yield from chain.broadcast(channel.engine, cluster.rail, own, root_node)
    if cluster.node != root_node and team.size > 1:
        for member in range(cluster.rails):
            yield from exchange.broadcast(team, as_buffer(whole[at[member] : at[member + 1]]), member)
    return x.owner
