"""Work: one posted operation, to be awaited, waited for, or asked.

A Work is not an asyncio.Future, on purpose. `asyncio.gather`, `wait_for` and
`as_completed` wrap what is not a Future in a Task, and cancelling that Task ends
the await and leaves the operation alone, which is what MPI needs: a send or a
collective that was posted will happen. `asyncio.wait` takes a Work as it is.

Attributes that most Works never set have their default on the class, so that
posting stores only what differs.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import sys
from collections.abc import Callable, Generator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, Never, TypeVar

from mpdist.errors import CommunicationError, MpdistError, UsageError, WorkTimeout
from mpdist.progress.backoff import TURN_CREDIT, USUAL_CREDIT
from mpdist.progress.interruption import is_interruption

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel
    from mpdist.transport.requests import Request

T = TypeVar("T")
Callback = tuple[Callable[["Work[Any]"], object], contextvars.Context | None, asyncio.AbstractEventLoop | None]


def check_timeout(seconds: object) -> None:
    """Check that it is a number of seconds to wait, or None.

    Raises:
        UsageError: it is not.
    """
    if seconds is not None and not _as_time(seconds) >= 0:
        raise UsageError(f"timeout is a number of seconds >= 0, or None, got {_shown(seconds)}")


def _as_time(seconds: object) -> float:
    """What it is where it is added to the time of a clock; NaN where it can't be."""
    try:
        return float(0.0 + seconds)  # type: ignore[operator]  # what is no number raises
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _shown(seconds: object) -> str:
    if isinstance(seconds, int) and seconds.bit_length() > 64:  # Python does not show thousands of digits
        return f"an integer of {seconds.bit_length()} bits"
    return repr(seconds)


class Unseen:
    """Reports an error when it is collected before somebody looked at it."""

    error: BaseException | None = None

    def __init__(self, text: str, error: BaseException) -> None:
        self.text = text
        self.error = error

    def __del__(self) -> None:
        if self.error is not None and not sys.is_finalizing():
            print(f"mpdist: {self.text} failed and nobody looked at it: {_describe(self.error)}", file=sys.stderr)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class Work(Generic[T]):
    """A posted operation and, later, its result.

    `await work` in a coroutine, any number of times; `work.wait()` where no event loop
    runs. Until it is done its buffers belong to mpdist: they are kept alive, and must not be changed.
    """

    _channel: Channel
    op = "work"
    sequence = 0
    _done = False
    _cancelled = False
    _result: T
    _error: BaseException | None = None
    _callbacks: list[Callback] | None = None
    _unseen: Unseen | None = None
    _looked_at = False
    """Whether somebody has got the result or the error; then a receive does not give its message back."""
    _is_abandoned = False
    """Whether an await of it ended early: perhaps nobody holds it any more."""
    limit: float | None = None
    """Seconds it may take, counted from `since`; None: the communicator's timeout."""
    since: float | None = None
    """When it was first seen pending (monotonic clock), for the diagnosis."""
    site: str = ""
    """The caller's line, where it was recorded."""

    # ------------------------------------------------------------------ waiting

    def __await__(self) -> Generator[Any, None, T]:
        if not self._done:
            engine = self._channel.engine
            try:
                if engine.credit <= 0:
                    yield
                    engine.credit = TURN_CREDIT
                if not engine.drive_inline(self):
                    yield from engine.ticking.park(self)
            except UsageError:  # a second running loop: whoever awaits it in the first one goes on
                if not self._callbacks:
                    self._abandon()
                raise
            except BaseException:  # cancelled, or the coroutine was thrown away
                self._abandon()
                raise
        self._looked_at = True
        if self._error is not None:
            raise self._seen_error()
        return self._result

    def wait(self, timeout: float | None = None) -> T:
        """Wait without an event loop and return the result.

        Args:
            timeout: seconds; when they have passed a receive is withdrawn, anything else stays pending.

        Raises:
            UsageError: an event loop runs in this thread: await it instead; or `timeout` is no time.
            WorkTimeout: not done in time; the text of `within(seconds).wait()` also says who is late.
        """
        if timeout is not None:
            check_timeout(timeout)
        if not self._done:
            if asyncio._get_running_loop() is not None:
                raise UsageError(
                    f"wait() for {self.describe()} was called on the thread of a running event loop, "
                    "which would stand still: write `await work`"
                )
            try:
                is_done = self._channel.engine.wait(self, timeout)
            except BaseException:  # of a signal's handler
                self._abandon()
                raise
            if not is_done:
                self._abandon()
                raise WorkTimeout(f"{self.describe()} is not done after {timeout:g} s", work=self)
        self._looked_at = True
        if self._error is not None:
            raise self._seen_error()
        return self._result

    def within(self, seconds: float) -> Work[T]:
        """Fail with WorkTimeout unless done within `seconds` from now; returns itself.

        The text says who is waited for. A receive is withdrawn and all stays usable; after a
        collective the communicator refuses further use, for its ranks are out of step.
        """
        if not _as_time(seconds) > 0:
            raise UsageError(f"within() needs a positive number of seconds, got {_shown(seconds)}")
        self.limit = seconds
        self.since = monotonic()
        self._channel.engine.limit(self)
        return self

    def forget(self) -> None:
        """Nobody will look at it: its failure is not reported, for it was told otherwise."""
        self.add_done_callback(lambda work: work._error is not None and work._seen_error())

    # ------------------------------------------------------------------ asking, as asyncio.Future has it

    def done(self) -> bool:
        """Whether it is complete, failed or cancelled; looks once, so that whoever asks again and again gets there."""
        if not self._done:
            engine = self._channel.engine
            engine.ticking.ensure()  # be it in a later loop than the one that drove
            engine.look()
        return self._done

    def cancelled(self) -> bool:
        """Whether it was a receive that was withdrawn."""
        return self._cancelled

    def result(self) -> T:
        """The result, or the error raised; asyncio.InvalidStateError while pending."""
        if not self._done:
            raise asyncio.InvalidStateError(f"{self.describe()} is not done")
        self._looked_at = True
        if self._error is not None:
            raise self._seen_error()
        return self._result

    def exception(self) -> BaseException | None:
        """The error, or None; asyncio.InvalidStateError while pending."""
        if not self._done:
            raise asyncio.InvalidStateError(f"{self.describe()} is not done")
        if self._cancelled:
            raise self._seen_error()
        return None if self._error is None else self._seen_error()

    def cancel(self, msg: object = None) -> bool:
        """Withdraw a receive that no message has met; False for everything else, which goes on."""
        return False

    def add_done_callback(self, fn: Callable[[Work[T]], object], *, context: contextvars.Context | None = None) -> None:
        """Call `fn(work)` when done: by the running loop if there is one, else on the thread that notices."""
        engine = self._channel.engine
        loop = asyncio._get_running_loop()
        with engine.lock:
            if self._callbacks is None:
                self._callbacks = []
            self._callbacks.append((fn, context, loop))
            if self._done:
                engine.finished.append(self)
        if self._done:
            engine.flush()
        else:
            engine.ticking.ensure()

    def remove_done_callback(self, fn: Callable[[Work[T]], object]) -> int:
        """Forget a callback; returns how many were removed."""
        with self._channel.engine.lock:
            before = self._callbacks or []
            self._callbacks = _without(fn, before)
            return len(before) - len(self._callbacks)

    # ------------------------------------------------------------------ for the Engine

    def _poll(self) -> bool:
        """Look once whether it has moved on; True when MPI is done with it. Under the Engine's lock."""
        raise NotImplementedError

    def _abandon(self) -> None:
        """The await ended early; sends and collectives go on without it."""
        self._is_abandoned = True

    def _expire(self, error: BaseException) -> None:
        """It took too long; what MPI still needs stays in the Engine's table."""
        self._fail(error)

    def _desert(self, error: BaseException) -> None:
        """Its communicator was closed before it began; whoever awaits it is told, and nobody else."""
        self._fail(error)
        self._seen_error()

    def _finish(self, result: T) -> None:
        self._result = result
        self._done = True
        if self._callbacks is not None:
            self._channel.engine.finished.append(self)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._unseen = Unseen(self.describe(), error)
        self._done = True
        if self._callbacks is not None:
            self._channel.engine.finished.append(self)

    def _failure(self, error: BaseException) -> CommunicationError:
        """What went wrong on the way, with the cause attached."""
        failure = CommunicationError(f"{self.describe()} failed: {type(error).__name__}: {error}{self._advice(error)}")
        failure.__cause__ = error
        return failure

    def _advice(self, error: BaseException) -> str:
        """What to look at."""
        return ""

    def _withdraw(self) -> None:
        self._error = asyncio.CancelledError(f"{self.describe()} was withdrawn")
        self._cancelled = self._done = True
        if self._callbacks is not None:
            self._channel.engine.finished.append(self)

    def _seen_error(self) -> BaseException:
        if self._unseen is not None:
            self._unseen.error = None
        assert self._error is not None
        return self._error

    # ------------------------------------------------------------------ words

    def details(self) -> str:
        """What it carries, for texts."""
        return ""

    def describe(self) -> str:
        """`all_reduce float32 x 1024 sum #41 on 'world' (rank 0 of 4)`."""
        channel = self._channel
        number = f" #{self.sequence}" if self.sequence else ""
        details = self.details()
        return f"{self.op}{details and ' ' + details}{number} on {channel.where()}"

    def __repr__(self) -> str:
        state = "pending"
        if self._done:
            state = "cancelled" if self._cancelled else "failed" if self._error is not None else "done"
        return f"<Work {self.describe()}, {state}>"


def _without(fn: object, callbacks: Sequence[Callback]) -> list[Callback]:
    return [callback for callback in callbacks if callback[0] != fn]


class _OfResult:
    """A name that results have, and a Work has not: who asks for it has forgotten to await.

    Not `__getattr__`, with which Python finds every attribute of a Work more slowly.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, work: Work[Any] | None, owner: type) -> Never:
        if work is None:
            raise AttributeError(f"type object {owner.__name__!r} has no attribute {self.name!r}")
        raise AttributeError(
            f"{work.op} gives a Work, which has no {self.name!r}: its result has. Write `(await ...).{self.name}`, or "
            f"`.wait().{self.name}` where no event loop runs"
        )


def _refused(name: str) -> Callable[..., Never]:
    def refuse(work: Work[Any], *_: object, **__: object) -> Never:
        raise TypeError(
            f"{work.op} gives a Work, which has a result to calculate with: write `await ...`, or `.wait()` where no "
            "event loop runs"
        )

    refuse.__name__ = name
    return refuse


# Not ==, by which Works are told from each other, nor truth.
for _name in ("add", "sub", "mul", "truediv", "matmul", "pow", "radd", "rsub", "rmul", "rtruediv", "rmatmul", "rpow"):
    setattr(Work, f"__{_name}__", _refused(_name))
Work.__iter__ = None  # type: ignore[attr-defined]  # or Python would go through __getitem__
for _name in ("lt", "le", "gt", "ge", "neg", "float", "int", "getitem", "array"):
    setattr(Work, f"__{_name}__", _refused(_name))
for _name in ("count", "data", "dtype", "item", "mean", "nbytes", "shape", "size", "sum", "tolist"):
    setattr(Work, _name, _OfResult(_name))


class Requested(Work[T]):
    """A Work that waits for one request of MPI, whose result is known before; the await tests nothing but it."""

    _request: Request | None = None

    def __await__(self) -> Generator[Any, None, T]:
        if not self._done:
            engine = self._channel.engine
            if engine.credit > 0 and self._callbacks is None:
                with engine.lock:
                    request = self._request
                    if request is not None:
                        test = request.Test
                        try:
                            for _ in engine.quick_polls:
                                if test():
                                    self._complete()
                                    engine.credit -= USUAL_CREDIT
                                    break
                                request = None  # so that the loop jumps back within `with`, see `interruption`
                        except Exception as error:
                            if is_interruption(error):
                                raise
                            self._broke(error)
            if not self._done:
                return (yield from super().__await__())
        if self._error is not None:
            raise self._seen_error()
        return self._result

    def _poll(self) -> bool:
        request = self._request
        if request is None:
            return True
        try:
            if not request.Test():
                return False
        except Exception as error:
            if is_interruption(error):
                raise
            return self._broke(error)
        self._complete()
        return True

    def _complete(self) -> None:
        # The request is forgotten last: a handler that raises in between must not leave it looking for ever.
        if not self._done:  # it may have expired meanwhile
            self._finish(self._result)
        self._request = None
        self._release()
        active = self._channel.engine.active
        if active and active[-1] is self:
            active.pop()

    def _release(self) -> None:
        """MPI needs nothing any more."""

    def _broke(self, error: BaseException) -> bool:
        self._request = None
        self._release()
        if self._done:
            return True
        if isinstance(error, MpdistError):
            self._fail(error)
            return True
        self._fail(self._failure(error))
        return True
