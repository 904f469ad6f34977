"""Few: an all_reduce of a few numbers, which lie beside the word that tells of them.

A loss, a norm, a flag: MPI and NumPy take longer to be called than Python takes to
add them. Each member writes its numbers and a word into one line of the cache, reads
the lines of the others, and reduces all in the order of ranks.

These all_reduces are counted by themselves, and have no part in the rounds of their
team. Every `LINES`th uses the same line, which may be written when all have read what
it had before; how far a member has read it tells in another word.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpdist.algorithms.shared.calls import ROUND_MASK, misfit
from mpdist.algorithms.shared.one_round import Plan, TeamRequest
from mpdist.algorithms.shared.team import GIVEN_UP, LINE_BYTES, LINES, Team
from mpdist.memory.scalars import SCALAR_FOLDS, SCALAR_FORMATS, wrapped

if TYPE_CHECKING:
    from mpdist.algorithms.reduction import Reduction
    from mpdist.memory import Buffer
    from mpdist.memory.elements import Array

# What a line has beside its word, which is its first.
FEW_BYTES = LINE_BYTES - 8

_WORDS = LINE_BYTES // 8
# The last all_reduce whose numbers a member has read; in a line of its own.
_READ_AT = LINES * _WORDS

# All memory from this address on: to read a number of it takes 25 ns, an object for an array 100 and more.
_START = 8
_MEMORY = memoryview((ctypes.c_char * (sys.maxsize // 16 * 8)).from_address(_START)).cast("B")


def are_few(how: Reduction, nbytes: int) -> bool:
    """Whether shared memory takes this way for an all_reduce of so many bytes; it compares as little as MPI's call."""
    return nbytes <= FEW_BYTES and how.has_scalars


class Few:
    """What all such all_reduces of a team have in common; it does not know the team, which goes with its last use.

    Attributes:
        number: of them so far.
        known: so many have been read by all members, this one too, as far as it has looked.
        pending: those that are not over, in their order.
        lines: the words of the members' lines; mine, others: of this member, and of the others.
    """

    __slots__ = ("fence", "known", "lines", "mine", "number", "others", "pending")

    def __init__(self, team: Team) -> None:
        self.fence = team.fence
        self.lines = team.lines("q")
        self.mine = self.lines[team.rank]
        self.others = [line for line in self.lines if line is not self.mine]
        self.number = 0
        self.known = 0
        self.pending: deque[FewAllReduce] = deque()

    def may_write(self, number: int) -> bool:
        """Whether all have read what the line of this one had before."""
        if self.known < number - LINES:
            self.known = min(line[_READ_AT] for line in self.lines)
            if self.fence is not None:
                self.fence()
        return self.known >= number - LINES


class FewPlan(Plan):
    """Of those of one op, element type and size.

    Attributes:
        fold: two numbers into one.
        terms: what the result is divided by; 0: by nothing.
        first, rest, mine: as numbers, the lines of the first member, of those after it, and of this one.
        lines: where the word and the numbers of each line are.
    """

    __slots__ = ("_memory", "few", "first", "fold", "lines", "mine", "rest", "terms")

    is_unchecked = True

    def __init__(self, team: Team, how: Reduction, nbytes: int) -> None:
        super().__init__("all_reduce", how.element, nbytes, how.op)
        with team.channel.engine.lock:  # of several threads that post the first, one makes it
            few = team.few = team.few or Few(team)
        self.few = few
        form, itemsize = SCALAR_FORMATS[how.element.name], how.element.itemsize
        self.fold = SCALAR_FOLDS[how.op.name]
        self.terms = how.size if how.op.name == "avg" else 0
        lines = team.lines(form)
        self.mine = lines[team.rank]
        self.first, *self.rest = lines
        starts = [(line * LINE_BYTES + 8) // itemsize for line in range(LINES)]
        self.lines = [(line * _WORDS, range(start, start + self.count)) for line, start in enumerate(starts)]
        self._memory: memoryview[Any] = _MEMORY.cast(form)  # type: ignore[call-overload]  # one of those above

    def numbers(self, buffer: Buffer) -> tuple[Any, int]:
        """Where the buffer's are: in what is indexed for them, which keeps their memory in its place, from here on."""
        exporter: Any = buffer.exporter
        if exporter is None:
            start, itemsize = buffer.address - _START, self.element.itemsize
            if start % itemsize == 0:
                return self._memory, start // itemsize
            return _Unaligned(buffer.bare_array(), self._memory.format), 0
        is_plain = type(exporter) is np.ndarray and exporter.ndim == 1 and exporter.dtype is self.element.storage
        array: Any = exporter if is_plain else buffer.array()
        view = memoryview(array)
        return (view if len(view.format) == 1 else _Unaligned(array, self._memory.format)), 0


class _Unaligned:
    """Numbers that no memoryview gives."""

    def __init__(self, array: Array, form: str) -> None:
        self._array = array
        self._one: memoryview[Any] = memoryview(bytearray(array.itemsize)).cast(form)  # type: ignore[call-overload]  # a format

    def __getitem__(self, at: int) -> Any:
        return self._array[at].item()

    def __setitem__(self, at: int, value: Any) -> None:
        self._one[0] = value  # it rounds, or refuses, as for others
        self._array[at] = np.frombuffer(self._one, self._array.dtype)[0]


class FewAllReduce(TeamRequest):
    """One such all_reduce."""

    _is_shown = False

    def __init__(self, team: Team, plan: FewPlan, x: Buffer, out: Buffer) -> None:
        few = plan.few
        self._team = team
        self._plan = plan
        self._held = x, out
        self._to = plan.numbers(out)
        self._from = self._to if x is out else plan.numbers(x)
        self._number = number = few.number + 1
        try:
            few.pending.append(self)
            few.number = number
            if number <= few.known + LINES or few.may_write(number):
                self._show(few)
        except BaseException:  # of a signal's handler
            if not self._is_shown:  # nobody knows of it, so it may be posted again
                few.number = number - 1
                few.pending.pop()
            raise

    def _show(self, few: Few) -> None:
        plan, number = self._plan, self._number
        word_at, places = plan.lines[number % LINES]
        numbers, at = self._from
        mine = plan.mine
        for place in places:
            mine[place] = numbers[at]
            at += 1
        if few.fence is not None:
            few.fence()
        few.mine[word_at] = plan.call | number & ROUND_MASK
        self._is_shown = True

    def Test(self) -> bool:
        team = self._team
        if team is None:
            if self._why is not None:
                raise self._why
            return True
        plan, number = self._plan, self._number
        few = plan.few
        mine = few.mine
        if mine[_READ_AT] != number - 1 or not self._is_shown:
            if mine[_READ_AT] >= number:
                return self._leave(team, few)
            if not self._is_next(team, few):
                return False
        word_at, places = plan.lines[number % LINES]
        word = mine[word_at]
        for words in few.others:
            other = words[word_at]
            if other != word:
                if not (other ^ word) & ROUND_MASK:
                    self._fail(team, few)
                self._check_wanted(team, few)
                return False
        if few.fence is not None:
            few.fence()
        first, rest, fold = plan.first, plan.rest, plan.fold
        numbers, at = self._to
        for place in places:
            value: Any = first[place]
            for others in rest:
                value = fold(value, others[place])
            if plan.terms:
                value /= plan.terms
            try:
                numbers[at] = value
            except ValueError:
                numbers[at] = wrapped(value, plan.element.itemsize)
            at += 1
        return self._end(team, few)

    def _is_next(self, team: Team, few: Few) -> bool:
        """Whether those before it are over, and it has shown its numbers."""
        while (first := few.pending[0]) is not self:
            if not first.is_over():
                return False
        if not self._is_shown:
            if not few.may_write(self._number):
                return False
            self._show(few)
            team.ring()
        return True

    def _end(self, team: Team, few: Few) -> bool:
        """Have the others go on, after this member has read all."""
        if few.fence is not None:
            few.fence()
        few.mine[_READ_AT] = self._number
        return self._leave(team, few)

    def _leave(self, team: Team, few: Few) -> bool:
        if not self._number % LINES:
            team.ring()  # who waits for a line
        pending = few.pending
        while pending and pending[0]._number <= self._number:  # one before it may have been interrupted here
            pending.popleft()
        self._team = None
        if self._why is not None:
            raise self._why
        return True

    def _fail(self, team: Team, few: Few) -> NoReturn:
        """Raise, for another member calls something else; all who have come see the same, and go on."""
        at = self._number % LINES * _WORDS
        mine = few.mine[at]
        calls = {team.rank_of(member): line[at] for member, line in enumerate(few.lines)}
        come = {rank: call for rank, call in calls.items() if not (call ^ mine) & ROUND_MASK}
        self._why = why = misfit(team.channel.where(), come, mine)
        assert why is not None
        self._end(team, few)
        raise why

    def _check_wanted(self, team: Team, few: Few) -> None:
        """Raise if a member that has given up has not come, and so never will."""
        number = self._number
        for line, words in zip(team.others, few.others, strict=True):
            if line[GIVEN_UP]:
                if team.fence is not None:
                    team.fence()
                if (words[number % LINES * _WORDS] ^ number) & ROUND_MASK:
                    raise team.deserted()


FewPlan.request = FewAllReduce
