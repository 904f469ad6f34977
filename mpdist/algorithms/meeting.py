"""Meeting: members of a communicator come together by messages, not by a collective of it.

The messages go over a channel of the world that carries nothing else, so that no
call of the user's is taken for a part of the meeting, whatever the ranks call: each
member reports to the first, which answers when all have come.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from mpdist.memory import as_buffer
from mpdist.progress.receive import Receive
from mpdist.progress.sending import send

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel
    from mpdist.progress.collective import Steps

_WORD_BYTES = 8

LEFT = -(2**63)
"""The word of a member that never comes; nobody who comes says this one."""


# For each channel: what members have told, by member and name, and nobody has asked for yet.
_told: WeakKeyDictionary[Channel, dict[tuple[int, str], list[list[int]]]] = WeakKeyDictionary()


def tag_of(meeting: Channel, name: str) -> int:
    """The tag of the messages by which ranks meet for what has this name."""
    return zlib.crc32(name.encode()) % meeting.max_tag


def meet(meeting: Channel, members: Sequence[int], name: str, word: int = 0) -> Steps[list[int]]:
    """Wait until all members have come.

    Args:
        meeting: the channel of the world for it.
        members: ranks of the world, this one among them; the same on all.
        name: what they meet for; the same on all, and they meet for it once.
        word: what this member tells the others, 64 bits.

    Returns:
        The words of all members; only LEFT where the first of them has left, see `leave`.
    """
    first, others = members[0], members[1:]
    if meeting.rank != first:
        _tell(meeting, first, name, [word])
        return (yield from _hear(meeting, first, name))
    words = [word]
    for member in others:
        words += yield from _hear(meeting, member, name)
    for member, told in zip(others, words[1:], strict=True):
        if told != LEFT:
            _tell(meeting, member, name, words)
    return words


def leave(meeting: Channel, members: Sequence[int], name: str) -> None:
    """Tell those that come, or wait already, that this member does not; arguments as of `meet`."""
    first, others = members[0], members[1:]
    for member in others if meeting.rank == first else [first]:
        _tell(meeting, member, name, [LEFT])


def _tell(meeting: Channel, member: int, name: str, words: Sequence[int]) -> None:
    text = np.array([len(words), *words], np.int64).tobytes() + name.encode()
    send(meeting, as_buffer(np.frombuffer(text, np.uint8)), member, tag_of(meeting, name))


def _hear(meeting: Channel, member: int, name: str) -> Steps[list[int]]:
    arrival = Arrival(meeting, member, name)
    yield arrival
    return arrival.words


class Arrival:
    """What one member tells, as a request.

    Names may have the same tag: what is told for another one is kept for it.

    Attributes:
        words: what it tells, when it is done.
    """

    words: list[int]

    def __init__(self, meeting: Channel, src: int, name: str) -> None:
        self._meeting = meeting
        self._src = src
        self._name = name
        self._kept = _told.setdefault(meeting, {})
        self._receive = self._posted()

    def _posted(self) -> Receive:
        receive = Receive(self._meeting, None, self._src, tag_of(self._meeting, self._name))
        self._meeting.inbox.receive(receive)
        return receive

    @property
    def missing(self) -> list[int]:
        """Who has not come yet."""
        return [self._src]

    def Test(self) -> bool:
        own = (self._src, self._name)
        while own not in self._kept:
            if not (self._receive._done or self._receive._poll()):
                return False
            name, words = _read(self._receive.result().data.tobytes())
            self._kept.setdefault((self._src, name), []).append(words)
            if name != self._name:
                self._receive = self._posted()
        if not self._receive._looked_at:  # what has come there, or will, is for another name
            self._receive._give_up()
        told = self._kept[own]
        self.words = told.pop(0)
        if not told:
            del self._kept[own]
        return True


def _read(text: bytes) -> tuple[str, list[int]]:
    count, *words = np.frombuffer(text[: len(text) // _WORD_BYTES * _WORD_BYTES], np.int64).tolist()
    return text[(1 + count) * _WORD_BYTES :].decode(), words[:count]
