"""Members: those of a communicator on this node, and the words by which they tell each other how far they are.

Each has some memory that it alone writes and all read, and in it a word that says
whether it has given up: who waits for it hears of that, and gives up, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpdist.algorithms.meeting import LEFT, leave, meet
from mpdist.errors import CommRevoked, MpdistError

if TYPE_CHECKING:
    from mpdist.memory.arena import Block
    from mpdist.progress.channel import Channel
    from mpdist.progress.collective import Steps
    from mpdist.transport.neighbours import Neighbours

TEAM, FEW = "the team", "few numbers"
"""What members come together for, each time to gather memory."""
PRIVATE = -1
"""In place of an offset: memory that the others cannot reach."""


class Place(NamedTuple):
    """Where a member's memory is: at an offset of its arena."""

    world_rank: int
    offset: int


class Members:
    """Members of a communicator that share memory.

    Args:
        block: this one's memory.
        members: where all have theirs.
        words: so many it has.
        given_up: which of them says that it has given up.

    Attributes:
        channel: the communicator's.
        members: where they have their memory.
        rank: of this process among them.
        size: number of members.
        mine, others: the words of this member, and of each other one.
        fence: what keeps the order of memory accesses; None where the processor does.
        has_given_up: this one, and has said so.
    """

    def __init__(self, channel: Channel, block: Block, members: Sequence[Place], words: int, given_up: int) -> None:
        shared = channel.engine.shared
        assert shared is not None
        self.channel = channel
        self.shared: Neighbours = shared
        self.members = members
        # Nothing that this knows knows it, so that its memory goes with its last use.
        self._blocks = [block]
        self._given_up = given_up
        self.rank = [member.world_rank for member in members].index(channel.world_ranks[channel.rank])
        self.size = len(members)
        self._lines = [shared.words(*member, words) for member in members]
        self.mine = self._lines[self.rank]
        self.others = [line for line in self._lines if line is not self.mine]
        self._peers = [member.world_rank for member in members if member is not members[self.rank]]
        self.fence = shared.fence
        self._bell = channel.engine.doorbell
        self._sleeping = channel.engine.doorbell.flags
        self.has_given_up: bool = any(
            isinstance(other, Members) and other.has_given_up for other in (channel.team, channel.few)
        )
        self.mine[given_up] = int(self.has_given_up)

    def close(self, together: bool) -> None:
        """Give the memory back; not together: others may still read it, so it stays as long as this process."""
        if not together:
            self.shared.kept += self._blocks

    def tell(self, word: int, value: int) -> None:
        """Say how far this member is, and wake those that sleep until then."""
        if self.fence is not None:
            self.fence()
        self.mine[word] = value
        self.ring()

    def ring(self) -> None:
        """Wake the members that sleep."""
        flags = self._sleeping
        for peer in self._peers:
            if flags[peer]:
                self._bell.ring(peer)
        if self._bell.has_rung:
            self._bell.give_way()

    def give_up(self) -> None:
        """Refuse further use; members that wait for this one hear of it, whatever they wait for."""
        channel = self.channel
        channel.give_up("its ranks gave different sizes or called different collectives, and are out of step")
        self.tell(self._given_up, 1)
        for also, has_met, what in (channel.team, channel.has_met, TEAM), (channel.few, channel.has_met_for_few, FEW):
            if isinstance(also, Members) and also is not self:
                also.tell(also._given_up, 1)
            elif not has_met and not self.has_given_up:
                leave(channel.engine.meeting, channel.world_ranks, f"{what} of {channel.name}")
        self.has_given_up = True

    def deserted(self) -> MpdistError:
        """Why this member waits in vain for one that has given up; so it gives up, too."""
        gone = [str(self.rank_of(member)) for member, line in enumerate(self._lines) if line[self._given_up]]
        self.give_up()
        return _revoked(self.channel, f"rank {', '.join(gone)}")

    def rank_of(self, member: int) -> int:
        """A member's rank in the communicator."""
        return self.channel.world_ranks.index(self.members[member].world_rank)


def _revoked(channel: Channel, who: str) -> CommRevoked:
    return CommRevoked(
        f"a collective on {channel.where()} waits in vain: {who} gave the communicator up, "
        "because the ranks' calls did not go together"
    )


def gather(channel: Channel, ranks: Sequence[int], nbytes: int, head: int, what: str) -> Steps[Any]:
    """Memory of these ranks of the communicator, which all are on this node; collective over the communicator.

    Args:
        nbytes: so much each.
        head: so many of the first bytes are 0.
        what: one of those above, for each of which they come together once.

    Returns:
        This one's block, and where all have theirs; None, on all ranks of the communicator, if one has no memory left.

    Raises:
        CommRevoked: a member has given up before.
    """
    shared = channel.engine.shared
    block = None if shared is None else shared.allocate(nbytes, f"collectives on {channel.where()}")
    if block is not None:
        block.bytes()[:head] = 0
    mine = PRIVATE if block is None else block.offset
    offsets = yield from meet(channel.engine.meeting, channel.world_ranks, f"{what} of {channel.name}", mine)
    if LEFT in offsets:
        channel.give_up("another rank has given it up")
        raise _revoked(channel, "another rank")
    if block is None or min(offsets) == PRIVATE:
        return None
    return block, [Place(channel.world_ranks[rank], offsets[rank]) for rank in ranks]
