"""Meeting: members of a communicator come together by messages, not by a collective of it.

The messages go over a channel of the world that carries nothing else, so that no
call of the user's is taken for a part of the meeting, whatever the ranks call: each
member reports to the first, which answers when all have come.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpdist.errors import UsageError
from mpdist.memory import as_buffer
from mpdist.progress.receive import Receive
from mpdist.progress.sending import send

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel
    from mpdist.progress.collective import Steps

_WORD_BYTES = 8

LEFT = -1
"""The word of a member that never comes."""


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
    text = np.array(words, np.int64).tobytes() + name.encode()
    send(meeting, as_buffer(np.frombuffer(text, np.uint8)), member, tag_of(meeting, name))


def _hear(meeting: Channel, member: int, name: str) -> Steps[list[int]]:
    arrival = Arrival(meeting, member, name)
    yield arrival
    return arrival.words()


class Arrival:
    """What one member tells, as a request."""

    def __init__(self, meeting: Channel, src: int, name: str) -> None:
        self._receive = meeting.inbox.receive(Receive(meeting, None, src, tag_of(meeting, name)))
        self._name = name.encode()

    def Test(self) -> bool:
        return self._receive._done or self._receive._poll()

    def words(self) -> list[int]:
        """The words that it tells.

        Raises:
            UsageError: it has come for something else, whose name has the same tag.
        """
        text = self._receive.result().data.tobytes()
        if not text.endswith(self._name) or (len(text) - len(self._name)) % _WORD_BYTES:
            raise UsageError(
                f"rank {self._receive.src} of the world has come for another communicator than "
                f"{self._name.decode()!r} at the same time; make them one after the other"
            )
        words: list[int] = np.frombuffer(text[: -len(self._name)], np.int64).tolist()
        return words
