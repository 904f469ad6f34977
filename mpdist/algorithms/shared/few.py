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
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.algorithms.shared.calls import ROUND_MASK, misfit
from mpdist.algorithms.shared.one_round import AllReducePlan
from mpdist.algorithms.shared.team import GIVEN_UP, LINE_BYTES, LINES, Team
from mpdist.errors import MpdistError
from mpdist.memory.scalars import SCALAR_FOLDS, SCALAR_FORMATS, wrapped

if TYPE_CHECKING:
    from mpdist.algorithms.reduction import Reduction
    from mpdist.memory import Buffer

# What a line has beside its word, which is its first.
FEW_BYTES = LINE_BYTES - 8

_WORDS = LINE_BYTES // 8
# The last all_reduce whose numbers a member has read; in a line of its own.
_READ_AT = LINES * _WORDS

# All memory from this address on: to read a number of it takes 25 ns, an object for an array 100 and more.
_START = 8
_MEMORY = memoryview((ctypes.c_char * (sys.maxsize // 16 * 8)).from_address(_START)).cast("B")


class Few:
    """What all such all_reduces of a team have in common.

    Attributes:
        number: of them so far.
        known: so many have been read by all members, this one too, as far as it has looked.
        pending: those that are not over, in their order.
        lines: the words of the members' lines; mine, others: of this member, and of the others.
    """

    __slots__ = ("fence", "known", "lines", "mine", "number", "others", "pending", "team")

    def __init__(self, team: Team) -> None:
        self.team = team
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

    def misfit(self, number: int) -> MpdistError | None:
        """Why the calls of those that have come to this one do not go together; None if they do."""
        team, at = self.team, number % LINES * _WORDS
        mine = self.mine[at]
        calls = {team.rank_of(member): line[at] for member, line in enumerate(self.lines)}
        come = {rank: call for rank, call in calls.items() if not (call ^ mine) & ROUND_MASK}
        return misfit(team.channel.where(), come, mine)


class FewPlan(AllReducePlan):
    """Of those of one op, element type and size.

    Attributes:
        fold: two numbers into one.
        terms: what the result is divided by; 0: by nothing.
        first, rest, mine: as numbers, the lines of the first member, of those after it, and of this one.
        lines: where the word and the numbers of each line are.
    """

    is_compared = False

    __slots__ = ("_memory", "few", "first", "fold", "lines", "mine", "rest", "terms")

    def __init__(self, team: Team, how: Reduction, nbytes: int) -> None:
        super().__init__(team, how, nbytes)
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

    def numbers(self, buffer: Buffer) -> tuple[memoryview[Any], int]:
        """Where the buffer's are: in a view, from this one on. Of unaligned ones it is a copy, see `_put_back`."""
        exporter: Any = buffer.exporter
        if type(exporter) is np.ndarray and exporter.ndim == 1 and exporter.dtype is self.element.storage:
            view: memoryview[Any] = memoryview(exporter)  # type: ignore[arg-type]  # it has the buffer protocol
            if len(view.format) == 1:  # else it is not aligned
                return view, 0
        start = buffer.address - _START
        itemsize = self.element.itemsize
        if start % itemsize == 0:
            return self._memory, start // itemsize
        return memoryview(bytearray(_MEMORY[start : start + self.nbytes])).cast(self._memory.format), 0  # type: ignore[call-overload]  # as above


class FewAllReduce:
    """One such all_reduce, as a request; whoever posts it wakes the other members.

    A signal's handler may raise anywhere in it; then it is tested again.
    """

    _is_shown = False
    _why: MpdistError | None = None

    def __init__(self, team: Team, plan: FewPlan, x: Buffer, out: Buffer) -> None:
        few = plan.few
        self._plan = plan
        self._held = x, out
        self._numbers, self._at = plan.numbers(out)
        self._number = number = few.number + 1
        try:
            few.pending.append(self)
            few.number = number
            if number <= few.known + LINES or few.may_write(number):
                self._show(few)
        except BaseException:  # of a signal's handler
            if not self._is_shown and few.pending[-1] is self:  # nobody knows of it, so it may be posted again
                few.number = number - 1
                few.pending.pop()
            raise

    def _show(self, few: Few) -> None:
        plan, number = self._plan, self._number
        word_at, places = plan.lines[number % LINES]
        x, out = self._held
        numbers, at = (self._numbers, self._at) if x is out else plan.numbers(x)
        mine = plan.mine
        for place in places:
            mine[place] = numbers[at]
            at += 1
        if few.fence is not None:
            few.fence()
        few.mine[word_at] = plan.call | number & ROUND_MASK
        self._is_shown = True

    def Test(self) -> bool:
        plan, number = self._plan, self._number
        few = plan.few
        mine = few.mine
        if mine[_READ_AT] != number - 1 or not self._is_shown:
            if mine[_READ_AT] >= number:
                return self._leave(few)
            if not self._is_next(few):
                return False
        word_at, places = plan.lines[number % LINES]
        word = mine[word_at]
        for words in few.others:
            other = words[word_at]
            if other != word:
                return self._has_failed(few, other)
        if few.fence is not None:
            few.fence()
        first, rest, fold = plan.first, plan.rest, plan.fold
        numbers, at = self._numbers, self._at
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
        if type(numbers.obj) is bytearray:
            self._put_back(numbers)
        if few.fence is not None:
            few.fence()
        mine[_READ_AT] = number
        if not word_at:
            few.team.ring()  # who waits for a line
        few.pending.popleft()
        return True

    def _is_next(self, few: Few) -> bool:
        """Whether those before it are over, and it has shown its numbers."""
        while (first := few.pending[0]) is not self:
            if not first.is_over():
                return False
        if not self._is_shown:
            if not few.may_write(self._number):
                return False
            self._show(few)
            few.team.ring()
        return True

    def is_over(self) -> bool:
        """As `Test`, for those that come after it: its error is its own."""
        try:
            return self.Test()
        except MpdistError:
            if self._why is None:
                raise
            return True

    def _has_failed(self, few: Few, other: int) -> bool:
        """Raise if another member calls something else, or has given up; False if it has not come."""
        team = few.team
        if not (other ^ self._number) & ROUND_MASK:  # all who have come see the same, and go on
            self._why = few.misfit(self._number)
            few.mine[_READ_AT] = self._number
            team.ring()
            return self._leave(few)
        for line in team.others:
            if line[GIVEN_UP]:
                self._check_there(few)
        return False

    def _check_there(self, few: Few) -> None:
        """Raise if a member that has given up has not come, and so never will."""
        team, at = few.team, self._number % LINES * _WORDS
        if team.fence is not None:
            team.fence()
        for line in few.others:  # it may have come since it was looked at, and given up after that
            if line[at] != few.mine[at]:
                raise team.deserted()

    def _put_back(self, copy: memoryview[Any]) -> None:
        start = self._held[1].address - _START
        _MEMORY[start : start + copy.nbytes] = copy.cast("B")

    def _leave(self, few: Few) -> bool:
        if few.pending and few.pending[0] is self:
            few.pending.popleft()
        if self._why is not None:
            raise self._why
        return True


FewPlan.request = FewAllReduce
