"""Cluster: the members of a communicator by node, and the rails that join the nodes.

node 0    0   1   2
          |   |           rail 0 joins the first members of all nodes, rail 1 the second, ...
node 1    3   4           as many rails as the smallest node has members
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpdist.algorithms.groups import Blocking
from mpdist.algorithms.shared.team import Team, assemble

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel
    from mpdist.progress.collective import Steps
    from mpdist.transport.mpi import Transport


@dataclass(frozen=True)
class Cluster:
    """What a member of a communicator over several nodes needs.

    Attributes:
        team: the members on this node.
        nodes: for each node its members' ranks in the communicator, in the order of their lowest ones.
        node: the number of this one.
        rails: how many there are.
        rail: this member's, whose ranks are numbered like `nodes`; None for a member without.
        second: the same once more, for second steps, which would come between the first ones of later slices.
    """

    team: Team
    nodes: Sequence[Sequence[int]]
    node: int
    rails: int
    rail: Transport | None
    second: Transport | None

    @property
    def is_even(self) -> bool:
        """Whether all nodes have as many members."""
        return all(len(members) == self.rails for members in self.nodes)

    def close(self, together: bool) -> None:
        """Give the slots and the rail back."""
        self.team.close(together)
        for rail in (self.rail, self.second) if together else ():
            if rail is not None:
                rail.free()

    def node_of(self, rank: int) -> int:
        """Number of the node that a rank of the communicator is on."""
        return next(number for number, members in enumerate(self.nodes) if rank in members)


def by_node(nodes: Sequence[object]) -> list[list[int]]:
    """Ranks by node, when `nodes` says for each rank which node it is on."""
    found: dict[object, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    return list(found.values())


def assemble_cluster(channel: Channel) -> Steps[Cluster | None]:
    """The cluster of a communicator, collective over it; None, on all ranks, where memory for it is short."""
    engine = channel.engine
    nodes = by_node([engine.nodes[world_rank] for world_rank in channel.world_ranks])
    node = next(number for number, members in enumerate(nodes) if channel.rank in members)
    rails = min(map(len, nodes))
    own = nodes[node].index(channel.rank)
    engine.creating += 1
    try:
        team = yield from assemble(channel, nodes[node])
        if team is None:
            return None
        call = Blocking(engine, lambda: _join(channel.transport, own if own < rails else None, node))
        yield call
    finally:
        engine.creating -= 1
    return Cluster(team, nodes, node, rails, *call.result())


def _join(transport: Transport, color: int | None, node: int) -> tuple[Transport | None, Transport | None]:
    rail = transport.split(color, node)
    return rail, None if rail is None else rail.dup()
