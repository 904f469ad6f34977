"""Progress: who looks at operations that nobody waits for.

A synchronous call drives the Engine itself. After `async_op=True` the program computes, and a thread of ours looks:
seldom enough to be no burden beside the computation, and not at all while some thread waits and therefore drives.
Where the computation has all cores of a node the thread would only take turns with it: there it leaves collectives
alone for longer, unless another rank waits.

Callbacks of futures run on the thread that finds the operation complete. A callback may itself wait for another
operation; when that happens on this thread, the next one of the chain takes over until it returns.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

import torch

from mpdist.progress.backoff import REQUEST_SECONDS

if TYPE_CHECKING:
    from mpdist.progress.engine import Engine

# A nap gives the GIL away, so that the hooks of a backward run between two looks.
NAP_SECONDS = 50e-6
IDLE_NAP_SECONDS = 0.002
# Between hosts data move only while both sides look, and a look does not say whether it did. With naps of 10 ms 3 MiB
# took 190 ms by MPICH over 1 Gbit/s, where the wire takes 26; of a transformer's communication 0.75 was hidden, and
# 0.87 with these (2026-11-30).
WIRE_NAP_SECONDS = 0.001
# Whoever posts and waits at once is not to meet the thread: so long it leaves new operations alone.
PATIENCE_SECONDS = 0.0005
# The same of collectives where no core is free. torch's DDP of two ranks on two cores, 10 M parameters, batch 8: a step
# took 46.5 ms instead of 51, and 34 without communication (2026-11-25).
LONG_PATIENCE_SECONDS = 0.05
# So often it looks then whether another rank waits. Each look takes some 90 us from the computation: with one each
# 2 ms the same step took 46.5 ms, without any 44.7 (2026-11-25).
LONG_NAP_SECONDS = 0.01
# So long after the last asynchronous operation the thread stays awake: waking it costs the caller several microseconds.
AWAKE_SECONDS = 0.02
LONG_AWAKE_SECONDS = 0.0
# Whether any of so many listed operations is pending takes a microsecond to see.
FEW = 8
# A step that has moved is likely to move again at once.
MOVING_LOOKS = 8


class Progress:
    """Drives an Engine while asynchronous operations are pending.

    Attributes:
        waiting: threads that wait for an operation, and so drive.
    """

    def __init__(self, engine: Engine) -> None:
        self.waiting: set[int] = set()
        self._engine = engine
        self._nodes = len(set(engine.nodes))
        self._calls: deque[Callable[[], object]] = deque()
        self._first = Driver(engine, self.waiting, self._calls)
        self._active = self._first

    def posted(self, *, is_urgent: bool = True) -> None:
        """An operation was posted that nobody waits for yet.

        Args:
            is_urgent: False for one that all ranks compute and wait for likewise, with the same processors.
        """
        is_patient = not (is_urgent or self._has_free_core())
        until = monotonic() + (LONG_PATIENCE_SECONDS if is_patient else PATIENCE_SECONDS)
        if until < Driver.until or self._is_alone():
            Driver.until = until
            Driver.is_patient = is_patient
        driver = self._active
        if not driver.is_awake or (driver.is_napping and not is_patient):
            driver.wake()

    def _is_alone(self) -> bool:
        """Whether no more than one operation is pending; what has failed may be listed for ever."""
        active = self._engine.active
        return len(active) <= 1 or (len(active) <= FEW and sum(not work._done for work in list(active)) <= 1)

    def _has_free_core(self) -> bool:
        return is_thread_worth(self._nodes, *self._engine.crowd, torch.get_num_threads())

    def later(self, call: Callable[[], object]) -> None:
        """Run a call on another thread: its caller holds what the call might wait for."""
        self._calls.append(call)
        driver = self._active
        (driver.next_one() if driver is self._current() else driver).rouse()

    @property
    def is_awake(self) -> bool:
        """Whether the thread may be driving now."""
        return self._active.is_awake

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Callbacks run in here, which may wait for whatever they like: somebody else drives meanwhile."""
        thread = threading.get_ident()
        was_waiting = thread in self.waiting
        self.waiting.discard(thread)
        driver = self._current()
        if driver is None or driver.is_lent:  # one of ours, and not in a callback already
            driver = None
        else:
            driver.is_lent = True
            before, self._active = self._active, driver.next_one()
            self._active.wake()
        try:
            yield
        finally:
            if driver is not None:
                driver.is_lent = False
                driver.next_one().rest()
                self._active = before
            if was_waiting:
                self.waiting.add(thread)

    def _current(self) -> Driver | None:
        """The driver whose thread this is; None where it is none of ours."""
        driver: Driver | None = self._first
        current = threading.current_thread()
        while driver is not None and driver.thread is not current:
            driver = driver.relief
        return driver

    def stop(self) -> None:
        """End the threads; operations go on when somebody waits."""
        driver: Driver | None = self._first
        while driver is not None:
            driver.stop()
            driver = driver.relief


class Driver:
    """One thread that drives.

    Attributes:
        is_awake: it looks by itself; else it must be woken.
        is_napping: it sleeps for long between two looks, unless roused.
        is_lent: it runs callbacks, and its relief drives.
        relief: the thread that drives in its place while it runs callbacks.
        until: pending asynchronous operations are left alone till then; one for all threads, as is
        is_patient: they are left alone for long, and there is no core for looking often.
    """

    until = 0.0
    is_patient = False

    def __init__(self, engine: Engine, waiting: set[int], calls: deque[Callable[[], object]]) -> None:
        self.is_awake = self.is_napping = self.is_lent = False
        self.thread: threading.Thread | None = None
        self.relief: Driver | None = None
        self._engine = engine
        self._waiting = waiting
        self._calls = calls
        self._has_wire = len(set(engine.nodes)) > 1
        self._work = threading.Event()
        self._starting = threading.Lock()
        self._ending = False

    def next_one(self) -> Driver:
        """The thread that relieves this one."""
        if self.relief is None:
            self.relief = Driver(self._engine, self._waiting, self._calls)
        return self.relief

    def wake(self) -> None:
        """Look from now on."""
        self.is_awake = True
        self.rouse()

    def rouse(self) -> None:
        """Let the thread run what is to be called, also where it does not look."""
        self._work.set()
        if self.thread is None:
            with self._starting:
                if self.thread is None and not self._ending:
                    self.thread = threading.Thread(target=self._run, name="mpdist-torch", daemon=True)
                    self.thread.start()

    def rest(self) -> None:
        """The thread that was relieved is back."""
        self.is_awake = False

    def stop(self) -> None:
        self._ending = True
        self._work.set()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()

    def _run(self) -> None:
        while not self._ending:
            self._work.wait()
            self._work.clear()
            self._drive()
            self._run_calls()  # those that came while another was to look

    def _run_calls(self) -> None:
        while self._calls:
            try:
                call = self._calls.popleft()
            except IndexError:  # another thread was faster
                return
            call()

    def _drive(self) -> None:
        engine = self._engine
        last = monotonic()
        while self.is_awake and not self._ending:
            self._run_calls()
            if self._waiting:
                last = monotonic()
                self._nap(IDLE_NAP_SECONDS)
            elif engine.is_idle():
                if monotonic() - last > (LONG_AWAKE_SECONDS if Driver.is_patient else AWAKE_SECONDS):
                    self.is_awake = False
                    if engine.is_idle() and not self._calls:
                        return
                    self.is_awake = True  # posted between the look and the end
                self._nap(IDLE_NAP_SECONDS)
            elif monotonic() < Driver.until and not engine.doorbell.is_awaited():
                last = monotonic()
                self._nap(PATIENCE_SECONDS)
            else:
                for _ in range(MOVING_LOOKS):
                    if not engine.drive():
                        break
                    last = monotonic()
                time.sleep(max(NAP_SECONDS, self._delay(monotonic() - last)))

    def _delay(self, idle_seconds: float) -> float:
        """Seconds to sleep after so long without progress; after a second nothing moves, for some rank is late."""
        delay = self._engine.backoff.delay(idle_seconds)
        if self._has_wire and idle_seconds < REQUEST_SECONDS:
            return min(WIRE_NAP_SECONDS, delay)
        return delay

    def _nap(self, seconds: float) -> None:
        """Sleep, for longer where looking takes from what is computed, but then until roused."""
        self.is_napping = True  # before the look at patience: whoever ends that rouses the thread only then
        if Driver.is_patient:
            self._work.wait(LONG_NAP_SECONDS)
            self._work.clear()
            self.is_napping = False
        else:
            self.is_napping = False
            time.sleep(seconds)


def is_thread_worth(nodes: int, ranks: int, cores: int, threads: int) -> bool:
    """Whether a thread of its own moves messages faster than the computing threads would.

    Args:
        ranks, cores: so many have so many together.
        threads: of each rank, that compute.
    """
    return nodes > 1 or cores >= ranks * (threads + 1)
