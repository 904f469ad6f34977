"""Ticking: how an event loop drives the Engine.

While anything moves, one callback comes every turn. When nothing has moved for a
while a timer takes its place, and a peer that sends rings the doorbell, to which
the loop listens.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import weakref
from collections.abc import Callable, Generator
from time import monotonic
from typing import TYPE_CHECKING, Any

from mpdist.errors import UsageError
from mpdist.progress.backoff import TURN_CREDIT

if TYPE_CHECKING:
    from mpdist.progress.engine import Engine
    from mpdist.progress.work import Work

# Both MPIs may notice a message only at the second look after a sleep.
RUNG_LOOKS = 4

# The context of a callback that only wakes a task: it needs none, and a turn of the loop would be lost.
AT_ONCE = contextvars.Context()


def call_in(
    loop: asyncio.AbstractEventLoop,
    fn: Callable[..., object],
    *arguments: object,
    context: contextvars.Context | None = None,
) -> None:
    """Have a loop call it that may be another thread's, which may close it meanwhile: then nobody does."""
    try:
        loop.call_soon_threadsafe(fn, *arguments, context=context)
    except RuntimeError:
        if not loop.is_closed():
            raise


class Ticking:
    """The loop in which operations are awaited, and when it looks at them next.

    Attributes:
        loop: None before the first operation in one, and when it has ended.
        thread: which runs the loop.
        is_on: it comes again by itself, at once or by a timer.
        is_asleep: by a timer, and peers are to ring.
        has_yielded: an await has given way to other processes since the last turn.
    """

    def __init__(self, engine: Engine) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread = 0
        self.is_on = False
        self.is_asleep = False
        self.has_yielded = False
        self._engine = engine
        self._listener: weakref.ref[Callable[[], None]] | None = None
        self._next: asyncio.Handle | None = None
        self._timer_seconds = 0.0  # of the timer that is to bring it; 0: it is due, or there is none
        self._last_move = 0.0

    # ------------------------------------------------------------------ for whoever posts and awaits

    def park(self, work: Work[Any]) -> Generator[Any, None, None]:
        """Suspend the awaiting task until its Work is done."""
        loop = asyncio.get_running_loop()
        if loop is not self.loop:
            self._adopt(loop)
        if self.is_asleep and self._engine.active:
            self._stay_up()  # for what has begun while the task looked
        waiter = loop.create_future()

        def wake(_: Work[Any]) -> None:
            if not waiter.done():
                waiter.set_result(None)

        work.add_done_callback(wake, context=AT_ONCE)
        try:
            yield from waiter
        finally:
            if not work._done:
                work.remove_done_callback(wake)

    def ensure(self) -> None:
        """See to it that the loop, if one runs, drives what is pending; one that has ended is replaced."""
        loop = asyncio._get_running_loop()
        if self.is_on and (loop is None or loop is self.loop):
            return
        if loop is None or self._has_other_loop(loop):
            self._nudge()
            return
        if loop is not self.loop:
            self._adopt(loop)
        self.is_on = True
        self._last_move = monotonic()
        self._next = loop.call_soon(self._tick)

    def stir(self) -> None:
        """The same, where MPI has something new of ours under way: a loop that sleeps looks in its next turn."""
        self.ensure()
        loop = self.loop
        if not self.is_asleep or loop is None:
            return
        if asyncio._get_running_loop() is loop:
            self._stay_up()
        elif self._timer_seconds > self._engine.backoff.cap_seconds and loop.is_running():
            call_in(loop, self._stay_up)  # from another thread, which may not wait for it; once for a long sleep

    def _nudge(self) -> None:
        """Posted outside the loop's thread: whoever may be asleep is to look."""
        loop = self.loop
        if loop is not None and loop.is_running() and threading.get_ident() != self.thread:
            call_in(loop, self.ensure)
        self._engine.nudge_thread()

    # ------------------------------------------------------------------ which loop

    def _has_other_loop(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether another loop than this one drives, and still runs."""
        old = self.loop
        return old is not None and old is not loop and not old.is_closed() and old.is_running()

    def _adopt(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let this loop drive, in the place of one that has ended."""
        if self._has_other_loop(loop):
            raise UsageError(
                f"operations are awaited in two running event loops, {self.loop!r} and {loop!r}; "
                "await in one of them, and use work.wait() in other threads"
            )
        self.detach()
        self.loop = loop
        self.thread = threading.get_ident()
        doorbell = self._engine.doorbell
        if doorbell.fileno() >= 0:
            rung = self._rung  # an object of its own: the loop alone holds it, and drops it when it is closed
            loop.add_reader(doorbell.fileno(), rung)
            self._listener = weakref.ref(rung, self._dropped)

    def _dropped(self, _: object) -> None:
        """The loop holds no reader of ours any more: if it was closed, the next post is to find that none drives."""
        if self.loop is not None and self.loop.is_closed():
            self.detach()

    def leave(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """This loop is about to end, or has ended; where another one drives, in another thread, that goes on."""
        if loop is self.loop:
            self.detach()

    def detach(self) -> None:
        """Forget the loop: it is about to end, or has ended."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._timer_seconds = 0.0
        if self.is_asleep:
            self._wake_up()
        self.is_asleep = self.is_on = False
        loop, self.loop = self.loop, None
        fileno = self._engine.doorbell.fileno()
        if loop is not None and not loop.is_closed() and fileno >= 0:
            loop.remove_reader(fileno)

    # ------------------------------------------------------------------ its turns

    def _tick(self) -> None:
        """One turn of the loop: drive, then come again soon or sleep."""
        loop, engine = self.loop, self._engine
        if loop is None:  # another thread has ended everything
            return
        self._next = None
        self._timer_seconds = 0.0
        try:
            if self.is_asleep:
                engine.doorbell.sleep()  # another thread's nap has ended that
            engine.credit = TURN_CREDIT
            now = monotonic()
            if engine.drive() or (self.is_asleep and engine.drive()):  # as RUNG_LOOKS
                self._last_move = now
            if engine.is_idle():
                if self.is_asleep:
                    self._wake_up()
                self.is_on = False
                if engine.is_idle():
                    return
                self.is_on = True  # another thread has posted between the look and the end, and found it on
            delay = engine.backoff.delay(now - self._last_move, bool(engine.active), engine.doorbell.rings_all)
            if delay == 0.0:
                if self.is_asleep:
                    self._wake_up()
                if not self.has_yielded:
                    os.sched_yield()
                self.has_yielded = False
                self._next = loop.call_soon(self._tick)
                return
            if self.is_asleep:
                self._set_timer(loop, delay)
            else:
                self._sleep(loop, delay)
        finally:
            if self._next is None and self.is_on:  # a signal's handler has raised
                self._next = loop.call_soon(self._tick)

    def _sleep(self, loop: asyncio.AbstractEventLoop, delay: float) -> None:
        self.is_asleep = True
        self._engine.doorbell.sleep()
        before = self._last_move
        if self._engine.drive():
            self._last_move = monotonic()
        if self._last_move != before:  # it came before peers could see that we sleep, or was posted by a callback
            self._wake_up()
            self._next = loop.call_soon(self._tick)
            return
        self._set_timer(loop, delay)

    def _set_timer(self, loop: asyncio.AbstractEventLoop, delay: float) -> None:
        self._timer_seconds = delay
        self._next = loop.call_later(delay, self._tick)

    def _rung(self) -> None:
        """A peer has rung. All that can wait is done a turn later: the task that it is for comes first."""
        if not self.is_asleep:
            self._engine.doorbell.quiet()
            self._last_move = monotonic()  # both MPIs may show only later what it rang for
            return
        for _ in range(RUNG_LOOKS):
            if self._engine.drive():
                break
        self._stay_up()

    def _stay_up(self) -> None:
        """Be awake from the next turn on, for as long as after anything that moves."""
        loop = self.loop
        if loop is None:  # something has ended everything
            return
        self._last_move = monotonic()
        if self._timer_seconds:  # else such a turn runs, or is due
            turn = loop.call_soon(self._go_on)
            # The timer is there until it is not needed, whatever a signal's handler raises.
            timer, self._next = self._next, turn
            self._timer_seconds = 0.0
            if timer is not None:
                timer.cancel()

    def _go_on(self) -> None:
        """The first turn after the sleep."""
        if self.is_asleep:
            self._wake_up()
        self._tick()

    def _wake_up(self) -> None:
        self.is_asleep = False
        self._engine.doorbell.wake()
