"""Watch: which pending operations have waited too long.

Limits that a program sets (`within`) are kept by their deadline, so that they are
exact. All others, a communicator's timeout and the time after which a wait is
reported, are found by looking at all that is pending, as often as the shortest of
them needs, and so seldom that the looking costs at most a hundredth of the time.
"""

from __future__ import annotations

import heapq
import math
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from mpdist.config import Config
from mpdist.progress.collective import Collective
from mpdist.progress.receive import Receive

if TYPE_CHECKING:
    from mpdist.progress.engine import Engine
    from mpdist.progress.work import Work

# A limit is kept to this part of its length.
PRECISION = 0.05
SHORTEST_SCAN, LONGEST_SCAN = 0.02, 0.5
COST = 0.01


@dataclass
class Late:
    """What a look has found.

    Attributes:
        expired: past their limit.
        long: past the time after which they are reported; each once.
    """

    expired: list[Work[Any]] = field(default_factory=list)
    long: list[Work[Any]] = field(default_factory=list)


def snapshot(engine: Engine) -> list[Work[Any]]:
    """The pending Works, while other threads go on."""
    while True:
        try:
            return list(engine.pending())
        except RuntimeError:  # a table changed while it was read
            continue


def effective_limit(work: Work[Any], config: Config) -> float:
    """Seconds the operation may take; 0: for ever."""
    if work.limit is not None:
        return work.limit
    if not isinstance(work, Collective):
        return 0.0
    timeout = work._channel.timeout
    return config.timeout if timeout is None else timeout


class Watch:
    """The limits of one rank's operations.

    Attributes:
        next_look: when `look` has to be called again, monotonic clock.
    """

    def __init__(self, engine: Engine, config: Config) -> None:
        self._engine = engine
        self._config = config
        self._new: deque[tuple[float, weakref.ref[Work[Any]]]] = deque()  # filled by any thread
        self._deadlines: list[tuple[float, int, weakref.ref[Work[Any]]]] = []
        self._number = 0
        self._scan_at = 0.0
        self._told: weakref.WeakSet[Work[Any]] = weakref.WeakSet()
        self._handed: weakref.WeakSet[Work[Any]] = weakref.WeakSet()
        self.next_look = 0.0

    def limit(self, work: Work[Any]) -> float:
        """Watch a Work that has a limit of its own, from any thread; returns its deadline."""
        assert work.since is not None
        assert work.limit is not None
        deadline = work.since + work.limit
        self._new.append((deadline, weakref.ref(work)))
        return deadline

    def timeouts_changed(self) -> None:
        """A communicator's timeout is new: look at once."""
        self._scan_at = self.next_look = 0.0

    def look(self) -> Late:
        """What is too late now."""
        now = monotonic()
        late = Late(list(self._past_deadline(now)))
        if now >= self._scan_at:
            self._scan(now, late)
        self.next_look = min(self._scan_at, self._deadlines[0][0] if self._deadlines else math.inf)
        return late

    def overdue(self) -> list[Work[Any]]:
        """All that is past its limit, whether `look` has found it or not."""
        now = monotonic()
        limits = ((work, effective_limit(work, self._config)) for work in snapshot(self._engine))
        return [work for work, limit in limits if work.since is not None and 0 < limit <= now - work.since]

    def _past_deadline(self, now: float) -> Iterator[Work[Any]]:
        while self._new:
            deadline, ref = self._new.popleft()
            self._number += 1
            heapq.heappush(self._deadlines, (deadline, self._number, ref))
        while self._deadlines and self._deadlines[0][0] <= now:
            work = heapq.heappop(self._deadlines)[2]()
            if work is not None and not work._done and work not in self._handed:
                self._handed.add(work)
                yield work

    def _scan(self, now: float, late: Late) -> None:
        start = perf_counter()
        report_after = self._config.report_after
        internal = self._engine.meeting
        for work in snapshot(self._engine):
            if _is_idle(work):
                continue
            if work.since is None:
                work.since = now
                continue
            waited = now - work.since
            if work.limit is None and isinstance(work, Collective):
                limit = effective_limit(work, self._config)
                if 0 < limit <= waited and work not in self._handed:
                    self._handed.add(work)
                    late.expired.append(work)
            if 0 < report_after <= waited and work not in self._told and not _is_internal(work, internal):
                self._told.add(work)
                late.long.append(work)
        if len(self._deadlines) > 1024:
            self._drop_done()
        self._scan_at = now + max(self._interval(), (perf_counter() - start) / COST)

    def _interval(self) -> float:
        limits = [self._config.report_after, self._config.timeout]
        limits += [channel.timeout or 0.0 for channel in list(self._engine.channels)]
        shortest = min((limit for limit in limits if limit > 0), default=math.inf)
        return min(max(PRECISION * shortest, SHORTEST_SCAN), LONGEST_SCAN)

    def _drop_done(self) -> None:
        alive = []
        for entry in self._deadlines:
            work = entry[2]()
            if work is not None and not work._done:
                alive.append(entry)
        heapq.heapify(alive)
        self._deadlines = alive


def _is_idle(work: Work[Any]) -> bool:
    """Whether it is an iterator over messages to which none has come: that is no wait."""
    return isinstance(work, Receive) and work.is_listener and work.order > 0


def _is_internal(work: Work[Any], meeting: object) -> bool:
    """Whether it is a message by which a subgroup is made: the subgroup itself is told of."""
    return work._channel is meeting and not isinstance(work, Collective)
