"""Watch: what is late is found once, exactly where a program set the limit, and cheaply where many are pending."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

from mpdist.config import Config
from mpdist.progress.collective import Collective
from mpdist.progress.engine import Engine
from mpdist.progress.mailbox import ANY
from mpdist.progress.receive import Receive
from mpdist.progress.work import Work
from mpdist.runtime.watch import LONGEST_SCAN, Late, Watch


class Forever(Work[None]):
    """An operation that does not end."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def _poll(self) -> bool:
        return False


class ForeverTogether(Collective[None]):
    """A collective that does not end."""

    def _poll(self) -> bool:
        return False


def make(**settings: float) -> tuple[Engine, Watch, Any]:
    """An Engine, its Watch, and what a Work needs of its channel."""
    engine = Engine()
    engine.meeting = cast(Any, None)
    channel = SimpleNamespace(engine=engine, timeout=None, broken="", where=lambda: "'world' (rank 0 of 1)")
    return engine, Watch(engine, Config(**settings)), channel


def together(engine: Engine, channel: Any) -> ForeverTogether:
    work = ForeverTogether(channel, "barrier", cast(Any, iter(())), str)
    engine.active.append(work)
    return work


def look_for(watch: Watch, seconds: float) -> Late:
    """All that is found within a time."""
    found = Late()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        late = watch.look()
        found.expired += late.expired
        found.long += late.long
        time.sleep(0.005)
    return found


def test_collectives_and_only_they_have_the_jobs_limit() -> None:
    engine, watch, channel = make(timeout=0.1, report_after=0)
    engine.active.append(Forever(channel))
    work = together(engine, channel)
    start = time.monotonic()
    found: list[Work[Any]] = []
    while not found:
        found = watch.look().expired
    assert time.monotonic() - start >= 0.1
    assert found + look_for(watch, 0.2).expired == [work]


def test_a_communicators_timeout_goes_before_the_jobs() -> None:
    engine, watch, channel = make(timeout=0.05, report_after=0)
    channel.timeout = 0
    together(engine, channel)
    assert look_for(watch, 0.2).expired == []


def test_a_limit_of_its_own_goes_before_all_and_counts_from_within() -> None:
    engine, watch, channel = make(timeout=0.01, report_after=0)
    engine.on_limit = lambda work: watch.limit(cast(Any, work)) and None
    work, other = together(engine, channel), Forever(channel)
    start = time.monotonic()
    work.within(1)
    other.within(0.1)
    found: list[Work[Any]] = []
    while not found:
        found = watch.look().expired
    assert found == [other]
    assert 0.1 <= time.monotonic() - start < 0.9
    assert watch.next_look <= start + 1.01
    assert look_for(watch, 1.2).expired == [work]


def test_what_ends_in_time_is_not_late() -> None:
    engine, watch, channel = make()
    engine.on_limit = lambda work: watch.limit(cast(Any, work)) and None
    work = Forever(channel)
    work.within(0.05)
    work._finish(None)
    late = look_for(watch, 0.1)
    assert late.expired == late.long == []


def test_each_long_wait_is_found_once() -> None:
    engine, watch, channel = make(timeout=0, report_after=0.05)
    works = [Forever(channel), together(engine, channel)]
    engine.active.append(works[0])
    found = look_for(watch, 0.3)
    assert sorted(map(id, found.long)) == sorted(map(id, works))
    assert found.expired == []


def test_a_listener_waits_only_for_a_message_that_has_met_it() -> None:
    engine, watch, channel = make(timeout=0, report_after=0.05)
    listener = Receive(channel, None, ANY, ANY)
    listener.is_listener = True
    listener.order = 1  # it is in the mailbox
    engine.active.append(listener)
    assert look_for(watch, 0.2).long == []
    listener.order = -1
    assert watch.look().long == []  # it counts from now
    assert look_for(watch, 0.3).long == [listener]


def test_many_pending_operations_are_looked_at_seldom() -> None:
    engine, watch, channel = make(timeout=0.2)
    engine.active.extend(Forever(channel) for _ in range(50_000))
    begin = time.perf_counter()
    watch.look()
    seconds = time.perf_counter() - begin
    assert watch.next_look - time.monotonic() > min(50 * seconds, LONGEST_SCAN)
