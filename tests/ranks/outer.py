"""The outer half: an item per test and rank count, a launch per conftest.py and rank count, one report.

An item's run tells the ranks to run that test and waits for all of them. When a
rank hangs, dies, or fails while others wait for it, the launch is killed, and the
next item of the group starts a new one with the tests that remain.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from ranks.inner import limit_of
from ranks.launch import Launch, Message
from ranks.verdict import Record, Verdict, judge, name_ranks

# Imports and MPI's start, on a loaded machine.
START_SECONDS = 120.0
# A failed rank's partners are given this long to come to their own end.
GRACE_SECONDS = 5.0
# From the last test to the end of the launcher, MPI's finalize included.
END_SECONDS = 30.0
# A rank that died takes the launcher with it; what that prints is worth waiting for.
LAST_WORDS_SECONDS = 3.0


class Group(NamedTuple):
    """What shares a launch: the tests below a folder, or of a file whose tests are to be by themselves."""

    path: Path
    ranks: int


class RanksError(Exception):
    """A test failed on some rank."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.headline)
        self.verdict = verdict


@dataclass(frozen=True)
class RanksRepr:
    """A verdict as pytest shows it."""

    verdict: Verdict

    @property
    def reprcrash(self) -> SimpleNamespace:
        return SimpleNamespace(message=self.verdict.headline)

    def toterminal(self, writer: Any) -> None:
        writer.line(self.verdict.text)

    def __str__(self) -> str:
        return self.verdict.text


class RanksItem(pytest.Item):
    """One test on one number of ranks.

    Attributes:
        inner_id: the test's id in the inner pytests.
        loop: position of its event loop among those under which it runs.
    """

    def __init__(self, *, ranks: int, inner: pytest.Function, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ranks = ranks
        self.inner_id = inner.nodeid
        self.own_markers = list(inner.own_markers)
        self.keywords.update(inner.keywords)
        self._inner_location = inner.reportinfo()
        indices: dict[str, int] = getattr(getattr(inner, "callspec", None), "indices", {})
        self.loop = indices.get("_asyncio_loop_factory", 0)

    @classmethod
    def on(cls, ranks: int, inner: pytest.Function) -> RanksItem:
        """The item of a test on that number of ranks."""
        name = f"{inner.name}{suffix(ranks)}"
        # The id is given as text, so that pytest splits it as it does when it reads the last run's failures.
        assert inner.parent is not None
        nodeid = f"{inner.parent.nodeid}::{name}"
        return cls.from_parent(inner.parent, name=name, nodeid=nodeid, ranks=ranks, inner=inner)

    @property
    def group(self) -> Group:
        return Group(_home(self), self.ranks)

    def runtest(self) -> None:
        outer = self.config.pluginmanager.getplugin("ranks-outer")
        assert isinstance(outer, Outer)
        outer.run(self)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, RanksError):
            return RanksRepr(excinfo.value.verdict)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        path, line, name = self._inner_location
        return path, line, f"{name}{suffix(self.ranks)}"


class Outer:
    """The plugin of the pytest that the user started.

    Args:
        wanted: on which of its numbers of ranks a test of that id shall run.
    """

    def __init__(self, wanted: Callable[[str, Sequence[int]], Sequence[int]]) -> None:
        self._wanted = wanted
        self._launch: Launch | None = None
        self._group: Group | None = None
        self._has_failed = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_pycollect_makeitem(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        """Replace a test marked `ranks` by one item for each rank count."""
        nodes = yield
        if nodes is None:
            return nodes
        nodes = nodes if isinstance(nodes, list) else [nodes]
        return [new for node in nodes for new in self._multiply(node)]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Bring the tests of a group together, in it those of a file and a loop, and leave the rest in order."""
        order: dict[Path, int] = {}
        for item in items:
            for path in (_home(item), item.path):
                order.setdefault(path, len(order))

        def place(item: pytest.Item) -> tuple[int, ...]:
            ranks, loop = (item.ranks, item.loop) if isinstance(item, RanksItem) else (0, 0)
            return order[_home(item)], ranks, order[item.path], loop

        items.sort(key=place)
        gc.freeze()  # the tests live on: looking through thousands for garbage takes longer than most tests

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
        """End the launch after its last test; a launch that does not end well is an error there."""
        yield
        same = isinstance(nextitem, RanksItem) and nextitem.group == self._group
        if self._launch is not None and not same:
            try:
                self._end()
            except RanksError as error:
                pytest.fail(error.verdict.text, pytrace=False)

    def pytest_sessionfinish(self) -> None:
        self._kill()

    def run(self, item: RanksItem) -> None:
        """Run one test on all ranks.

        Raises:
            RanksError: it failed on some rank.
        """
        if self._launch is None:
            self._start(item)
        assert self._launch is not None
        records = [Record(rank) for rank in range(item.ranks)]
        seconds = self._play(self._launch, item, records)
        lost = any(record.is_lost for record in records)
        verdict = judge(records, seconds, str(item.path), self._launch.output() if lost else "")
        if not all(record.is_done for record in records):
            self._kill()
        self._report(item, records, verdict)

    def _multiply(self, node: pytest.Item | pytest.Collector) -> list[pytest.Item | pytest.Collector]:
        mark = node.get_closest_marker("ranks")
        if mark is None or not isinstance(node, pytest.Function):
            return [node]
        return [RanksItem.on(ranks, node) for ranks in self._wanted(node.nodeid, mark.args)]

    def _start(self, item: RanksItem) -> None:
        """Launch the ranks with this item's test and those of its group that follow."""
        items = item.session.items
        rest = takewhile(lambda other: getattr(other, "group", None) == item.group, items[items.index(item) :])
        group = [other for other in rest if isinstance(other, RanksItem)]
        tests, files = [other.inner_id for other in group], list(dict.fromkeys(str(other.path) for other in group))
        shows_output = item.config.getoption("capture") == "no"
        arguments = [*_inner_arguments(item.config), *files]
        self._launch = Launch(tests, item.ranks, arguments, shows_output)
        self._group, self._has_failed = item.group, False
        self._await_ready(self._launch, item.ranks)

    def _await_ready(self, launch: Launch, ranks: int) -> None:
        ready: set[int] = set()
        for rank, message in launch.messages(time.monotonic() + START_SECONDS):
            if message.get("broken"):
                self._fail(f"rank {rank} could not collect the tests", str(message["broken"]))
            if message["event"] == "ready":
                ready.add(rank)
            if len(ready) == ranks:
                return
        missing = sorted(set(range(ranks)) - ready)
        what = "the launch ended" if launch.has_ended else f"the launch was not ready after {START_SECONDS:g} s"
        self._fail(f"{what} without a word from {name_ranks(missing)}", launch.output())

    def _play(self, launch: Launch, item: RanksItem, records: list[Record]) -> float:
        """Run the test and fill the records; returns the seconds after which waiting was given up."""
        launch.send({"run": launch.tests.index(item.inner_id)})
        begin = time.monotonic()
        seconds = limit_of(item)
        while unfinished := [record for record in records if not record.is_done]:
            until = min(begin + seconds, time.monotonic() + 0.2)
            for rank, message in launch.messages(until):
                _note(records[rank], message)
                if any(record.has_left for record in records):
                    seconds = min(seconds, time.monotonic() - begin + GRACE_SECONDS)
                if all(record.is_done for record in records):
                    return seconds
            if launch.has_ended or any(record.rank in launch.died for record in unfinished):
                _note_lost(launch, records)
                return seconds
            if time.monotonic() >= begin + seconds:
                for rank, where in launch.locate(record.rank for record in unfinished).items():
                    records[rank].where = where
                return seconds
        return seconds

    def _report(self, item: RanksItem, records: list[Record], verdict: Verdict) -> None:
        for record in records:
            for title, text in record.sections.items():
                title = title.removeprefix("Captured ").removesuffix(" call")
                item.add_report_section("call", f"{title} of rank {record.rank}", text)
        if verdict.outcome == "failed":
            self._has_failed = True
            raise RanksError(verdict)
        if verdict.outcome == "xfailed":
            pytest.xfail(verdict.headline)
        if verdict.outcome == "skipped":
            pytest.skip(verdict.headline)

    def _end(self) -> None:
        """Let the ranks end by themselves; after a failure nothing is expected of them."""
        assert self._launch is not None
        self._launch.send({"stop": True})
        status = self._launch.wait(END_SECONDS if not self._has_failed else GRACE_SECONDS)
        if status != 0 and not self._has_failed:
            where = self._launch.locate(range(self._launch.ranks)) if status is None else {}
            stacks = "\n".join(f"rank {rank}:\n{found.get('stack', '')}" for rank, found in where.items())
            end = f"ended with status {status}" if not where else f"still runs {END_SECONDS:g} s after its last test"
            self._fail(f"all tests passed, but the launch {end}", f"{stacks}\n{self._launch.output()}")
        self._kill()

    def _fail(self, headline: str, text: str) -> None:
        self._kill()
        raise RanksError(Verdict("failed", headline, f"{headline}\n{text}"))

    def _kill(self) -> None:
        if self._launch is not None:
            self._launch.close()
        self._launch = self._group = None


def suffix(ranks: int) -> str:
    """What an item's name ends with."""
    return "[1 rank]" if ranks == 1 else f"[{ranks} ranks]"


def _note(record: Record, message: Message) -> None:
    """Take one message of a rank into its record."""
    if message["event"] == "done":
        record.is_done = True
    if message["event"] == "warning":
        text = f"rank {record.rank}: {message['text']}"
        warnings.warn_explicit(text, UserWarning, str(message["file"]), int(str(message["line"])))
    if message["event"] == "phase":
        phase, sections = str(message["when"]), message["sections"]
        record.outcomes[phase] = str(message["outcome"])
        record.texts[phase] = str(message["text"])
        assert isinstance(sections, dict)
        record.sections |= sections


def _note_lost(launch: Launch, records: list[Record]) -> None:
    """Mark the ranks that were lost first; the others that did not finish were killed with them."""
    launch.wait(LAST_WORDS_SECONDS)
    first = [rank for rank in launch.died if not records[rank].is_done][:1]
    unfinished = [record.rank for record in records if not record.is_done]
    for rank in first or unfinished:
        records[rank].is_lost = True


def _home(item: pytest.Item) -> Path:
    """Below which the tests are that share a launch with it: the folder of the conftest.py that has their fixtures."""
    return item.path if item.get_closest_marker("apart") else _folder_of_fixtures(item.path.parent)


@lru_cache
def _folder_of_fixtures(folder: Path) -> Path:
    return next((each for each in (folder, *folder.parents) if (each / "conftest.py").exists()), folder)


def _inner_arguments(config: pytest.Config) -> list[str]:
    """Options of the inner pytests: what changes how tests are collected, run and shown."""
    # What is logged shows on stderr: to catch it by itself takes longer than a short test.
    arguments = ["-p", "no:cacheprovider", "-p", "no:logging", "--rootdir", str(config.rootpath)]
    arguments += [f"--limit={config.option.limit}"]
    arguments += [f"--loop={config.option.loop}"] if config.option.loop else []
    if config.inipath is not None:
        arguments += ["-c", str(config.inipath)]
    for name, values in (("-p", config.option.plugins), ("-o", config.option.override_ini)):
        arguments += [word for value in values or () for word in (name, value)]
    arguments += [f"-W{value}" for value in config.option.pythonwarnings or ()]
    arguments += ["-v"] * config.option.verbose
    arguments += [f"--{name}" for name in ("large", "showlocals") if getattr(config.option, name)]
    arguments += [f"--tb={config.option.tbstyle}", f"--capture={config.option.capture}"]
    return [*arguments, f"--import-mode={config.option.importmode}"]
