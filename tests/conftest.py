"""Fixtures of all tests: the world, and a fresh communicator for each test.

How tests run on several ranks: `ranks/plugin.py`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any, cast

import hypothesis
import pytest
from pytest_asyncio import is_async_test

import mpdist

# The ranks of a job share a pipe: unbuffered, print() writes a line word by word, and those of two ranks mix.
os.environ.pop("PYTHONUNBUFFERED", None)

pytest_plugins = ("ranks.plugin", "pytester", "comm.devices")

# Without torch the folder of its tests would be taken for it.
spec = importlib.util.find_spec("torch")
if spec is None or spec.origin is None:
    sys.modules["torch"] = cast(Any, None)  # imports of it fail, as tests that can do without it expect
    collect_ignore = ["torch", "data_parallel"]

# All ranks must try the same examples, the same number of times: no random seed, no database of earlier failures,
# no search for a smaller example and no health check by the clock, which may end differently on each rank.
hypothesis.settings.register_profile(
    "ranks",
    derandomize=True,
    deadline=None,
    database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("ranks")

has_failed = pytest.StashKey[bool]()


class _TestFailed(Exception):
    """The test of this communicator failed on this rank."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember a failure, also an expected one, for fixtures that would else wait for ranks that do not come."""
    item.stash[has_failed] = item.stash.get(has_failed, False) or call.excinfo is not None
    return (yield)


@pytest.fixture(scope="session")
def world() -> Iterator[mpdist.Communicator]:
    """The communicator of all ranks; use `comm` unless the test is about the world itself."""
    yield mpdist.init()
    mpdist.finalize()


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> mpdist.Communicator:
    """A communicator of all ranks for one test, in async and in plain tests."""
    name = "_comm_in_loop" if is_async_test(request.node) else "_comm_without_loop"
    return cast(mpdist.Communicator, request.getfixturevalue(name))


@pytest.fixture
async def _comm_in_loop(
    request: pytest.FixtureRequest, world: mpdist.Communicator
) -> AsyncIterator[mpdist.Communicator]:
    with contextlib.suppress(_TestFailed):
        async with world.dup() as comm:
            yield comm
            if request.node.stash.get(has_failed, False):
                raise _TestFailed  # leaving by an exception waits for no other rank


@pytest.fixture
def _comm_without_loop(request: pytest.FixtureRequest, world: mpdist.Communicator) -> Iterator[mpdist.Communicator]:
    comm = world.dup().wait()
    yield comm
    if not request.node.stash.get(has_failed, False):
        comm.close().wait()
        return
    with contextlib.suppress(StopIteration):
        comm.__aexit__(_TestFailed, _TestFailed(), None).send(None)  # ends without a pause, so it needs no loop
