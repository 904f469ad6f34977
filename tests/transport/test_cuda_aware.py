"""When it is found out what MPI may be given, and what happens until then."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from comm.test_devices import check
from memory.simulated import DEVICE, Simulated

import mpdist
from mpdist.memory import Device
from mpdist.transport.cuda_aware import Awareness
from mpdist.transport.cuda_aware import question as module
from mpdist.transport.cuda_aware.cache import default_folder
from mpdist.transport.cuda_aware.claim import _ask_mpich, _ask_open_mpi, cuda_support, library_path
from mpdist.transport.cuda_aware.question import described
from mpdist.transport.cuda_aware.table import Answer, Finding

pytestmark = pytest.mark.ranks(1, 2)

Comm = mpdist.Communicator


@pytest.fixture
def home(
    comm: Comm, fake_gpu: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.MonkeyPatch]:
    """Trials find a GPU; nothing is kept yet, and what is kept is kept for all ranks."""
    folder = comm._channel.transport.all_gather_now(str(tmp_path))[0]
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("pretended")))
    engine = comm._channel.engine
    before = engine.awareness
    yield monkeypatch
    engine.awareness.close()
    engine.awareness = before
    engine.given.clear()


async def found(awareness: Awareness) -> None:
    for thread in awareness._threads:
        await asyncio.to_thread(thread.join)


@pytest.mark.usefixtures("home")
async def test_arrays_are_staged_until_the_trial_has_ended(comm: Comm, fake_gpu: Simulated) -> None:
    awareness = comm._channel.engine.awareness = Awareness("probe")
    started = time.monotonic()
    for _ in range(3):
        x = fake_gpu.array(np.full(4, comm.rank))
        await comm.broadcast(x, comm.size - 1)
        check(x, np.full(4, comm.size - 1))
    assert time.monotonic() - started < 1
    assert fake_gpu.copies
    await found(awareness)
    fake_gpu.copies.clear()
    x = fake_gpu.array(np.full(4, comm.rank))
    await comm.broadcast(x, 0)
    check(x, np.zeros(4, int))
    assert not fake_gpu.copies
    again = Awareness("probe")
    assert again.takes("broadcast", DEVICE)  # at once
    assert not again._threads


async def test_one_process_tries_for_all(comm: Comm, home: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def probe(library: str, device: int, operations: Any, is_over: threading.Event) -> Finding:
        made.append(device)
        time.sleep(0.5)
        return Finding({"send": Answer.OK})

    home.setattr(module, "probe", probe)
    awareness = Awareness("probe")
    assert not awareness.takes("send", DEVICE)
    await found(awareness)
    assert awareness.takes("send", DEVICE)
    assert not awareness.takes("recv", DEVICE)
    assert sum(await comm.all_gather_object(len(made))) == 1


async def test_a_trial_is_broken_off_at_the_end_and_not_kept(comm: Comm, home: pytest.MonkeyPatch) -> None:
    home.setenv("PRETENDED_FAULTS", "hang ibroadcast")
    awareness = Awareness("probe")
    awareness.takes("send", DEVICE)
    await asyncio.sleep(1)
    started = time.monotonic()
    awareness.close()
    assert time.monotonic() - started < 5
    await comm.barrier()
    assert not list(default_folder().glob("*.json"))


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (Finding({"send": Answer.OK, "scan": Answer.UNKNOWN}), ""),
        (Finding({"send": Answer.OK, "scan": Answer.HANGS}), "does not for all (does not end: scan)"),
        (Finding({}, "no GPU"), "showed nothing: no GPU"),
        (Finding({"send": Answer.OK}, "it ended"), "showed not all: it ended"),
    ],
)
async def test_what_is_staged_against_mpis_word_is_told_once(
    home: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], finding: Finding, words: str
) -> None:
    home.setattr(module, "probe", lambda *_: finding)
    for _ in range(2):
        awareness = Awareness("probe")
        awareness.takes("send", DEVICE)
        await found(awareness)
    told = capsys.readouterr().err
    assert told.count("such arrays go through host memory") == bool(words)
    assert words in told


@pytest.mark.usefixtures("home")
async def test_the_wheels_say_no_and_nothing_is_tried(comm: Comm, home: pytest.MonkeyPatch) -> None:
    home.setattr(module, "probe", None)
    awareness = Awareness("auto")
    assert not awareness.takes("send", DEVICE)
    assert not awareness._threads
    assert cuda_support(library_path()) == "no"
    assert set(described("send", DEVICE).split("; ")[0].split()) == {"ok:", "send"}


@pytest.mark.ranks(1)
async def test_the_answers_are_told_after_a_trial(comm: Comm, home: pytest.MonkeyPatch) -> None:
    home.setattr(module, "probe", lambda *_: Finding({"send": Answer.OK}, "the rest is lost"))
    assert described("probe", DEVICE).startswith("ok: send")
    assert described("probe", DEVICE).endswith("(the rest is lost)")


@pytest.mark.ranks(1)
async def test_a_gpu_that_cannot_be_used_is_told(comm: Comm) -> None:
    assert described("probe", Device("cuda", 7)).startswith("not tried: Unavailable: an array on cuda:7")


# ---------------------------------------------------------------------- the library


class Query:
    """A function as ctypes has it."""

    def __init__(self, status: int, answer: int = 0) -> None:
        self.status, self.answer = status, answer

    def __call__(self, *arguments: Any) -> int:
        if arguments:
            assert arguments[0] == 0
            arguments[1]._obj.value = self.answer
        return self.status


@pytest.mark.ranks(1)
def test_each_mpi_is_asked_in_its_way() -> None:
    mpich = [SimpleNamespace(MPIX_GPU_query_support=Query(*answers)) for answers in ((0, 1), (0, 0), (7, 1))]
    assert [_ask_mpich(each) for each in mpich] == [True, False, False]
    assert [_ask_open_mpi(SimpleNamespace(MPIX_Query_cuda_support=Query(answer))) for answer in (1, 0)] == [True, False]
    assert _ask_mpich(SimpleNamespace()) is None
    assert _ask_open_mpi(SimpleNamespace()) is None


@pytest.mark.ranks(1)
def test_a_library_that_cannot_be_asked_is_unknown() -> None:
    assert cuda_support("/nowhere/libmpi.so") == "unknown"
    assert cuda_support("libc.so.6") == "unknown"
    assert "cupy" not in sys.modules
