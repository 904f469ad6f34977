"""All-reduce: the reduction of all ranks whose result all get, in place or not; and how any op is reduced.

Of a few numbers it is one function, from the array to the result: what is asked of
the array, and how the call is compared, told and remembered, takes less time so than
the objects that all others have for it. And who comes last finds the numbers of all
others there, so that it ends before it is awaited: that is the one for whom the
others wait.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from numpy import ndarray

from mpdist.algorithms import native, ordered
from mpdist.algorithms.choose import FEW
from mpdist.algorithms.reduction import Reduction
from mpdist.algorithms.shared import plans
from mpdist.algorithms.shared.calls import ROUND_MASK
from mpdist.algorithms.shared.few import FEW_BYTES, LINES, READ_AT, START, Few, FewPlan, are_few
from mpdist.algorithms.shared.few_works import Ended, interrupted, wait
from mpdist.algorithms.shared.team import Team
from mpdist.comm.arrays import Arrays, OpLike, check_apart, check_same, name_of, op_text, reduction_text
from mpdist.comm.operation import OnDevice, host_buffer, operation
from mpdist.errors import UsageError
from mpdist.memory import Buffer, Element, ReduceOp, as_op, check_op, is_same
from mpdist.memory.sources import MAKERS, from_torch
from mpdist.progress.backoff import USUAL_CREDIT
from mpdist.progress.channel import Channel
from mpdist.progress.roll import Recurring

if TYPE_CHECKING:
    from mpdist.algorithms.shared.one_round import Plan
    from mpdist.progress.collective import Words
    from mpdist.progress.work import Work


def _two(x: object, out: object) -> tuple[Buffer | None, Buffer]:
    """Of x and out; None for x where it is out."""
    source, target = host_buffer(x), host_buffer(out, writable=True)
    check_same(source, target)
    if is_same(source, target):
        return None, target
    check_apart(source, target)
    return source, target


def _name_alone(op: OpLike) -> str | None:
    """Where its name says all of an op that is not given by it: the name."""
    return op.name if isinstance(op, ReduceOp) and op.factor is None and op.function is None else None


class AllReduce(Arrays):
    """Reducing arrays over the ranks, so that all get the result."""

    _reductions: dict[tuple[str, Element], Reduction]

    def all_reduce(
        self, x: object, op: OpLike = "sum", *, out: object = None, deterministic: bool = False
    ) -> Work[Any]:
        """Reduce `x` over all ranks; all get the result.

        Args:
            x: same number of elements and type on all ranks; without `out` it gets the result.
            op: associative; float16 and bfloat16 accumulate in float32; min and max give NaN where a rank has
                it. A function of two arrays is applied in rank order.
            out: as large as `x`, of its type; `x` itself for in place.
            deterministic: fold in the order of ranks, so that neither timing nor the choice of an algorithm
                shows in the bits of the result, but for those of NaN; the same on all ranks.

        Returns:
            A Work of the array that has the result.

        See MPI_Iallreduce.
        """
        channel = self._channel
        few: Any = channel.at_once
        if few is None or out is not None or deterministic:
            return self._posted(x, op, out, deterministic)
        array: Any = x
        try:
            kind = type(x)
            if kind is ndarray:
                call, plan = few.recurring[op, array.dtype, array.size]
                if not array.flags.carray:
                    return self._posted(x, op, out, deterministic)
                numbers, start = memoryview(array if array.ndim == 1 else array.reshape(-1)), 0
            elif MAKERS.get(kind) is from_torch:
                call, plan = few.recurring[op, array.dtype, array.numel()]
                address = array.data_ptr()
                is_odd = address & plan.odd or not array.is_cpu or array.is_nested or array.is_neg()
                if is_odd or not address or not array.is_contiguous():
                    return self._posted(x, op, out, deterministic)
                numbers, start = plan.memory, address - START >> plan.shift
            else:
                return self._posted(x, op, out, deterministic)
        except (KeyError, TypeError, ValueError, RuntimeError):  # an op without a hash, a tensor without memory
            return self._posted(x, op, out, deterministic)
        engine = channel.engine
        work: Any = None
        try:
            with engine.lock:
                number = few.number + 1
                is_free = number <= few.read + LINES or few.may_write(number)
                if is_free and channel.at_once is few and not (channel.collectives or channel.broken):
                    try:
                        sequence = channel.sequence + 1
                        if channel.signer is not None:
                            channel.signer.sign(sequence, call)
                        word_at, place, places = plan.lines[number % LINES]
                        mine = plan.mine
                        mine[place] = numbers[start]
                        if places:
                            at = start
                            for place in places:
                                at += 1
                                mine[place] = numbers[at]
                        if few.fence is not None:
                            few.fence()
                        few.number = number  # with the next two lines: no handler of a signal comes in between
                        few.mine[word_at] = word = plan.call | number & ROUND_MASK
                        channel.sequence = sequence
                        if engine.credit > 0 and (few.pair[word_at] == word or few.have_come(word_at, word)):
                            if plan.second is None:
                                plan.take(few, number, numbers, start)
                            else:  # the same of one number of two members, without its call
                                numbers[start] = plan.first[place] + plan.second[place]
                                few.mine[READ_AT] = number
                            engine.credit -= USUAL_CREDIT
                            work = Ended()
                            work._channel, work._result, work._words = channel, x, call[1]
                            work.sequence = sequence
                            frame = sys._getframe(1)
                            channel.recent.append(("all_reduce", call[1], (frame.f_code, frame.f_lasti)))
                        else:
                            work = wait(channel, few, plan, call, x, numbers, start, sys._getframe(1))
                    except BaseException:  # of a signal's handler, or CollectiveMismatch
                        interrupted(channel, few, plan, call, x, numbers, start, number)
                        raise
            if work is not None:
                if channel._peer is None or channel.flags[channel._peer]:
                    channel.ring_all()
                ticking = engine.ticking
                if not work._done and (ticking.is_asleep or not ticking.is_on):
                    ticking.stir()
                posted: Work[Any] = work
                return posted
        except BaseException as error:  # as above
            if work is not None:
                channel.lost_hold_of("all_reduce")
            elif isinstance(error, UsageError):
                raise self._explained("all_reduce", error) from error.__cause__
            raise
        return self._posted(x, op, out, deterministic)

    def _posted(self, x: object, op: OpLike, out: object, deterministic: bool) -> Work[Any]:
        """Of any array."""
        try:
            if not deterministic:
                source, target = (None, host_buffer(x, writable=True)) if out is None else _two(x, out)
                result = x if out is None else out
                channel, nbytes = self._channel, target.nbytes
                name = op if type(op) is str else _name_alone(op)
                if name is not None:
                    home: Any = channel.few
                    known: Any = ()
                    if nbytes <= FEW_BYTES and isinstance(home, Few) and type(channel) is Channel:
                        known = home.known.get((name, target.element, nbytes))
                        if known is None:
                            known = self._planned_few(home, name, target)
                        if known and out is None:
                            self._note(home, x, name, known)
                    if not known and isinstance(home := channel.team, Team):
                        known = home.known.get((name, target.element, nbytes))
                        if known is None:
                            known = self._planned(home, name, target)
                    if known:
                        words, plan = known
                        return channel.post_direct(
                            "all_reduce",
                            words,
                            result,
                            plan.request,
                            home,
                            plan,
                            source or target,
                            target,
                            caller=3,
                            is_unchecked=plan.is_unchecked,
                        )
                how = self._reduction(op, target)
                if isinstance(how, Reduction):
                    if self._is_large("all_reduce", how, nbytes):
                        program, details = self._large.all_reduce, partial(reduction_text, nbytes, how)
                        is_unchecked = are_few(how, nbytes) or self._is_large_unchecked
                        return channel.post(
                            "all_reduce", program, details, channel, source, target, how, is_unchecked=is_unchecked
                        )
                    if how.is_direct:
                        request, words = channel.transport.iall_reduce, (reduction_text, nbytes, how)
                        return channel.post_direct(
                            "all_reduce", words, result, request, source, target, how.mpi_op, caller=3
                        )
        except OnDevice:
            pass  # as all that is more than one call
        except UsageError as error:
            raise self._explained("all_reduce", error) from error.__cause__
        return self._all_reduce(x, op, out=out, deterministic=deterministic)

    def _planned_few(self, few: Few, op: str, target: Buffer) -> tuple[Words, FewPlan] | tuple[()]:
        """What makes it one request of a few numbers, see `Few.known`."""
        how, nbytes = self._reduction(op, target), target.nbytes
        known: tuple[Words, FewPlan] | tuple[()] = ()
        if isinstance(how, Reduction) and self._takes_few(how, nbytes):
            known = (reduction_text, nbytes, how), few.plan(how, nbytes)
        return plans.kept(few.known, (op, target.element, nbytes), known)

    def _note(self, few: Few, x: Any, op: str, known: tuple[Words, FewPlan]) -> None:
        """From now on those of such arrays may go at once."""
        channel, kind = self._channel, type(x)
        words, plan = known
        if not plan.count or not (kind is ndarray or MAKERS.get(kind) is from_torch):
            return
        key = op, x.dtype, plan.count
        if channel.at_once is few and key in few.recurring:
            return
        with channel.engine.lock:
            if channel.check is None and not channel.broken and type(channel) is Channel:
                few.recurring[key] = Recurring(("all_reduce", words, True)), plan
                channel.at_once = few

    def _planned(self, team: Team, op: str, target: Buffer) -> tuple[Words, Plan] | tuple[()]:
        """What makes it one request of a team, see `Team.known`."""
        how, nbytes = self._reduction(op, target), target.nbytes
        known: tuple[Words, Plan] | tuple[()] = ()
        if (
            isinstance(how, Reduction)
            and not self._takes_few(how, nbytes)
            and self._is_large("all_reduce", how, nbytes)
        ):
            plan = plans.all_reduce(team, how, nbytes)
            known = () if plan is None else ((reduction_text, nbytes, how), plan)
        return plans.kept(team.known, (op, target.element, nbytes), known)

    @operation
    def _all_reduce(self, x: object, op: OpLike, *, out: object, deterministic: bool) -> Work[Any]:
        """What is more than one call of MPI."""
        source, target = (None, host_buffer(x, writable=True)) if out is None else _two(x, out)
        how = self._reduction(op, target)
        details = partial(op_text, target.element, target.nbytes, name_of(op, deterministic))
        if isinstance(how, Reduction):
            is_large, is_unchecked = self._is_large("all_reduce", how, target.nbytes), are_few(how, target.nbytes)
            return self._post_reduction(
                "all_reduce", details, deterministic, is_large, source, target, how, is_unchecked=is_unchecked
            )
        return self._channel.post("all_reduce", native.all_reduce_by_function, details, source or target, target, how)

    def _takes_few(self, how: Reduction, nbytes: int) -> bool:
        """Whether an all_reduce is one of a few numbers."""
        return not self._large_from[FEW] and are_few(how, nbytes)

    def _is_large(self, op: str, how: Reduction, nbytes: int) -> bool:
        """Whether it takes another way than MPI's own call."""
        if op == "all_reduce" and self._takes_few(how, nbytes):
            return True
        return nbytes >= self._large_from[how.sized_as[op]]

    def _post_reduction(
        self,
        op: str,
        details: Callable[[], str],
        deterministic: bool,
        is_large: bool,
        *arguments: Any,
        is_unchecked: bool = False,
    ) -> Work[Any]:
        """is_unchecked: whether what takes the place of MPI's own call compares nothing by itself."""
        channel = self._channel
        if deterministic:
            compares_nothing = self._ordered is ordered
            program = getattr(self._ordered, op)
            return channel.post(op, program, details, channel, *arguments, is_unchecked=compares_nothing)
        if is_large:
            program, is_unchecked = getattr(self._large, op), is_unchecked or self._is_large_unchecked
            return channel.post(op, program, details, channel, *arguments, is_unchecked=is_unchecked)
        return channel.post(op, getattr(native, op), details, *arguments)

    def _reduction(self, op: OpLike, buffer: Buffer) -> Reduction | ReduceOp:
        """How MPI reduces it; the op itself where a function is to be folded."""
        if type(op) is str:
            known = self._reductions.get((op, buffer.element))
            if known is not None:
                return known
        named = as_op(op)
        if named.function is not None:
            check_op(named, buffer.element)
            return named
        if named.factor is not None:
            return Reduction.of(named, buffer.element, self.size)
        key = named.name, buffer.element
        how = self._reductions.get(key)
        if how is None:
            how = self._reductions[key] = Reduction.of(named, buffer.element, self.size)
        return how
