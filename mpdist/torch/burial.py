"""Burial: when the communicators of destroyed groups are given back, with the memory that their ranks share.

MPI gives a freed communicator's number to the next one, among the ranks that make that. A group may be destroyed here
while other ranks still use it, or have given up a collective in the middle: what they sent lies here or is under way,
and would be taken for a message of the new communicator; and what it has in shared memory, others may still read. So a
destroyed group is closed at once, but given back only when all its members have told each other that they are through
with it: as communicators that a program has dropped, when a group is made of ranks among which they are. Those on
which something was pending stay; MPICH has room for some 2000.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from mpdist.progress.channel import Channel, Dropped, Team
from mpdist.progress.work import Work

if TYPE_CHECKING:
    from mpdist import Communicator

_WHY = "its process group was destroyed"


class Grave:
    """What is left of a closed channel until all members have one of it; to `dropped` it is like a channel."""

    broken = ""

    def __init__(self, channel: Channel) -> None:
        """Take what the channel would give back by itself."""
        self.name = channel.name
        self.world_ranks = channel.world_ranks
        self._transport: Any = channel.transport
        self._teams: list[Team] = [team for team in (channel.team, channel.few, channel.devices) if team is not None]
        channel.team = channel.few = channel.at_once = channel.devices = None

    def unfinished(self) -> list[Work[Any]]:
        """Nothing: it was clean."""
        return []

    def open(self) -> Work[None]:
        """Give all back; everybody is through with it."""
        transport = self._transport
        any_source, any_tag, status = transport.any_source, transport.any_tag, transport.status
        while (message := transport.improbe(any_source, any_tag, status)) is not None:  # that nobody has received
            nbytes = status.count
            message.Recv([bytearray(nbytes), nbytes, transport.byte])
        transport.free()
        for team in self._teams:
            team.close(together=True)
        self._teams.clear()
        return _Opened()


class _Opened(Work[None]):
    """Done at once."""

    _done = True
    _result = None


def bury(comm: Communicator) -> None:
    """Close a communicator here; nobody is waited for. Its name is unique, and the same on all members."""
    channel = comm._channel
    if channel.is_closed:
        return
    is_clean = not channel.broken and not channel.unfinished()
    grave = Grave(channel) if is_clean else None
    comm._closed(_WHY)
    if grave is not None:
        channel.engine.dropped.append(Dropped(cast(Channel, grave), grave.open))
