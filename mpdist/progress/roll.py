"""Roll: each rank signs which collective it posts, so that whoever comes later sees a difference before it posts.

MPI compares nothing: arrays of different sizes give wrong numbers, writes beyond an
array, or ranks that wait for ever. The ranks of a node have some memory in common,
where each writes a checksum of its call, by the communicator and the number of the
collective, and looks at those of two others, the next member below and above:
where any two members differ, some neighbours do. The call's text is written once,
for errors. Whoever comes first has nothing to
compare with, so one rank raises, and the others wait for its corrected call.
Ranks of other nodes are not seen.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeAlias

from mpdist.errors import CollectiveMismatch

if TYPE_CHECKING:
    import mmap

    from mpdist.progress.channel import Channel
    from mpdist.progress.collective import Words

# So many collectives of each rank are remembered; who is further behind sees no difference. And so many texts.
_ENTRIES = 256
_TEXTS = 1024
_TEXT_BYTES = 64
_ENTRY_BYTES = 8

# An entry is a word of 60 bits, which Python adds quickly: whether the call compares nothing by itself, a checksum of
# the text, and a key, which is the number of the collective, counted from a place that the communicator's name gives.
_KEY_BITS = 40
_KEYS = (1 << _KEY_BITS) - 1
_CODES = 1 << 19
_UNCHECKED = 1 << 59
# No entry: its key is that of no collective.
_NONE = 0

# What is known of the codes of calls is dropped all at once.
_MOST_CODES = _TEXTS

# After so long what another rank has written is seen as a whole, in whatever order its processor did.
_SETTLE_SECONDS = 0.001

# Each rank chooses its own color.
OWN_DETAILS = frozenset({"split"})

# Of blocks in a list, whose headers tell the type to all.
_OWN_TYPE = re.compile(r"^\[\w+\]$")

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def comparable(details: str) -> str:
    """Without what differs between processes: the addresses of objects."""
    return _ADDRESS.sub("", details)


Call: TypeAlias = "tuple[str, Words, bool]"
"""Operation, what makes its details, and whether it compares nothing by itself."""


class Recurring(tuple[str, "Words", bool]):
    """A Call that is equal to itself alone, so that it is found in a third of the time."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Roll:
    """The memory of the ranks of one node.

    Args:
        memory: `roll_bytes(len(places))` zeroed bytes that they share.
        places: of their ranks in the world, 0 and up.
    """

    def __init__(self, memory: mmap.mmap | bytearray, places: Mapping[int, int]) -> None:
        split = len(places) * _ENTRIES * _ENTRY_BYTES
        self.entries = memoryview(memory)[:split].cast("Q")
        self.texts = memoryview(memory)[split:]
        self.places = places
        self.codes: dict[Call, int] = {}
        self.written: dict[int, list[Call]] = {}

    def signer(self, channel: Channel) -> Signer | None:
        """For the collectives of a channel; None where no other member is on this node."""
        here = [rank for rank in channel.world_ranks if rank in self.places]
        return Signer(self, channel, here) if len(here) > 1 else None


def roll_bytes(ranks: int) -> int:
    """How much memory so many ranks of a node need."""
    return ranks * (_ENTRIES * _ENTRY_BYTES + _TEXTS * _TEXT_BYTES)


class Signer:
    """Signs for one rank in one communicator.

    Args:
        here: the members on this node, by their ranks in the world.
    """

    def __init__(self, roll: Roll, channel: Channel, here: list[int]) -> None:
        own = here.index(channel.world_ranks[channel.rank])
        near = {here[own - 1], here[(own + 1) % len(here)]}
        self._channel = channel
        self._entries, self._texts = roll.entries, roll.texts
        self._codes, self._written = roll.codes, roll.written
        # By its name, which all members know, and which differs from those of all others; half of the keys are left.
        self._base = int.from_bytes(blake2b(channel.name.encode(), digest_size=8).digest(), "little") % (_KEYS // 2)
        self._offset = self._base % _ENTRIES
        self._own = roll.places[here[own]] * _ENTRIES
        self._near = {roll.places[rank] * _ENTRIES: channel.world_ranks.index(rank) for rank in near}
        self._firsts = tuple(self._near)

    def sign(self, sequence: int, call: Call) -> None:
        """Write down that this collective is posted as number `sequence`, and compare.

        Args:
            call: with whether it compares nothing by itself, as MPI's own. Others do, where no rank's is so.

        Raises:
            CollectiveMismatch: another member has called something else, and one of both compares nothing.
        """
        try:
            code = self._codes[call]
        except KeyError:
            code = self._code(call)
        entries = self._entries
        entry = code + self._base + sequence
        place = (self._offset + sequence) % _ENTRIES
        entries[self._own + place] = entry
        for first in self._firsts:
            other = entries[first + place]
            if other != entry and not (other ^ entry) & _KEYS:
                try:
                    self._differ(sequence, entry, first, place)
                except BaseException:  # also of a signal's handler
                    self.take_back(sequence)
                    raise

    def sign_made(self, sequence: int, op: str, details: Callable[[], str], is_unchecked: bool) -> None:
        """The same, of a function that makes the details; the arguments of a `partial` have a hash."""
        words: Words = (details.func, *details.args) if type(details) is partial else (str, details())
        self.sign(sequence, (op, words, is_unchecked))

    def take_back(self, sequence: int) -> None:
        """This call is not made: who corrects its own must not meet it."""
        self._entries[self._own + (self._offset + sequence) % _ENTRIES] = _NONE

    def _code(self, call: Call) -> int:
        """Code of a call, in its place in an entry; others find its text from now on."""
        op, words, is_unchecked = call
        details = "" if op in OWN_DETAILS else _OWN_TYPE.sub("list", comparable(words[0](*words[1:])))
        line = f"{op} {details}".strip().encode(errors="replace")
        if len(line) >= _TEXT_BYTES:
            line = line[: _TEXT_BYTES - 16] + b"... (%08x)" % zlib.crc32(line)
        text = line.ljust(_TEXT_BYTES, b"\0")
        number = zlib.crc32(text) % _CODES
        if len(self._codes) >= _MOST_CODES:
            self._codes.clear()
            self._written.clear()
        at = _text_at(self._own, number)
        if self._texts[at : at + _TEXT_BYTES] != text:
            for before in self._written.pop(at, ()):  # whose text is written again when they are called
                self._codes.pop(before, None)
            self._texts[at : at + _TEXT_BYTES] = text
        self._written.setdefault(at, []).append(call)
        code = self._codes[call] = number << _KEY_BITS | (_UNCHECKED if is_unchecked else 0)
        return code

    def _text(self, first: int, entry: int) -> str:
        """The call of this entry of the rank whose entries begin there, if it has written no other text over it."""
        code = (entry >> _KEY_BITS) % _CODES
        at = _text_at(first, code)
        text = bytes(self._texts[at : at + _TEXT_BYTES])
        return text.rstrip(b"\0").decode(errors="replace") if zlib.crc32(text) % _CODES == code else "something else"

    def _differ(self, sequence: int, entry: int, first: int, place: int) -> None:
        """Raise CollectiveMismatch, unless they find out by themselves."""
        if not _is_misfit(entry, self._entries[first + place]):
            return
        time.sleep(_SETTLE_SECONDS)
        other = self._entries[first + place]
        if not _is_misfit(entry, other):
            return
        channel, rank = self._channel, self._near[first]
        calls = {channel.rank: self._text(self._own, entry), rank: self._text(first, other)}
        raise CollectiveMismatch(
            f"call {sequence} on {channel.where()} differs between ranks: this rank calls {calls[channel.rank]}, "
            f"rank {rank} has called {calls[rank]}. Nothing was posted here: rank {rank} waits for the same call, "
            "unless it was refused, too. "
            "MPDIST_DEBUG=1 tells each rank's line",
            calls,
        )


def _is_misfit(entry: int, other: int) -> bool:
    """Whether two entries are of one collective, differ, and nobody else finds out."""
    different = (entry ^ other) & ~_UNCHECKED
    return bool(different) and not different & _KEYS and bool((entry | other) & _UNCHECKED)


def _text_at(first: int, code: int) -> int:
    return (first // _ENTRIES * _TEXTS + code % _TEXTS) * _TEXT_BYTES
