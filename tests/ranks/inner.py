"""The inner half: pytest on one rank, which runs the tests that the outer half names.

It never starts a test by itself, so that all ranks stay in step, and it tells
each phase's outcome at once: a traceback arrives even if the rank hangs afterwards.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import gc
import importlib
import inspect
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ranks.launch import MAIN_STACK_SIGNAL, RANK_VARIABLES, SOCKET_NAME, TESTS_NAME, stack_path
from ranks.verdict import is_harness

# A rank that is stuck ends by itself this long after its time limit, if the outer half was killed and can't end it.
ORPHAN_SECONDS = 60.0


class Inner:
    """The plugin of one rank."""

    def __init__(self, config: pytest.Config) -> None:
        self._folder = Path(config.getoption("--ranks-inner"))
        self._rank = own_rank()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(self._folder / SOCKET_NAME))
        self._lines = self._socket.makefile("r")
        self._stack_file = open(stack_path(self._folder, self._rank), "w")  # noqa: SIM115
        self._broken: list[str] = []
        self._kept_with_torch: bool | None = None
        self._send(event="hello", rank=self._rank, pid=os.getpid())
        config.option.basetemp = str(self._folder / f"tmp{self._rank}")
        signal.signal(signal.SIGUSR2, self._tell_where)
        faulthandler.register(MAIN_STACK_SIGNAL, self._stack_file, all_threads=False)
        faulthandler.register(signal.SIGUSR2, self._stack_file, all_threads=True, chain=True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._broken.append(report.longreprtext)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests of this launch, in its order."""
        wanted = json.loads((self._folder / TESTS_NAME).read_text())
        by_id = {item.nodeid: item for item in items}
        self._broken += [f"{test} was not found on rank {self._rank}" for test in wanted if test not in by_id]
        items[:] = [by_id[test] for test in wanted if test in by_id]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._send(event="ready", broken="\n\n".join(self._broken))
        for line in self._lines:
            message = json.loads(line)
            if "run" not in message:
                break
            self._run(session.items, message["run"])
        return True

    def _run(self, items: list[pytest.Item], index: int) -> None:
        self._keep_modules()
        item, nextitem = items[index], items[index + 1] if index + 1 < len(items) else None
        # The outer half may leave out tests between two others.
        item.session._setupstate.teardown_exact(item)
        faulthandler.dump_traceback_later(limit_of(item) + ORPHAN_SECONDS, exit=True, file=self._stack_file)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        faulthandler.cancel_dump_traceback_later()
        self._send(event="done")

    def _keep_modules(self) -> None:
        """What tests and large libraries are made of is no garbage: to look for some there takes 0.1 s each time."""
        has_torch = sys.modules.get("torch") is not None
        if self._kept_with_torch != has_torch:
            self._kept_with_torch = has_torch
            gc.collect()
            gc.freeze()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Tell a failed hypothesis example at once: its replays would wait for ranks that did not fail."""
        handle = getattr(getattr(item, "obj", None), "hypothesis", None)
        if handle is None:
            return (yield)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(handle, "inner_test", _watch_example(handle.inner_test, self._tell_example))
            return (yield)

    def _tell_example(self, text: str) -> None:
        self._send(event="phase", when="call", outcome="failed", text=text, sections={})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._send(
            event="phase",
            when=report.when,
            outcome=_outcome(report),
            text=_text(report),
            sections=dict(report.sections),
        )

    def pytest_warning_recorded(self, warning_message: Any) -> None:
        self._send(
            event="warning",
            text=f"{warning_message.category.__name__}: {warning_message.message}",
            file=warning_message.filename,
            line=warning_message.lineno,
        )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Failures were told; any other status than 0 says that the process broke."""
        session.exitstatus = 0

    def _tell_where(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: where this rank is."""
        stack = [entry for entry in traceback.extract_stack(frame) if not is_harness(entry.filename)]
        self._send(
            event="where",
            stack="".join(traceback.format_list(stack)),
            tasks="\n".join(_describe_tasks()),
            pending="\n".join(_describe_pending()),
        )

    def _send(self, **message: object) -> None:
        self._socket.sendall(json.dumps(message, default=str).encode() + b"\n")


def limit_of(item: pytest.Item) -> float:
    """Seconds that a test may take."""
    mark = item.get_closest_marker("limit")
    return float(mark.args[0] if mark else item.config.getoption("--limit"))


def own_rank() -> int:
    """This process's rank, from what the launcher set."""
    return next(int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ)


def _outcome(report: pytest.TestReport) -> str:
    """passed, failed, skipped or xfailed; whether an unexpected pass is one is for the outer half to say."""
    if report.skipped and hasattr(report, "wasxfail"):
        return "xfailed"
    if report.failed and report.longreprtext.startswith("[XPASS(strict)]"):
        return "passed"
    return report.outcome


def _text(report: pytest.TestReport) -> str:
    """The traceback, or the reason of a skip."""
    if hasattr(report, "wasxfail"):
        return str(report.wasxfail)
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return str(report.longrepr or "").rstrip()


def _describe_tasks() -> Iterator[str]:
    """Each task of the running loop, with the lines at which it waits."""
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        return
    for task in sorted(tasks, key=lambda task: task.get_name()):
        frames = list(_awaited_frames(task.get_coro()))
        stack = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames)
        yield f"{task.get_name()}:\n{''.join(stack.format()).rstrip()}"


def _awaited_frames(waiting: object) -> Iterator[FrameType]:
    """Frames of a coroutine and of what it awaits, outermost first."""
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is not None and not is_harness(frame.f_code.co_filename):
            yield frame
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)


def _describe_pending() -> list[str]:
    """mpdist's pending operations, where it is loaded and can tell."""
    if "mpdist.runtime" not in sys.modules:
        return []
    describe = getattr(importlib.import_module("mpdist.runtime"), "describe_pending", list)
    try:
        return [str(line) for line in describe()]
    except Exception as error:
        return [f"describe_pending failed: {error!r}"]


def _watch_example(test: Callable[..., Any], tell: Callable[[str], None]) -> Callable[..., Any]:
    """A hypothesis test that tells its traceback the moment it fails."""

    def failed(error: Exception, arguments: dict[str, object]) -> None:
        if not type(error).__module__.startswith("hypothesis"):
            tell(f"{traceback.format_exc()}\nFalsifying example: {arguments}")

    if inspect.iscoroutinefunction(test):

        @functools.wraps(test)
        async def watched_coroutine(*args: object, **kwargs: object) -> object:
            try:
                return await test(*args, **kwargs)
            except Exception as error:
                failed(error, kwargs)
                raise

        return watched_coroutine

    @functools.wraps(test)
    def watched(*args: object, **kwargs: object) -> object:
        try:
            return test(*args, **kwargs)
        except Exception as error:
            failed(error, kwargs)
            raise

    return watched
