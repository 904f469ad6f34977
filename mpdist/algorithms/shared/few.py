"""Few: an all_reduce of a few numbers, which lie beside the word that tells of them.

A loss, a norm, a flag: MPI and NumPy take longer to be called than Python takes to
add them. Each member writes its numbers and a word into one line of the cache, reads
the lines of the others, and reduces all in the order of ranks.

These all_reduces are counted by themselves, in memory of their own, a KiB: a
communicator that has no others needs none of a team's. Every `LINES`th uses the same
line, which may be written when all have read what it had before; how far a member has
read them it tells in another word.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpdist.algorithms.shared.calls import ROUND_MASK, misfit
from mpdist.algorithms.shared.members import FEW, Members, Place, gather
from mpdist.algorithms.shared.one_round import Plan, TeamRequest
from mpdist.memory.scalars import SCALAR_FOLDS, SCALAR_FORMATS, wrapped

if TYPE_CHECKING:
    from mpdist.algorithms.reduction import Reduction
    from mpdist.memory import Buffer, Element
    from mpdist.memory.arena import Block
    from mpdist.memory.elements import Array
    from mpdist.progress.channel import Channel
    from mpdist.progress.collective import Steps, Words
    from mpdist.progress.roll import Recurring

LINES = 16
LINE_BYTES = 64
# What a line has beside its word, which is its first.
FEW_BYTES = LINE_BYTES - 8

_WORDS = LINE_BYTES // 8
# The last all_reduce whose numbers a member has read, and whether it has given up; each in a line of its own.
READ_AT, _GIVEN_UP = LINES * _WORDS, (LINES + 1) * _WORDS
BLOCK_BYTES = (LINES + 2) * LINE_BYTES

# So often whoever calls one looks whether the others have come, some 4 us. To wait for them otherwise takes 2 to 3 us
# more, so that two ranks that come a little apart would stay so: each in turn would wait for the other.
LOOKS = 100

# All memory from this address on: to read a number of it takes 25 ns, an object for an array 100 and more.
START = 8
_MEMORY = memoryview((ctypes.c_char * (sys.maxsize // 16 * 8)).from_address(START)).cast("B")


def are_few(how: Reduction, nbytes: int) -> bool:
    """Whether shared memory takes this way for an all_reduce of so many bytes; it compares as little as MPI's call."""
    return nbytes <= FEW_BYTES and how.has_scalars


class Few(Members):
    """What all such all_reduces of a communicator have in common.

    Attributes:
        pair: the other's words where there is one, else words that are no call.
        number: of them so far.
        read: so many have been read by all members, this one too, as far as it has looked.
        pending: those that are not over, in their order.
        known: words and plan, by op, element type and bytes; empty: they go another way.
        recurring: how they are signed, and plan, by op, dtype and count of the array.
    """

    def __init__(self, channel: Channel, block: Block, members: Sequence[Place]) -> None:
        super().__init__(channel, block, members, BLOCK_BYTES // 8, _GIVEN_UP)
        self.pair = self.others[0] if self.size == 2 else memoryview(bytes(BLOCK_BYTES)).cast("q")
        self._looks = range(1 if channel.engine.backoff.yields else LOOKS)
        self.number = 0
        self.read = 0
        self.pending: deque[FewAllReduce] = deque()
        self.known: dict[tuple[str, Element, int], tuple[Words, FewPlan] | tuple[()]] = {}
        self.recurring: dict[tuple[str, object, int], tuple[Recurring, FewPlan]] = {}
        self._plans: dict[tuple[Reduction, int], FewPlan] = {}

    def lines(self, form: str) -> list[memoryview[Any]]:
        """Each member's lines, as numbers of this format."""
        return [self.shared.numbers(rank, offset, BLOCK_BYTES, form) for rank, offset in self.members]

    def plan(self, how: Reduction, nbytes: int) -> FewPlan:
        """Of such all_reduces; made for the first."""
        key = how, nbytes
        return self._plans.get(key) or self._plans.setdefault(key, FewPlan(self, how, nbytes))

    def have_come(self, word_at: int, word: int) -> bool:
        """Whether all others tell the same word there; looks for a moment."""
        for words in self.others:
            for _ in self._looks:
                if words[word_at] == word:
                    break
            else:
                return False
        return True

    def may_write(self, number: int) -> bool:
        """Whether all have read what the line of this one had before."""
        if self.read < number - LINES:
            self.read = min(line[READ_AT] for line in self._lines)
            if self.fence is not None:
                self.fence()
        return self.read >= number - LINES


def few_of(channel: Channel) -> Steps[Few | None]:
    """That of the communicator, whose members are all on this node; made at the first call."""
    if not channel.has_met_for_few:
        gathered = yield from gather(channel, range(channel.size), BLOCK_BYTES, BLOCK_BYTES, FEW)
        channel.few = None if gathered is None else Few(channel, *gathered)
        channel.has_met_for_few = True
    return channel.few  # type: ignore[return-value]  # an object of this level, kept by a lower one


class FewPlan(Plan):
    """Of those of one op, element type and size.

    Attributes:
        fold: two numbers into one.
        terms: what the result is divided by; 0: by nothing.
        first, rest, mine: as numbers, the lines of the first member, of those after it, and of this one.
        second: that of the second, where there are two, no fence is needed, and one number of each is only added.
        lines: where the word, the first number and the others of each line are.
        memory: all, as numbers from START on; at an address of which `odd` has a bit is none.
        shift: of an address, to be the place of a number in it.
    """

    __slots__ = ("first", "fold", "lines", "memory", "mine", "odd", "rest", "second", "shift", "terms")

    is_unchecked = True

    def __init__(self, few: Few, how: Reduction, nbytes: int) -> None:
        super().__init__("all_reduce", how.element, nbytes, how.op)
        form, itemsize = SCALAR_FORMATS[how.element.name], how.element.itemsize
        self.fold = SCALAR_FOLDS[how.op.name]
        self.terms = how.size if how.op.name == "avg" else 0
        lines = few.lines(form)
        self.mine = lines[few.rank]
        self.first, *self.rest = lines
        is_sum = how.op.name == "sum" and how.element.kind == "float" and self.count == 1
        self.second = self.rest[0] if is_sum and len(lines) == 2 and few.fence is None else None
        starts = [(line * LINE_BYTES + 8) // itemsize for line in range(LINES)]
        self.lines = [(line * _WORDS, start, range(start + 1, start + self.count)) for line, start in enumerate(starts)]
        self.memory: memoryview[Any] = _MEMORY.cast(form)  # type: ignore[call-overload]  # one of those above
        self.shift, self.odd = itemsize.bit_length() - 1, itemsize - 1

    def reduce(self, number: int, to: Any, at: int) -> None:
        """What all have shown for the all_reduce of this number, into where this member has its result."""
        first, rest, fold = self.first, self.rest, self.fold
        _, start, _ = self.lines[number % LINES]
        for place in range(start, start + self.count):
            value: Any = first[place]
            for others in rest:
                value = fold(value, others[place])
            if self.terms:
                value /= self.terms
            try:
                to[at] = value
            except ValueError:
                to[at] = wrapped(value, self.element.itemsize)
            at += 1

    def take(self, few: Few, number: int, to: Any, at: int) -> None:
        """The same when all have shown theirs, and tell that this member has read them."""
        if few.fence is not None:
            few.fence()
        self.reduce(number, to, at)
        if few.fence is not None:
            few.fence()
        few.mine[READ_AT] = number

    def numbers(self, buffer: Buffer) -> tuple[Any, int]:
        """Where the buffer's are: in what is indexed for them, which keeps their memory in its place, from here on."""
        exporter: Any = buffer.exporter
        if exporter is None:
            if not buffer.address & self.odd:
                return self.memory, buffer.address - START >> self.shift
            return _Unaligned(buffer.bare_array(), self.memory.format), 0
        is_plain = type(exporter) is np.ndarray and exporter.ndim == 1 and exporter.dtype is self.element.storage
        array: Any = exporter if is_plain else buffer.array()
        view = memoryview(array)
        return (view if len(view.format) == 1 else _Unaligned(array, self.memory.format)), 0


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


class FewAllReduce(TeamRequest[Few]):
    """One such all_reduce."""

    _is_shown = False

    def __init__(self, few: Few, plan: FewPlan, x: Buffer, out: Buffer) -> None:
        self._team = few
        self._plan = plan
        self._held = x, out
        self._to = plan.numbers(out)
        self._from = self._to if x is out else plan.numbers(x)
        self._number = number = few.number + 1
        try:
            few.pending.append(self)
            few.number = number
            if number <= few.read + LINES or few.may_write(number):
                self._show(few)
        except BaseException:  # of a signal's handler
            if not self._is_shown:  # nobody knows of it, so it may be posted again
                few.number = number - 1
                few.pending.pop()
            raise

    @classmethod
    def of_shown(cls, few: Few, plan: FewPlan, to: tuple[Any, int]) -> FewAllReduce:
        """The last one, whose numbers and word have been written; its result goes where `to` says.

        It holds no Buffer: its Work has the array.
        """
        request = cls.__new__(cls)
        request._team = few
        request._plan = plan
        request._to = to
        request._number = few.number
        request._is_shown = True
        few.pending.append(request)
        return request

    def _show(self, few: Few) -> None:
        plan, number = self._plan, self._number
        word_at, start, _ = plan.lines[number % LINES]
        numbers, at = self._from
        mine = plan.mine
        for place in range(start, start + plan.count):
            mine[place] = numbers[at]
            at += 1
        if few.fence is not None:
            few.fence()
        few.mine[word_at] = plan.call | number & ROUND_MASK
        self._is_shown = True

    def Test(self) -> bool:
        few = self._team
        if few is None:
            if self._why is not None:
                raise self._why
            return True
        plan, number = self._plan, self._number
        mine = few.mine
        if mine[READ_AT] != number - 1 or not self._is_shown:
            if mine[READ_AT] >= number:
                return self._leave(few)
            if not self._is_next(few):
                return False
        word_at = plan.lines[number % LINES][0]
        word = mine[word_at]
        for words in few.others:
            other = words[word_at]
            if other != word:
                if not (other ^ word) & ROUND_MASK:
                    self._fail(few)
                self._check_wanted(few)
                return False
        plan.take(few, number, *self._to)
        return self._leave(few)

    def _is_next(self, few: Few) -> bool:
        """Whether those before it are over, and it has shown its numbers."""
        while (first := few.pending[0]) is not self:
            if not first.is_over():
                return False
        if not self._is_shown:
            if not few.may_write(self._number):
                return False
            self._show(few)
            few.ring()
        return True

    def _leave(self, few: Few) -> bool:
        if not self._number % LINES:
            few.ring()  # who waits for a line
        pending = few.pending
        while pending and pending[0]._number <= self._number:  # one before it may have been interrupted here
            pending.popleft()
        self._team = None
        if self._why is not None:
            raise self._why
        return True

    def _fail(self, few: Few) -> NoReturn:
        """Raise, for another member calls something else; all who have come see the same, and go on."""
        at = self._number % LINES * _WORDS
        mine = few.mine[at]
        calls = {few.rank_of(member): line[at] for member, line in enumerate(few.lines("q"))}
        come = {rank: call for rank, call in calls.items() if not (call ^ mine) & ROUND_MASK}
        self._why = why = misfit(few.channel.where(), come, mine)
        assert why is not None
        if few.fence is not None:
            few.fence()
        few.mine[READ_AT] = self._number  # all have read it
        self._leave(few)
        raise why

    def _check_wanted(self, few: Few) -> None:
        """Raise if a member that has given up has not come, and so never will."""
        number = self._number
        for words in few.others:
            if words[_GIVEN_UP]:
                if few.fence is not None:
                    few.fence()
                if (words[number % LINES * _WORDS] ^ number) & ROUND_MASK:
                    raise few.deserted()


FewPlan.request = FewAllReduce
