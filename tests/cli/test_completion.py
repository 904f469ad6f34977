"""The completion record: only the rank itself writes, and only under `mpdist run`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from mpdist.runtime.completion import FD_VARIABLE, PID_VARIABLE, record_completion, record_failure, record_start


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    yield read, write
    os.close(read)
    os.close(write)


def set_variables(monkeypatch: pytest.MonkeyPatch, fd: object, pid: object) -> None:
    monkeypatch.setenv(FD_VARIABLE, str(fd))
    monkeypatch.setenv(PID_VARIABLE, str(pid))


def test_words_go_into_the_pipe(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = pipe
    os.set_inheritable(write, True)
    set_variables(monkeypatch, write, os.getpid())
    record_start()
    record_failure()
    record_completion()
    assert os.read(read, 64) == b"usedtolddone"
    assert not os.get_inheritable(write), "programs that the rank starts do not get it"


def test_other_process_writes_nothing(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = pipe
    set_variables(monkeypatch, write, os.getppid())
    record_completion()
    with pytest.raises(BlockingIOError):
        os.read(read, 64)


def test_nothing_happens_without_mpdist_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FD_VARIABLE, raising=False)
    monkeypatch.delenv(PID_VARIABLE, raising=False)
    record_completion()


@pytest.mark.parametrize("fd", ["", "x", "-1", "99999"])
def test_unusable_pipe_is_ignored(fd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, fd, os.getpid())
    record_completion()


def test_file_that_took_the_number_of_the_pipe_is_left_alone(
    tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.path.join(tmp_path, "file")
    with open(path, "wb") as file:
        set_variables(monkeypatch, file.fileno(), os.getpid())
        record_completion()
    assert os.path.getsize(path) == 0
