"""Words: what each member of a device team tells the others, in 64-bit words that it alone writes; pure.

A collective may be called with an array on a device by some members, and on the host
by others. So every member tells, when the turn of a collective comes, as what it came:

    HOST     the number of the last collective to which it came with host memory
    DEVICE   of the last one with memory on its device, and in which of two sets it put the facts about it
    BEFORE   the same of the one before

Who comes with a device waits until all have told of this collective, and none that
comes with one goes on before all have: so two sets suffice, and who has told of later
ones only came as a host.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from enum import IntEnum

STATE, SINCE, HOST, DEVICE, BEFORE, GIVEN_UP = range(6)
# How many rounds it has shown and taken, see order.py.
ROUNDS_AT = 6
# Which GPU it uses, as all processes of the node know it.
GPU = 8
_FACTS_AT = 9
FACTS = 4 + 2 + 2 * 8
"""So many words about a collective."""
HANDLES_AT = _FACTS_AT + 2 * FACTS


class State(IntEnum):
    """How far a member is with opening the others' memory."""

    ABSENT = 0
    EXPORTED = 1
    PROVEN = 2
    REFUSED = 3


Facts = Sequence[int]


class Calls:
    """As what the members come to collectives.

    Args:
        lines: the words of all members.
        rank: this member.
        fence: orders memory accesses; None where the processor does.
    """

    def __init__(self, lines: Sequence[memoryview], rank: int, fence: Callable[[], object] | None = None) -> None:
        self._lines = lines
        self._mine = lines[rank]
        self._fence = fence

    def tell_host(self, number: int) -> None:
        """This member comes to a collective with host memory."""
        self._order()
        self._mine[HOST] = number

    def tell_device(self, number: int, facts: Facts) -> None:
        """It comes with memory of its device."""
        mine = self._mine
        side = 1 - mine[DEVICE] % 2
        at = _FACTS_AT + side * FACTS
        for word in facts:
            mine[at] = word
            at += 1
        mine[BEFORE] = mine[DEVICE]
        self._order()
        mine[DEVICE] = 2 * number + side

    def have_come(self, number: int) -> bool:
        """Whether all have told of a collective."""
        come = all(line[HOST] >= number or line[DEVICE] >= 2 * number for line in self._lines)
        self._order()
        return come

    def facts(self, number: int) -> list[Facts] | None:
        """What all have told of a collective to which they have come; None if one came as a host."""
        found = [self._facts(line, number) for line in self._lines]
        return None if None in found else [each for each in found if each is not None]

    def _facts(self, line: memoryview, number: int) -> Facts | None:
        self._order()
        for word in (DEVICE, BEFORE):  # in this order: what leaves the first is in the second already
            told = line[word]
            if told // 2 == number:
                at = _FACTS_AT + told % 2 * FACTS
                return line[at : at + FACTS].tolist()
            self._order()
        return None

    def _order(self) -> None:
        if self._fence is not None:
            self._fence()


def joint_start(lines: Sequence[memoryview], fence: Callable[[], object] | None = None) -> int | None:
    """From which collective on all tell as what they come, and have the others' memory open; None: not yet."""
    if any(line[STATE] != State.PROVEN for line in lines):
        return None
    if fence is not None:
        fence()
    return max(line[SINCE] for line in lines)


def words_of_handle(handle: bytes) -> list[int]:
    """A handle as facts about a collective."""
    return memoryview(handle).cast("q").tolist()


def handle_in(facts: Facts, at: int) -> bytes:
    """The handle among facts."""
    return array("q", facts[at : at + 8]).tobytes()


def pack_handle(line: memoryview, index: int, handle: bytes) -> None:
    """Put down handle `index` of a member."""
    line[_handle_at(index) : _handle_at(index + 1)] = memoryview(handle).cast("q")


def handle_of(line: memoryview, index: int) -> bytes:
    """Handle `index` of a member."""
    return line[_handle_at(index) : _handle_at(index + 1)].tobytes()


def words_needed(handles: int) -> int:
    """How many words a member with so many handles has."""
    return _handle_at(handles)


def _handle_at(index: int) -> int:
    return HANDLES_AT + 8 * index
