"""Records: a pending operation, and what a rank says of itself, as they are compared and sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from mpdist.debug.fingerprint import Call, ranks_text
from mpdist.progress.mailbox import ANY


class Kind(Enum):
    """What an operation waits for."""

    COLLECTIVE = "all members to call it"
    RECEIVE = "one of its peers to send"
    SEND = "its peer to receive"


@dataclass(frozen=True)
class Operation:
    """A pending operation of this rank.

    Attributes:
        text: `all_reduce float32 x 4 sum #3 on 'world'`.
        key: communicator, the same on all its members.
        members: world ranks of the communicator, in its order.
        own: this rank's number there.
        sequence: of a collective.
        peers: world ranks of which it needs all (collective), any (receive), the one (send).
        tag: of a message; ANY where any will do, or where there is none.
        site: line of the call, where it is known.
        seconds: waited so far.
        is_moving: a message has been met and is being transferred.
        advice: what to look at where ranks are missing.
        queued: messages of its peers that have come here, but not for it.
    """

    kind: Kind
    text: str
    key: str
    name: str
    members: tuple[int, ...]
    own: int
    sequence: int
    peers: tuple[int, ...]
    site: str
    seconds: float
    is_moving: bool = False
    tag: int = ANY
    advice: str = ""
    queued: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The whole text, with rank and line."""
        place = f" ({self.site})" if self.site else ""
        return f"{self.text} (rank {self.own} of {len(self.members)}){place}"

    def rank_in(self, world_rank: int) -> int:
        """A member's number in the communicator."""
        return self.members.index(world_rank)

    def ranks_text(self, world_ranks: Sequence[int]) -> str:
        return ranks_text([self.rank_in(rank) for rank in world_ranks])


@dataclass(frozen=True)
class Posted:
    """A collective as a rank has posted it.

    Attributes:
        details: None where they are not known any more.
        seconds: waited so far; None when it is over.
    """

    sequence: int
    op: str
    details: str | None
    site: str
    seconds: float | None

    @property
    def call(self) -> Call:
        return Call(self.op, self.details, self.site)


@dataclass(frozen=True)
class ChannelState:
    """One communicator on another rank.

    Attributes:
        posted: number of collectives; None where the communicator is not known.
        calls: the last of them.
        sends: tags of the pending sends to the rank that asks.
        receives: tags of the pending receives that its messages may meet, or are meeting; in both each tag once,
            ANY for any, and for all that are too many to be listed.
        is_closed: it was closed there, or left.
    """

    posted: int | None = None
    calls: tuple[Posted, ...] = ()
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    is_closed: bool = False


@dataclass(frozen=True)
class Answer:
    """What a rank says of itself.

    Attributes:
        place: the line at which its Python is.
        waits: the operations that it waits for itself.
        channels: by key, those that were asked for.
        daemons: names of the daemon threads that its finished program has left.
    """

    is_finished: bool = False
    place: str = ""
    waits: tuple[str, ...] = ()
    channels: Mapping[str, ChannelState] = field(default_factory=dict)
    daemons: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, record: dict[str, Any]) -> Answer:
        """Inverse of as_json, after JSON has made lists of tuples."""
        channels = {
            key: ChannelState(
                state["posted"],
                tuple(Posted(**call) for call in state["calls"]),
                tuple(state["sends"]),
                tuple(state["receives"]),
                state["is_closed"],
            )
            for key, state in record["channels"].items()
        }
        waits, daemons = tuple(record["waits"]), tuple(record["daemons"])
        return cls(record["is_finished"], record["place"], waits, channels, daemons)

    def channel(self, operation: Operation) -> ChannelState:
        return self.channels.get(operation.key, ChannelState())

    def call(self, operation: Operation) -> Posted | None:
        """What it has posted in the place of this collective, if it is still known."""
        found = [call for call in self.channel(operation).calls if call.sequence == operation.sequence]
        return found[0] if found else None


Answers = Mapping[int, Answer]
"""By world rank; ranks that did not answer are missing."""
