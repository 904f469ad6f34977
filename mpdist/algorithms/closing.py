"""Closing: the members of a communicator part, and leave no message behind in it.

MPICH gives the number of a freed communicator to the next one, which would receive
what nobody has received here. MPI keeps the messages between two ranks in order, so
an empty last one, to every member that a rank has ever sent to, proves that all its
earlier ones have come. Who sends it to whom is exchanged beside it: a byte for each
pair of members, and no message between those that never spoke.

That is a collective of the communicator, so before it the members meet elsewhere: one
that was left by a member, which may have begun another collective there, is closed by each for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpdist.algorithms.meeting import LEFT, meet
from mpdist.algorithms.meeting import leave as meet_without
from mpdist.errors import CollectiveMismatch
from mpdist.memory import as_buffer
from mpdist.progress import wire
from mpdist.progress.collective import Collective, Steps, Until
from mpdist.progress.receive import Receive

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel
    from mpdist.progress.work import Work
    from mpdist.transport.mpi import Transport
    from mpdist.transport.requests import Request

# What a member tells each other one.
SAYS_LAST = 1
HAS_NODE = 2


@dataclass(frozen=True)
class Node:
    """A communicator of the members on this node, to be closed together with the whole.

    Attributes:
        members: their ranks in the whole.
        close: posts its closing.
    """

    channel: Channel
    members: Collection[int]
    close: Callable[[], Work[None]]


def close(transport: Transport, channel: Channel, node: Node | None, then: Callable[[bool], None]) -> Steps[None]:
    """All members are done with the communicator, or have left it.

    Receives that wait end with ClosedError, for nothing can come any more; messages that nobody has received are
    taken from MPI, and stay listed in the inbox.

    Args:
        node: None where there is none, or where it cannot be used.
        then: closes it here; told whether all members do.

    Raises:
        CollectiveMismatch: the members have begun different numbers of collectives; it is closed here only.
    """
    numbers = yield from meet(channel.engine.meeting, channel.world_ranks, _end_of(channel), channel.turn)
    if len(set(numbers)) > 1 or LEFT in numbers:
        then(False)
        if LEFT not in numbers:
            listed = ", ".join(f"rank {rank}: {number - 1}" for rank, number in enumerate(numbers))
            raise CollectiveMismatch(
                f"close on {channel.where()}: the ranks have called different numbers of collectives before "
                f"({listed}), so what they got may not belong together"
            )
        return
    # Who hears that all are here gives back the memory in which others may still look for the end of a collective. All
    # have begun the same ones, so they come to it.
    yield Until(lambda: not any(isinstance(work, Collective) for work in channel.under_way()))
    last = transport.together([_say_last(channel, peer) for peer in channel.addressed])
    told, heard = np.zeros((2, transport.size), np.uint8)
    told[list(channel.addressed)] = SAYS_LAST
    if node is not None:
        told |= HAS_NODE
    yield transport.iall_to_all(as_buffer(told), as_buffer(heard))
    senders = frozenset(np.flatnonzero(heard & SAYS_LAST).tolist())

    def has_all() -> bool:
        last.Test()  # it may still be queued, behind an array that comes from a device
        return channel.inbox.has_all_of(senders)

    yield Until(has_all)
    channel.end_waiting("it was closed")
    yield last
    yield Until(lambda: not any(isinstance(work, Receive) for work in channel.under_way()))
    yield from _drop_unclaimed(channel)
    yield Until(lambda: not channel.under_way() and channel.fastboxes.are_left())
    if node is not None and all(heard[rank] & HAS_NODE for rank in node.members):
        yield from _close_node(node)
    then(True)


def leave(channel: Channel) -> None:
    """This member does not come to the end of the communicator: nobody is to wait for it there."""
    meeting = channel.engine.meeting
    if not meeting.is_closed:
        meet_without(meeting, channel.world_ranks, _end_of(channel))


def _end_of(channel: Channel) -> str:
    return f"the end of {channel.name}"


def _say_last(channel: Channel, peer: int) -> Request:
    isend = channel.transport.isend if channel.outbox is None else channel.outbox.isend  # the channel's own may refuse
    return isend([b"", 0, channel.byte], peer, wire.wire_tag(0, wire.LAST))


def _drop_unclaimed(channel: Channel) -> Steps[None]:
    """Receive what nobody has received: large messages are still with their senders, which wait."""
    for src, handle, nbytes in channel.inbox.take_unclaimed():
        scratch = np.empty(nbytes, np.uint8)
        yield handle.Irecv([scratch, nbytes, channel.byte])
        channel.ring(src)


def _close_node(node: Node) -> Steps[None]:
    yield Until(lambda: all(work._done for work in node.channel.collectives))
    closing = node.close()
    yield Until(lambda: closing._done)
