"""The warden's decisions, and how it finds `mpdist run`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpdist.cli import warden
from mpdist.cli.warden import LineTagger, connect, exit_status, is_success


@pytest.mark.parametrize(
    ("wait_status", "records", "expected"),
    [
        (0, [], True),
        (0, ["used", "done"], True),
        (0, ["used"], False),
        (0, ["used", "told"], False),
        (3 << 8, [], False),
        (3 << 8, ["used", "done"], False),
        (int(signal.SIGKILL), ["used", "done"], False),
    ],
)
def test_success_is_status_zero_and_agreement(wait_status: int, records: list[str], expected: bool) -> None:
    assert is_success(wait_status, records) is expected


def test_exit_status_is_that_of_a_shell() -> None:
    assert exit_status(3 << 8) == 3
    assert exit_status(int(signal.SIGSEGV)) == 139


def test_a_signal_that_is_ignored_from_the_start_stays_so() -> None:
    code = f"""
import runpy, signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_DFL)
heard = runpy.run_path({warden.__file__!r})["heard_signals"]()
print(signal.SIGHUP in heard, signal.SIGINT in heard)
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@pytest.fixture
def tagged(tmp_path: Path) -> Iterator[tuple[LineTagger, Callable[[], bytes]]]:
    """A tagger, and what it has written since the last question."""
    with (tmp_path / "out").open("wb", buffering=0) as out, (tmp_path / "out").open("rb") as written:
        yield LineTagger("7", out.fileno()), written.read


Tagged = tuple[LineTagger, Callable[[], bytes]]


def test_lines_are_tagged_whole(tagged: Tagged) -> None:
    tagger, written = tagged
    tagger.write(b"one\ntw")
    assert written() == b"[7] one\n"
    tagger.write(b"o\n\nthr")
    tagger.flush()
    tagger.flush()
    assert written() == b"[7] two\n[7] \n[7] thr\n"


def test_a_carriage_return_ends_a_line_once(tagged: Tagged) -> None:
    tagger, written = tagged
    tagger.write(b"10%\r20%\r3")
    assert written() == b"[7] 10%\r[7] 20%\r"
    tagger.write(b"0%\r\n40%\r")
    assert written() == b"[7] 30%\r\n[7] 40%\r"
    tagger.write(b"\n\nend")
    assert written() == b"\n[7] \n"
    tagger.flush()
    assert written() == b"[7] end\n"


def test_a_line_without_an_end_is_passed_on_in_large_parts(tagged: Tagged) -> None:
    tagger, written = tagged
    part = b"x" * (warden.LINE_BYTES // 4)
    for _ in range(4):
        tagger.write(part)
    assert written() == b""
    tagger.write(b"y")
    assert written() == b"[7] " + 4 * part + b"y"
    assert tagger.parts == []
    tagger.write(b"z")
    tagger.flush()
    assert written() == b"z\n"


def test_tagger_survives_a_launcher_that_is_gone() -> None:
    read, write = os.pipe()
    os.close(read)
    LineTagger("0", write).write(b"lost\n")
    os.close(write)


@pytest.fixture
def run_address() -> Iterator[tuple[str, list[bytes]]]:
    """Address of a listener that greets as job `a`, and what the first visitor sends to it."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            visitor, _ = listener.accept()
            with visitor:
                visitor.sendall(b"a\n")
                heard.append(visitor.recv(64))

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", heard
        thread.join()


def closed_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_warden_takes_the_first_address_that_answers(run_address: tuple[str, list[bytes]]) -> None:
    address, heard = run_address
    with connect(f"a secret {closed_address()} {address}") as control:
        assert control.recv(64) == b""
    assert heard == [b"secret\n"]


def test_secret_is_not_given_to_another_job(run_address: tuple[str, list[bytes]]) -> None:
    address, heard = run_address
    with pytest.raises(OSError, match="not this job"):
        connect(f"b secret {address}")
    assert heard in ([], [b""])


def test_a_lone_colon_never_reaches_the_launcher() -> None:
    words = [":", "::", ":::", "a:", ":a", "a:b", "", "a"]
    passed = [warden.with_colon(word) for word in words]
    assert passed == ["::", ":::", "::::", "a:", ":a", "a:b", "", "a"]
    assert [warden.without_colon(word) for word in passed] == words


@pytest.mark.parametrize("contact", ["", f"a secret {closed_address()}"])
def test_warden_that_reaches_nobody_starts_no_rank(contact: str) -> None:
    command = [sys.executable, "-I", "-S", warden.__file__, "PMI_RANK", "plain", "echo", "started"]
    environ = os.environ | {"PMI_RANK": "2", warden.RUN_VARIABLE: contact}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.startswith("mpdist: rank 2 on ")
    assert "can't reach `mpdist run`" in done.stderr


def test_launcher_without_rank_numbers_is_told() -> None:
    command = [sys.executable, "-I", "-S", warden.__file__, "NO_SUCH_RANK", "plain", "echo", "started"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "NO_SUCH_RANK" in done.stderr


def test_warden_imports_nothing_of_mpdist() -> None:
    """It is run as a file, beside modules whose names it must not pick up."""
    code = f"import runpy, sys; runpy.run_path({warden.__file__!r}); print([m for m in sys.modules if 'mpdist' in m])"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
