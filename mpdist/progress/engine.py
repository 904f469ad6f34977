"""Engine: drives all pending operations of this process.

MPI makes progress only inside its calls, and has no file descriptor to sleep
on. The Engine holds every pending Work in a strong table (a request that is
dropped while pending corrupts memory) and looks at them in one of four ways:

    inline   an await drives a bounded number of times before its task is parked
    hot      one callback of the event loop drives everything, every turn
    asleep   a timer looks now and then; a peer that sends rings the doorbell
    wait()   a thread without a loop drives; so does the progress thread

The middle two are the event loop's, see `ticking`. Whoever drives holds `lock`;
callbacks of finished Works run after its release.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from mpdist.errors import DeviceFailed, UsageError
from mpdist.progress.backoff import TURN_CREDIT, TURN_SECONDS, USUAL_CREDIT, Backoff
from mpdist.progress.callback import call_back
from mpdist.progress.doorbell import Doorbell, SilentDoorbell
from mpdist.progress.thread import ProgressThread
from mpdist.progress.ticking import AT_ONCE, Ticking, call_in
from mpdist.transport.cuda_aware import Awareness

if TYPE_CHECKING:
    from mpdist.memory import Device
    from mpdist.memory.accelerator import Accelerator
    from mpdist.memory.exports import Exports
    from mpdist.memory.pinned import Pinned
    from mpdist.progress.channel import Channel, Dropped
    from mpdist.progress.inbox import Inbox
    from mpdist.progress.roll import Roll
    from mpdist.progress.work import Work
    from mpdist.transport.mpi import Transport
    from mpdist.transport.neighbours import Neighbours

# So many closed channels are remembered.
REMEMBERED = 64

# A drive looks at no more than this many pending requests, in rotation: 10 000 pending sends must not hold a turn.
WINDOW = 32

# How long an algorithm works before others get their turn. One piece of copying or adding more may follow, of up to
# 0.3 ms where memory is slow: the whole is to hold an event loop for less than 1 ms. Longer where a thread waits and
# there is no loop: each turn that is given away costs 20 to 50 us.
ALGORITHM_SECONDS = 0.0004
WAITED_FOR_SECONDS = 0.005

# A thread that has waited so long without any progress tells the ranks of its node, see `Doorbell.is_awaited`.
UNMOVED_SECONDS = 0.001

# Who asks for the state of thousands does not drive for each.
LOOK_SECONDS = 20e-6

# Where processors are scarce, a yield may last as long as the others' slices: an await ends its looks after this time.
YIELDING_SECONDS = 0.002


class Engine:
    """Pending operations <-> whoever waits for them.

    Attributes:
        credit: what may still complete inside awaits before the loop gets a real turn.
        turn_seconds: how long an algorithm may work at a time.
        quick_polls: how often the latency path may look; not at all where processors are scarce.
        active: Works that have something to test.
        listening: inboxes with posted receives.
        later: Works to be looked at by the next drive.
        finished: Works whose callbacks are still to run.
        wrecks: Works whose program was interrupted by a signal's handler, or has lost a request; kept for good: MPI may
            still use their memory.
        channels: all open channels.
        closed: name, ranks in the world and number of collectives begun of the channels closed last, for the diagnosis.
        meeting: channel of the world that carries nothing but the making of subgroups.
        maker: the world once more, on which subgroups are made: Open MPI does that by messages, which a probe
            on the same communicator would take away.
        creating: communicators being made.
        dropped: those that went without close.
        nodes: for each rank of the world, which node it is on.
        crowd: how many ranks, this one among them, have how many cores together.
        roll: where the ranks of this node compare their collectives; None where there is one.
        is_threaded: whether MPI may be called from several threads.
        keep_bytes: how much freed memory that a training keeps, see `keep_freed`.
        on_channel: called with the channel of each new communicator; the debug mode.
        on_limit: told of a Work with a limit of its own, or of changed timeouts.
        moves: drives that moved anything, for whoever watches.
        ticking: how an event loop drives.
        has_advanced: a Work has gone on without coming to its end.
        shared: memory that the ranks of this node share; None where they can't.
        is_sharing: whether the ranks of each node do.
        thresholds: the table by which algorithms are chosen, kept for them.
        staging: host memory through which the arrays of devices travel, by device.
        exports: memory of devices that other processes reach, by device.
        has_ipc: whether ranks of a node may reach each other's memory on devices.
        awareness: what MPI may be given of their memory.
        given: devices whose memory it was given: threads that call MPI attend to them.
        awaited_in_cxx: gives the Works for which C++ waits at the end of a backward; None where none ever had a Future.
    """

    meeting: Channel
    maker: Transport
    awaited_in_cxx: Callable[[], list[Work[Any]]] | None = None

    def __init__(self, backoff: Backoff | None = None, doorbell: Doorbell | None = None) -> None:
        self.backoff = backoff or Backoff()
        self.doorbell: Doorbell = doorbell or SilentDoorbell()
        self.lock = threading.RLock()
        self.quick_polls = range(0 if self.backoff.yields else self.backoff.inline_polls)
        self.credit = TURN_CREDIT
        self.turn_seconds = ALGORITHM_SECONDS
        self.has_advanced = False
        self.active: deque[Work[Any]] = deque()
        self.later: deque[Work[Any]] = deque()
        self.listening: list[Inbox] = []
        self.finished: deque[Work[Any]] = deque()
        self.wrecks: list[Work[Any]] = []
        self.channels: list[Channel] = []
        self.closed: deque[tuple[str, tuple[int, ...], int]] = deque(maxlen=REMEMBERED)
        self.creating = 0
        self.dropped: list[Dropped] = []
        self.shared: Neighbours | None = None
        self.is_sharing = False
        self.thresholds: object = None
        self.staging: dict[Device, Pinned] = {}
        self.exports: dict[Device, Exports] = {}
        self.has_ipc = False
        self.awareness = Awareness()
        self.given: list[Accelerator] = []
        self.nodes: Sequence[int] = (0,)
        self.crowd = (1, 1)
        self.roll: Roll | None = None
        self.is_threaded = True
        self.allow_pickle = True
        self.keep_bytes = 0
        self.on_channel: Callable[[Channel], None] | None = None
        self.on_limit: Callable[[Work[Any] | None], None] | None = None
        self.moves = 0
        self.ticking = Ticking(self)
        self._looked = 0.0
        self._is_looking = False
        self._thread: ProgressThread | None = None

    # ------------------------------------------------------------------ driving

    def drive(self) -> bool:
        """Look once at everything; True if anything moved."""
        with self.lock:
            moved = self._look_at_all()
        if self.finished:
            self.flush()
        return moved

    def _look_at_all(self) -> bool:
        moved = False
        while self.later:
            self.later[0]._poll()
            self.later.popleft()
            moved = True
        if self.listening:
            moved = self._listen() or moved
        active = self.active
        for _ in range(min(len(active), WINDOW)):
            active.rotate(-1)
            work = active[-1]  # listed while it is looked at: a signal's handler may raise there
            if work._poll():
                moved = True
                if active and active[-1] is work:
                    active.pop()
        if self.has_advanced:
            self.has_advanced = False
            moved = True
        if moved:
            self.moves += 1
        return moved

    def look(self) -> None:
        """Drive once for somebody who asks, unless that was just done, this is in a drive, or another thread drives."""
        if self._is_looking or monotonic() < self._looked + LOOK_SECONDS:
            return
        if not (self.is_threaded or threading.get_ident() == threading.main_thread().ident):
            return
        if not self._is_free():
            return
        self._is_looking = True  # they may ask, too
        try:
            self.drive()
        finally:
            self._is_looking = False
            self._looked = monotonic()

    def _is_free(self) -> bool:
        """Whether no thread drives, this one neither. The lock is given back: callbacks are not to run under it."""
        lock: Any = self.lock
        if lock._is_owned():  # as threading.Condition asks
            return False
        try:
            if lock.acquire(blocking=False):
                lock.release()
                return True
        except BaseException:  # of a signal's handler
            if lock._is_owned():
                lock.release()
            raise
        return False

    def _listen(self) -> bool:
        moved = False
        idle = False
        for inbox in self.listening:
            if inbox.box.receives:
                moved = inbox.poll() or moved
            else:
                idle = True
        if idle:
            for inbox in self.listening:
                inbox.is_listening = bool(inbox.box.receives)
            self.listening = [inbox for inbox in self.listening if inbox.is_listening]
        return moved

    def drive_inline(self, work: Work[Any]) -> bool:
        """Drive for one awaiting task, a bounded number of times; True when its Work is done."""
        with self.lock:
            if self.backoff.yields:
                self.ticking.has_yielded = True
                self._poll_and_yield(work)
            else:
                poll = work._poll
                for _ in range(self.backoff.inline_polls):
                    if poll() or self.credit <= 0:
                        break
                    active = None  # so that the loop jumps back within `with`, see `interruption`
            active = self.active
            if active and active[-1] is work and work._done and work._poll():
                active.pop()
        self.credit -= USUAL_CREDIT
        if self.finished:
            self.flush()
        if len(self.active) > 2 * WINDOW:  # works that ended inside awaits are still listed
            self.drive()
        return work._done

    def _poll_and_yield(self, work: Work[Any]) -> None:
        start = now = monotonic()
        for _ in range(self.backoff.inline_polls):
            if work._done or work._poll() or self.credit <= 0 or now > start + YIELDING_SECONDS:
                break
            os.sched_yield()
            now = monotonic()
        self.credit -= int((now - start) / TURN_SECONDS * TURN_CREDIT)

    def flush(self) -> None:
        """Hand the callbacks of finished Works to their loop, or run those that have none."""
        ticking, thread = self.ticking, threading.get_ident()
        while self.finished:
            with self.lock:  # several threads may be here: each takes callbacks that no other has
                try:
                    work = self.finished.popleft()
                except IndexError:
                    return
                callbacks, work._callbacks = iter(work._callbacks or ()), None
            try:
                for fn, context, loop in callbacks:
                    if loop is None or (context is AT_ONCE and loop is ticking.loop and thread == ticking.thread):
                        call_back(fn, work)
                    elif loop.is_closed():
                        continue
                    elif loop is ticking.loop and thread == ticking.thread:
                        loop.call_soon(fn, work, context=context)
                    else:
                        call_in(loop, fn, work, context=None if context is AT_ONCE else context)
            except BaseException:  # sys.exit() in a callback, or a signal's handler: the others are called later
                with self.lock:
                    work._callbacks = [*callbacks, *(work._callbacks or ())]
                    self.finished.appendleft(work)
                raise

    def is_idle(self) -> bool:
        """Whether nothing is pending."""
        return not (self.active or self.later or any(inbox.box.receives for inbox in self.listening))

    def pending(self) -> Iterator[Work[Any]]:
        """All Works that are not done; a snapshot for texts and timeouts."""
        yield from (work for work in [*self.active, *self.later] if not work._done)
        for channel in list(self.channels):
            yield from channel.pending()

    # ------------------------------------------------------------------ waiting without a loop

    def wait(self, work: Work[Any], timeout: float | None = None) -> bool:
        """Drive until the Work is done; False if `timeout` seconds have passed."""
        if self.lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            raise UsageError(
                f"wait() for {work.describe()} was called by an op, or while an object was pickled or unpickled, in "
                "the midst of another operation: it may only compute there; wait before or after it"
            )
        if self.ticking.loop is not None:
            return self.drive_while(lambda: not work._done, timeout, work)
        self.turn_seconds = WAITED_FOR_SECONDS
        try:
            return self.drive_while(lambda: not work._done, timeout, work)
        finally:
            self.turn_seconds = ALGORITHM_SECONDS

    def drive_while(
        self, waiting: Callable[[], bool], timeout: float | None = None, work: Work[Any] | None = None
    ) -> bool:
        """Drive until `waiting()` is False; False if `timeout` seconds have passed."""
        if work is not None:
            self.credit = TURN_CREDIT  # there is no loop that wants its turn
            if self.drive_inline(work):
                return True
        try:
            return self._drive_while(waiting, None if timeout is None else monotonic() + timeout)
        finally:
            self.doorbell.tell_waiting(False)

    def _drive_while(self, waiting: Callable[[], bool], end: float | None) -> bool:
        last = monotonic()
        while waiting():
            if self.drive():
                last = monotonic()
                continue
            now = monotonic()
            if end is not None and now >= end:
                return not waiting()
            if now - last > UNMOVED_SECONDS:
                self.doorbell.tell_waiting(True)  # each time: another thread may have taken it back
            delay = self.backoff.delay(now - last, bool(self.active))
            if end is not None:
                delay = min(delay, end - now)
            if delay == 0.0:
                os.sched_yield()
            elif self._nap(delay):
                last = monotonic()
        return True

    def _nap(self, seconds: float) -> bool:
        """Sleep outside a loop until rung; True if there was anything."""
        has_come = self.doorbell.nap(seconds, self.drive)
        if self.ticking.is_asleep:  # the loop sleeps on, in another thread: peers are to ring for it, too
            self.doorbell.sleep()
            has_come = self.drive() or has_come
        return has_come

    # ------------------------------------------------------------------ limits, threads, end

    def attend(self, accelerator: Accelerator) -> None:
        """MPI is about to be given memory of this device, by this thread."""
        if accelerator not in self.given:
            self.given.append(accelerator)
        accelerator.attend()

    def attend_all(self) -> None:
        """This thread is about to call MPI, which has been given memory of devices; one may have failed."""
        for accelerator in self.given:
            with suppress(DeviceFailed):
                accelerator.attend()

    def limit(self, work: Work[Any]) -> None:
        """Watch a Work that has a limit of its own."""
        if self.on_limit is not None:
            self.on_limit(work)

    def timeouts_changed(self) -> None:
        """A communicator has a new timeout."""
        if self.on_limit is not None:
            self.on_limit(None)

    def start_thread(self) -> None:
        """Drive in a thread of its own too, so that operations advance while Python computes."""
        if self._thread is None:
            self._thread = ProgressThread(self)
            self._thread.start()

    def nudge_thread(self) -> None:
        """Something was posted: the progress thread, if there is one, may sleep."""
        if self._thread is not None:
            self._thread.nudge()

    def stop_thread(self) -> None:
        """End the progress thread."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
