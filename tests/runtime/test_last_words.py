"""Last words get out at descriptor 2, once, and where the program has led them."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpdist.runtime.last_words import let_out, write_error


class Window:
    """A stream of a user's own kind: no descriptor."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back."""


class Broken(Window):
    def write(self, text: str) -> int:
        raise RuntimeError(f"reentrant call: {text}")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


def swallowing() -> io.StringIO:
    stream = io.StringIO()
    stream.write("before\n")
    return stream


# where sys.stderr leads -> what is read at descriptor 2
PLACES: dict[str, tuple[Callable[[], Any], str]] = {
    "where it was": (lambda: sys.stderr, "words\n"),
    "the same by another name": (lambda: os.fdopen(os.dup(2), "w"), "words\n"),
    "a string": (swallowing, "before\nwords\n"),
    "a window": (Window, "words\n"),
    "a broken window": (Broken, "words\n"),
    "closed": (closed, "words\n"),
    "nowhere": (lambda: None, "words\n"),
}


@pytest.mark.parametrize("place", PLACES)
def test_words_get_out_wherever_stderr_leads(
    place: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sys.stderr
    make, expected = PLACES[place]
    stream = make()
    monkeypatch.setattr(sys, "stderr", stream)
    with let_out(first):
        write_error("words")
    assert sys.stderr is stream, "a program that goes on finds its own"
    assert capfd.readouterr() == ("", expected)
    if isinstance(stream, io.TextIOWrapper) and stream is not first:
        stream.close()


@pytest.mark.parametrize("place", ["a broken window", "closed", "nowhere"])
def test_an_error_that_stderr_does_not_take_gets_out(
    place: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", PLACES[place][0]())
    write_error("words")
    assert capfd.readouterr().err == "words\n"


def test_a_file_gets_the_words_as_well(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sys.stderr
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stderr", log)
        with let_out(first):
            print("traceback", file=sys.stderr)
            write_error("words")
    assert (tmp_path / "log").read_text() == capfd.readouterr().err == "traceback\nwords\n"


def test_the_first_stream_gets_what_a_string_would_keep(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    window, string = Window(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", string)
    with let_out(window):  # type: ignore[arg-type]  # a stream of a user's own kind
        write_error("words")
    assert window.text == string.getvalue() == capfd.readouterr().err == "words\n"


def test_what_is_printed_before_an_error_gets_out(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        print("half", file=sys.stderr)
        raise KeyboardInterrupt

    first = sys.stderr
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(KeyboardInterrupt), let_out(first):
        interrupted()
    assert capfd.readouterr().err == "half\n"
