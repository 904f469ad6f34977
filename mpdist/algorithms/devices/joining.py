"""Joining: the members of a communicator come to reach each other's devices, and none waits for another.

Each member goes on when the turn of one of its collectives on a device comes:

    exported   it has put down where its block and events are found
    proven     all have; it has opened the others', and found in them what they had written
    joint      all have proven: from the collective on that the last of them named, each tells as what it comes

Until then, and for ever where one refuses, arrays go the other way, as they do where a
member comes with host memory. What a member decides in a collective hangs on what all
have told before it, see words.py, so all decide alike.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from mpdist.algorithms.devices import announcing
from mpdist.algorithms.devices.team import WORDS, Team, new_line, take_offer
from mpdist.algorithms.devices.words import GPU, SINCE, STATE, State, joint_start
from mpdist.errors import DeviceFailed
from mpdist.memory import BY_NAME, Buffer, Folder, as_op
from mpdist.progress.exporting import exports_of

if TYPE_CHECKING:
    from mpdist.memory import Device
    from mpdist.memory.arena import Block
    from mpdist.memory.elements import Array
    from mpdist.memory.exports import Offer
    from mpdist.memory.sharing import Lane
    from mpdist.progress.channel import Channel

# What a member writes into its block for others to find there, and so much again that a kernel makes of it.
PATTERN_BYTES = 2048

_UINT8 = BY_NAME["uint8"]


def can_join(channel: Channel) -> bool:
    """Whether the members of a communicator may reach each other's devices at all; the same on all."""
    engine = channel.engine
    is_one_node = len({engine.nodes[rank] for rank in channel.world_ranks}) == 1
    shared = engine.shared
    return engine.has_ipc and is_one_node and channel.size > 1 and shared is not None and shared.notices is not None


class Joining:
    """One communicator's, on this member.

    Attributes:
        device: where the arrays are with which this member comes.
        state: how far it is.
    """

    def __init__(self, channel: Channel, device: Device) -> None:
        self.device = device
        self.state = State.ABSENT
        self._channel = channel
        self._exports = exports_of(channel.engine, device)
        assert channel.engine.shared is not None
        self._shared = channel.engine.shared
        self._offer: Offer | None = None
        self._block: Block | None = None
        self._line: memoryview | None = None
        self._lines: list[memoryview] = []
        self._lane: Lane | None = None
        self._team: Team | None = None
        self._start: int | None = None

    # ------------------------------------------------------------------ the turn of a collective

    def come(self, number: int, device: Device) -> Team | None:
        """Go on as far as can be; the team where all are joint and this member's array is on its device."""
        if self.state is State.ABSENT:
            self._export()
        if self.state is State.EXPORTED and self._has_found_all():
            self._prove(number)
        if self.state is not State.PROVEN:
            return None
        if self._start is None:
            self._look()
        if self._start is None or number < self._start or device != self.device:
            return None
        return self._team

    def tell_host(self, number: int) -> None:
        """This member takes the other way in a collective; whoever may wait for its word hears of it."""
        if self.state is State.PROVEN:
            assert self._team is not None
            self._team.tell_host(number)

    def give_up(self) -> None:
        """Others are not to wait for this member's device."""
        if self._team is not None:
            self._team.give_up()

    def close(self, together: bool) -> None:
        """Nobody uses it any more; not together: others may, so what they see stays."""
        if self._block is None:
            return
        assert self._shared.notices is not None
        self._shared.notices.remove(self._channel.name)
        if not together:
            self._shared.kept.append(self._block)
        elif self._offer is not None:
            self._exports.give_back(self._offer)
        self._offer = self._block = None
        self._team = None

    def place_of(self, buffer: Buffer) -> tuple[int, bytes]:
        """Where others find an array: the offset in a block, and the block's handle; PRIVATE, b"" where they don't."""
        return self._exports.place_of(buffer)

    # ------------------------------------------------------------------ steps

    def _export(self) -> None:
        channel = self._channel
        self.state = State.REFUSED
        self._block = self._shared.allocate(8 * WORDS, f"GPU memory on {channel.where()}")
        if self._block is None:
            return
        self._line = new_line(self._shared, self._block, channel.world_ranks[channel.rank])
        try:
            self._line[GPU] = self._exports.accelerator.identity()
            self._offer = self._offered()
        except DeviceFailed as error:
            self._refuse(error)
        else:
            self._line[STATE] = self.state = State.EXPORTED
        assert self._shared.notices is not None
        if not self._shared.notices.put(channel.name, self._block.offset):
            self.state = State.REFUSED

    def _offered(self) -> Offer:
        """A block with the pattern in it, and events that have happened."""
        assert self._line is not None
        offer = take_offer(self._exports, self._line)
        pattern, address = self._pattern(self._channel.rank), offer.block.address
        self._exports.accelerator.copy_in(pattern, self._bytes(address), 0).wait()
        self._lane = self._exports.sharing.lane()
        self._lane.fold(
            Folder(as_op("sum"), _UINT8, None), [address, address], [address + PATTERN_BYTES], PATTERN_BYTES
        )
        for signal in offer.signals:
            self._lane.record(signal.event)
        self._lane.mark().wait()
        return offer

    def _has_found_all(self) -> bool:
        if self._lines:
            return True
        notices = self._shared.notices
        assert notices is not None
        lines = []
        for rank in self._channel.world_ranks:
            offset = notices.find(rank, self._channel.name)
            if offset is None:
                return False
            lines.append(self._shared.words(rank, offset, WORDS))
        self._lines = lines
        return True

    def _prove(self, number: int) -> None:
        """Open what all have exported, and look into it; some milliseconds, once."""
        assert self._line is not None
        assert self._offer is not None
        assert self._lane is not None
        if self._is_over():
            return
        try:
            team = Team(self._channel, self._exports, self._offer, self._lines, self._lane)
            for member in range(team.size):
                if member != team.rank:
                    self._check(team, member)
            team.wait_for_all_events()
        except DeviceFailed as error:
            self._refuse(error)
            return
        self._team = team
        self._line[SINCE] = number
        announcing.begin(self._channel, self)
        if self._shared.fence is not None:
            self._shared.fence()
        self._line[STATE] = self.state = State.PROVEN

    def _check(self, team: Team, member: int) -> None:
        """Raise DeviceFailed unless a member's block holds what it has written there."""
        pattern = self._pattern(member)
        found = np.empty(2 * PATTERN_BYTES, np.uint8)
        self._exports.accelerator.copy_out(self._bytes(team.block(member)), 0, found).wait()
        if not np.array_equal(found, np.concatenate([pattern, pattern + pattern])):
            raise DeviceFailed(f"the memory of rank {member}, opened here, holds other values than there")

    def _look(self) -> None:
        """Whether all are joint by now, or never will be."""
        if self._is_over():
            announcing.end(self._channel)
            return
        self._start = joint_start(self._lines, self._shared.fence)

    def _is_over(self) -> bool:
        if any(line[STATE] == State.REFUSED for line in self._lines):
            self.state = State.REFUSED
        return self.state is State.REFUSED

    def _refuse(self, error: DeviceFailed) -> None:
        assert self._line is not None
        self._line[STATE] = self.state = State.REFUSED
        self._exports.say(self.device, error)

    def _pattern(self, member: int) -> Array:
        text = f"{self._channel.name} {self._channel.world_ranks[member]}"
        digest = blake2b(text.encode(), digest_size=64).digest()
        return np.frombuffer(digest * (PATTERN_BYTES // 64), np.uint8)

    def _bytes(self, address: int) -> Buffer:
        return Buffer(None, 2 * PATTERN_BYTES, 2 * PATTERN_BYTES, _UINT8, self.device, False, None, address)
