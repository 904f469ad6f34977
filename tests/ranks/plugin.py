"""Options, marks and event loops; which half of the harness this pytest is.

A module says `pytestmark = pytest.mark.ranks(1, 2, 3, 4)` to run its tests on so
many ranks, adds `pytest.mark.loops` to run its async tests under asyncio's loop
and uvloop's, and gives a test another time limit by `@pytest.mark.limit(seconds)`. All modules below a
conftest.py share a launch, for starting one takes longer than most tests; one that leaves
its process changed says `pytest.mark.apart`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn
from zlib import crc32

import pytest

from ranks.inner import Inner, limit_of
from ranks.outer import Outer, RanksItem

MARKS = {
    "ranks(*counts)": "run on so many ranks, each count in one launch for all below a conftest.py",
    "apart": "of a module: its tests share a launch with no other module's",
    "limit(seconds)": "a test that takes longer fails",
    "loops": "async tests run under asyncio's loop and under uvloop's",
    "gpu": "needs an NVIDIA GPU",
    "large": "needs much memory or time; runs with --large only",
    "job": "launches real jobs, and may kill them",
    "any_mpi": "tests what no MPI changes: where all tests run with each MPI, one is enough for it",
    "either_mpi": "of tests that MPI hardly changes: half of them with one MPI and half with another are enough",
}
# One of its numbers differs between tests, not between runs; another one is never the same where there are two.
EACH_ON = ("all", "most", "one", "another")
HALVES = ("first", "second")
GPU_DEVICE = Path("/dev/nvidia0")

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks", "tests on MPI ranks")
    group.addoption("--ranks", default="", help="run only on these numbers of ranks, e.g. 1,2")
    group.addoption("--each-on", choices=EACH_ON, default="all", help="on which of its numbers of ranks a test runs")
    group.addoption("--half", choices=HALVES, help="run only this half of the tests marked either_mpi")
    group.addoption("--limit", type=float, default=60.0, help="seconds that a test may take (default 60)")
    group.addoption("--loop", choices=("asyncio", "uvloop", "both"), help="event loop of async tests")
    group.addoption("--large", action="store_true", help="run tests that need much memory or time")
    group.addoption("--ranks-inner", metavar="FOLDER", help="internal: this is one rank of the launch there")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    for mark, text in MARKS.items():
        config.addinivalue_line("markers", f"{mark}: {text}")
    if config.option.ranks_inner:
        config.pluginmanager.register(Inner(config), "ranks-inner")
        return
    counts = {int(count) for count in config.getoption("--ranks").split(",") if count}

    def wanted(test: str, ranks: Sequence[int]) -> list[int]:
        chosen = [each for each in ranks if not counts or each in counts]
        each_on = config.getoption("--each-on")
        if each_on == "all" or not chosen:
            return chosen
        if each_on == "most":
            return [max(chosen)]
        return [chosen[(crc32(test.encode()) + (each_on == "another")) % len(chosen)]]

    config.pluginmanager.register(Outer(wanted), "ranks-outer")


@pytest.hookimpl(specname="pytest_configure", trylast=True)
def pytest_configure_reporter(config: pytest.Config) -> None:
    """Only the outer half reports."""
    if config.option.ranks_inner:
        config.pluginmanager.unregister(name="terminalreporter")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, or was not asked to, and leave out the half that was not chosen."""
    if half := config.getoption("--half"):
        others = {item for item in items if _half_of(item) not in (half, None)}
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    reasons = {} if config.getoption("--large") else {"large": "runs with --large only"}
    if not GPU_DEVICE.exists():
        reasons["gpu"] = f"no GPU here ({GPU_DEVICE} does not exist)"
    for item in items:
        for mark, reason in reasons.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


def _half_of(item: pytest.Item) -> str | None:
    """The same on all numbers of ranks; by other bits of the hash than those that choose one of them; None: of both."""
    if not item.get_closest_marker("either_mpi") or item.get_closest_marker("any_mpi"):
        return None
    test = item.inner_id if isinstance(item, RanksItem) else item.nodeid
    return HALVES[crc32(test.encode()) >> 16 & 1]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    """The loops under which an async test runs."""
    factories: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop}
    if importlib.util.find_spec("uvloop"):
        import uvloop

        factories["uvloop"] = uvloop.new_event_loop
    wanted = config.getoption("--loop") or ("both" if item.get_closest_marker("loops") else "asyncio")
    if wanted == "both":
        return factories
    if wanted not in factories:
        raise pytest.UsageError("--loop=uvloop: uvloop is not installed")
    return {wanted: factories[wanted]}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Limit the time of a test in this process; tests on ranks are limited from outside."""
    if isinstance(item, RanksItem) or item.config.option.ranks_inner:
        return (yield)

    def expire(number: int, frame: FrameType | None) -> NoReturn:
        pytest.fail(f"no result within {limit_of(item):g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, limit_of(item))
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
