"""Burial: when the communicators of destroyed groups are given back to MPI.

MPI gives a freed communicator's number to the next one, among the ranks that make that. A group may be destroyed here
while other ranks still use it, or have given up a collective in the middle: what they sent lies here or is under way,
and would be taken for a message of the new communicator. So a destroyed group is closed at once, but its communicator
is freed only when all its members have told each other that they are through with it: when the next default group
is made. The others stay; MPICH has room for some 2000.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpdist.torch.exchange import all_gather_records

if TYPE_CHECKING:
    from mpdist import Communicator

_WHY = "its process group was destroyed"


@dataclass
class Grave:
    """A closed communicator.

    Attributes:
        is_clean: nothing was pending on it here, and nothing had been given up.
    """

    transport: Any
    members: tuple[int, ...]
    is_clean: bool


_graves: dict[str, Grave] = {}


def bury(comm: Communicator, key: str) -> None:
    """Close a communicator here; nobody is waited for.

    Args:
        key: its name, unique, and the same on all members.
    """
    channel = comm._channel
    if channel.is_closed:
        return
    transport: Any = channel.transport
    grave = Grave(transport, comm.ranks, not channel.broken and not channel.unfinished())
    free, transport.free = transport.free, lambda: None
    try:
        comm._closed(_WHY)
    finally:
        transport.free = free
    _graves[key] = grave


def free_all_agreed(world: Communicator) -> None:
    """Free what all members have buried; collective over the world."""
    everyone = all_gather_records(world, {key: grave.is_clean for key, grave in _graves.items()})
    for key, grave in list(_graves.items()):
        if all(everyone[rank].get(key) for rank in grave.members):
            _drop_messages(grave.transport)
            grave.transport.free()
            del _graves[key]


def _drop_messages(transport: Any) -> None:
    """Receive what nobody has received: all that was sent before the exchange is here."""
    while (message := transport.improbe(*_any(transport))) is not None:
        nbytes = transport.status.count
        message.Recv([bytearray(nbytes), nbytes, transport.byte])


def _any(transport: Any) -> tuple[int, int, Any]:
    return transport.any_source, transport.any_tag, transport.status
