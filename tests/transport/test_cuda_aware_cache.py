"""What a trial has shown is kept for this installation, and for no other."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from mpdist.transport.cuda_aware import cache as module
from mpdist.transport.cuda_aware.cache import Cache, Installation, default_folder
from mpdist.transport.cuda_aware.table import Answer, Finding

HERE = Installation("/lib/libmpi.so", 100, 200, "MPICH 5", "4.1", "H100, driver 1", {"UCX_TLS": "all"})
FOUND = Finding({"send": Answer.OK, "scan": Answer.CRASHES})


def test_what_was_stored_is_loaded(tmp_path: Path) -> None:
    cache = Cache(HERE, tmp_path / "not there yet")
    assert cache.load() is None
    cache.store(FOUND)
    assert Cache(HERE, tmp_path / "not there yet").load() == FOUND
    cache.store(Finding({}))
    assert cache.load() == Finding({})
    assert os.listdir(cache.path.parent) == [cache.path.name]


@pytest.mark.parametrize(
    "change",
    [
        *({"library": "/other"}, {"nbytes": 1}, {"mtime_ns": 1}, {"version": "MPICH 6"}, {"mpi4py": "4.2"}),
        *({"device": "H100, driver 2"}, {"settings": {}}),
    ],
)
def test_another_installation_has_its_own(tmp_path: Path, change: dict[str, Any]) -> None:
    Cache(HERE, tmp_path).store(FOUND)
    assert Cache(dataclasses.replace(HERE, **change), tmp_path).load() is None


def test_a_library_that_was_replaced_is_another(tmp_path: Path) -> None:
    library = tmp_path / "libmpi.so"

    def installed() -> Installation:
        return Installation.of(str(library), "5", "4.1", "H100", {})

    seen = [installed()]
    for content in ("a", "bb"):
        library.write_text(content)
        os.utime(library, ns=(1, len(seen)))
        seen.append(installed())
    assert len({(each.nbytes, each.mtime_ns) for each in seen}) == 3


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}", '"x"', "\udcff", "[" * 100_000])
def test_a_damaged_file_is_none_and_is_replaced(tmp_path: Path, content: str) -> None:
    cache = Cache(HERE, tmp_path)
    cache.path.write_text(content, errors="surrogateescape")
    assert cache.load() is None
    cache.store(FOUND)
    assert cache.load() == FOUND


@pytest.mark.parametrize("change", [{"answers": {"send": "perhaps"}}, {"answers": []}, {"installation": {}}])
def test_a_file_that_says_something_else_is_none(tmp_path: Path, change: dict[str, Any]) -> None:
    cache = Cache(HERE, tmp_path)
    cache.store(FOUND)
    cache.path.write_text(json.dumps(json.loads(cache.path.read_text()) | change))
    assert cache.load() is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = Cache(HERE, tmp_path / "file" / "folder")
    cache.store(FOUND)
    with cache.alone(threading.Event()):
        assert cache.load() is None


def test_a_trial_that_failed_is_made_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(HERE, tmp_path)
    cache.store(Finding({}, "the GPU was busy"))
    assert cache.load() == Finding({}, "the GPU was busy")
    monkeypatch.setattr(module, "PROBLEM_SECONDS", -1.0)
    assert cache.load() is None
    cache.store(FOUND)
    assert cache.load() == FOUND


def test_one_waits_for_the_other(tmp_path: Path) -> None:
    cache, other, is_over = Cache(HERE, tmp_path), Cache(HERE, tmp_path), threading.Event()
    entered = threading.Event()

    def enter() -> None:
        with other.alone(is_over):
            entered.set()

    for end in (lambda: None, is_over.set):
        entered.clear()
        thread = threading.Thread(target=enter)
        with cache.alone(threading.Event()):
            thread.start()
            assert not entered.wait(0.3)
            end()  # a job that ends waits no longer
            assert entered.wait(5) == is_over.is_set()
        thread.join(5)
        assert entered.is_set()


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "mpdist"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "mpdist"


def test_who_has_no_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    cache = Cache(HERE)
    cache.store(FOUND)
    assert cache.load() is None
