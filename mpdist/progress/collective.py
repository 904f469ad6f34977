"""Collective: an operation of all ranks of a communicator, as a program of steps.

A program is a generator that posts something, yields the request, and goes on
when it is complete; its return value is the result. Collectives match by their
order, so a later one must not post anything before an earlier one has posted its
last step: programs of several steps run one after the other, those of a single
step may all be in flight.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Generator, Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from mpdist.errors import MpdistError, UsageError
from mpdist.progress.interruption import is_interruption, is_of_handler, is_over
from mpdist.progress.work import Requested, T, Work

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel
    from mpdist.transport.requests import Request

Place = tuple[CodeType, int]
"""A code object and the index of an instruction in it; made into words only when asked."""

Words = tuple[Callable[..., str], *tuple[Any, ...]]
"""A function and its arguments: the text of an operation's details, made only when asked. They keep no array alive."""

_MAKING = ("dup", "split", "subgroup", "node", "from_mpi4py")
_TOO_MANY = (
    "; MPI makes only so many communicators (MPICH 2048), and gets back those that all members close or no more refer "
    "to, not those that were left by an exception, or belonged to a torch group that was destroyed"
)
_COMPARE = "; do all ranks call it with the same count, type and op? MPDIST_DEBUG=1 compares them"

Steps = Generator["Request", None, T]
Program = Callable[..., Steps[Any]]
P = TypeVar("P", bound=Callable[..., Any])


def single_step(program: P) -> P:
    """Mark a program that posts all it has to post before its first yield."""
    program.is_single_step = True  # type: ignore[attr-defined]  # functions take attributes
    return program


class Until:
    """A condition as a request."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        self._condition = condition

    def Test(self) -> bool:
        return self._condition()


class Collective(Work[T]):
    """A posted collective.

    Attributes:
        is_queued: an earlier one of several steps must end before it starts.
        is_apart: it has no place in the order of the channel's collectives, which may go on whatever becomes of it.
        task: the task that posted it, None outside tasks.
    """

    is_queued = False
    is_apart = False
    task: asyncio.Task[Any] | None = None
    _request: Request | None = None
    _left: object = None  # what MPI may still use
    _returned: tuple[T] | None = None  # by its program, when that is over
    _place: Place | None = None

    def __init__(self, channel: Channel, op: str, steps: Steps[T], details: Callable[[], str]) -> None:
        self._channel = channel
        self.op = op
        self._steps: Steps[None] | None = self._run(steps)
        self._details = details

    def _run(self, steps: Steps[T]) -> Steps[None]:
        """The program. What it returns is put down with no call in between, after which a handler could raise."""
        self._returned = ((yield from steps),)

    def details(self) -> str:
        return self._details()

    @property
    def site(self) -> str:  # type: ignore[override]  # made into words only when asked
        """`train.py:88`, where it was called."""
        return line_of(self._place)

    def _start(self) -> None:
        self.is_queued = False
        try:
            self._advance()
        finally:
            if self._steps is not None:
                self._channel.engine.active.append(self)
        self._channel.ring_all()

    def _poll(self) -> bool:
        if self._steps is None:
            return self._done
        request = self._request
        if request is None:
            if not self.is_queued:  # a signal's handler came before its first step
                return self._advance()
            self._channel.advance_queue()
            return False
        try:
            if not request.Test():
                return False
        except Exception as error:
            if is_interruption(error):
                raise
            return self._broke(error)
        return self._advance()

    def _advance(self) -> bool:
        steps = self._steps
        assert steps is not None
        try:
            for request in steps:  # which has a name at once: after a call of next() a handler could raise
                self._request = request
                if not request.Test():
                    self._channel.engine.has_advanced = True
                    return False
        except BaseException as error:
            if is_over(steps):
                return self._stopped(error)
            if is_interruption(error):
                raise
            return self._broke(error)
        return self._is_over()

    def _is_over(self) -> bool:
        """Its program has ended; called again where a signal's handler has raised in here."""
        if self._returned is None:  # it was interrupted, and once more before that was told
            self._channel.engine.wrecks.append(self)
            self._give_channel_up("was interrupted")
            return self._broke(InterruptedError("by the handler of a signal"))
        if not self._done:
            self._finish(self._returned[0])
        elif self._error is not None:
            self._came_late(self._returned[0])
        self._end()
        return True

    def _came_late(self, result: T) -> None:
        """It has expired meanwhile: nobody gets the result."""

    def _stopped(self, error: BaseException) -> bool:
        """Its program has raised, or was interrupted by a handler that wants the exception for itself."""
        if isinstance(error, Exception) and not is_of_handler(error):
            return self._broke(error)
        channel = self._channel
        channel.engine.wrecks.append(self)
        self._give_channel_up("was interrupted")
        self._broke(error)
        raise error

    def _broke(self, error: BaseException) -> bool:
        self._give_up_after(error)
        if not self._done:
            self._fail(self._as_told(error))
        self._end()
        return True

    def _as_told(self, error: BaseException) -> BaseException:
        """What whoever waits gets of it."""
        if isinstance(error, UsageError) and " on '" not in str(error):  # found on the way, so it names no place yet
            return type(error)(f"{self.describe()}: {error}")
        return error if isinstance(error, MpdistError) else self._failure(error)

    def _give_up_after(self, error: BaseException) -> None:
        """Give the channel up where the ranks are out of step.

        Without memory the others wait for what the program would have posted next. Of a request that MPI has failed
        nobody knows what they have heard; and where it is one of several, the rest still use what the program holds.
        """
        steps, channel = self._steps, self._channel
        if isinstance(error, MemoryError) and (self._request is None or channel._running is self):
            self._give_channel_up("had no memory")
            return
        if not isinstance(error, channel.transport.failure):
            return
        if channel._running is self and steps and not is_over(steps):
            self._left = steps
            channel.engine.wrecks.append(self)
        self._give_channel_up("failed")

    def _advice(self, error: BaseException) -> str:
        if not isinstance(error, self._channel.transport.failure):
            return ""
        return _TOO_MANY if self.op in _MAKING else _COMPARE

    def _end(self) -> None:
        """May be repeated, until it has forgotten its steps."""
        self._channel.ended(self)
        self._steps = self._request = self._returned = None
        self._release()

    def _release(self) -> None:
        """Leave the channel's list with the others that have ended: it would keep their arrays alive."""
        self.task = None
        collectives = self._channel.collectives
        while collectives and collectives[0]._done and collectives[0]._steps is None:
            collectives.popleft()

    def _expire(self, error: BaseException) -> None:
        self._give_channel_up("was given up")
        self._fail(error)

    def _give_channel_up(self, why: str) -> None:
        if not self.is_apart:
            self._channel.give_up(f"{self.describe()} {why}, so its ranks may be out of step")


@single_step
def one_call(_: object, call: Callable[..., Request], arguments: tuple[Any, ...], result: T) -> Steps[T]:
    """A collective that is one call of MPI, as a program, for where it must wait for its turn."""
    yield call(*arguments)
    return result


class Direct(Requested[T], Collective[T]):
    """A collective that is one call of MPI: what its program would do, without the program."""

    _steps = None

    def __init__(self, channel: Channel, op: str, result: T, words: Words, task: asyncio.Task[Any] | None) -> None:
        self._channel = channel
        self.op = op
        self._result = result
        self._words = words
        self.task = task

    def details(self) -> str:
        return self._words[0](*self._words[1:])

    _release = Collective._release


def user_place() -> Place:
    """Where the innermost frame outside mpdist is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("mpdist."):
        frame = frame.f_back
    frame = frame or sys._getframe(1)
    return frame.f_code, frame.f_lasti


def line_of(place: Place | None) -> str:
    """`train.py:88` for a code object and the index of an instruction in it."""
    if place is None:
        return "unknown line"
    code, instruction = place
    for start, end, line in code.co_lines():
        if start <= instruction < end:
            return f"{code.co_filename}:{line}"
    return code.co_filename


def check_task(channel: Channel, op: str, task: asyncio.Task[Any] | None, own: Sequence[Work[Any]] = ()) -> None:
    """Raise if another task's collective, none of `own`, is pending: the tasks' order may differ between ranks."""
    if task is None:
        return
    try:
        if channel.collectives[-1].task is task:  # when that was posted no other task had any
            return
    except IndexError:  # another thread has driven
        return
    for other in list(channel.collectives):  # another thread may drive
        if other._done or other.task is None or other.task is task or other.task.done() or other in own:
            continue
        here = line_of(user_place())
        channel.give_up("two tasks used collectives on it at the same time")
        raise UsageError(
            f"{op} on {channel.where()} was called in task {task.get_name()!r} ({here}) while {other.op} of task "
            f"{other.task.get_name()!r} ({other.site}) is pending: the order may differ between ranks, and "
            "collectives match by order; give each task its own communicator: `async with await comm.dup()`"
        )


def take_over(channel: Channel, op: str, own: Sequence[Work[Any]]) -> None:
    """Pass collectives, in whose order the ranks agree, to the running task, which is about to post the next of them.

    Raises:
        UsageError: another task's collective, none of these, is pending.
    """
    loop = asyncio._get_running_loop()
    task = None if loop is None else asyncio.current_task(loop)
    if task is None:
        return
    check_task(channel, op, task, own)
    for work in own:
        if isinstance(work, Collective) and not work._done:
            work.task = task
