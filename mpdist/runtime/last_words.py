"""Last words: what a rank says when it fails gets out at descriptor 2, wherever `sys.stderr` leads at that moment.

It may lead into a string, as in the excepthook that torch's `init_process_group` installs:
that prints the string when the hook before has returned, and ours never does. Or into a
file, or a window: there the words go as well, but nobody may look there.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_STDERR = 2


class Listener:
    """In the place of `sys.stderr`: passes on what is printed, and remembers it; the rest is the stream's own."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.heard = _swallowed(stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self.heard += text
        with contextlib.suppress(Exception):  # closed, replaced, or interrupted by ourselves in the middle of a write
            if self._stream is not None:
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(Exception):
            if self._stream is not None:
                self._stream.flush()


@contextlib.contextmanager
def let_out(first: TextIO | None) -> Iterator[None]:
    """Whatever is printed to stderr in this block has got out at its end, and what a string has swallowed before.

    Args:
        first: what `sys.stderr` was when the program began; it gets them, too.
    """
    stream = sys.stderr
    if _is_heard(stream):
        yield
        return
    sys.stderr = listener = Listener(stream)
    try:
        yield
    finally:
        if sys.stderr is listener:  # another thread may have led it elsewhere
            sys.stderr = stream
        has_first = first is not None and first is not stream and _print(listener.heard, first)
        if not (has_first and _is_heard(first)):
            _write(listener.heard)


def write_error(text: str) -> None:
    """Write lines to stderr, behind all that was printed so far; never raises, also inside a signal handler."""
    flush_streams()
    if not _print(f"{text}\n", sys.stderr):
        _write(f"{text}\n")


def flush_streams() -> None:
    """Flush stdout and stderr."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # may be None, closed, or a broken pipe
            stream.flush()


def _print(text: str, stream: TextIO | None) -> bool:
    """Print to a stream; whether that went well."""
    if stream is None:  # for which print takes stdout
        return False
    try:
        print(text, end="", file=stream, flush=True)
    except Exception:  # closed, replaced, or interrupted by ourselves in the middle of a write
        return False
    return True


def _write(text: str) -> None:
    """Write to the descriptor, past Python's streams."""
    data = text.encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(_STDERR, data) :]


def _is_heard(stream: TextIO | None) -> bool:
    """Whether what is printed there goes where descriptor 2 leads, or that leads nowhere."""
    try:
        stderr = os.fstat(_STDERR)
    except OSError:
        return True
    try:
        return stream is not None and os.path.samestat(os.fstat(stream.fileno()), stderr)
    except Exception:  # a string, a user's own class, closed
        return False


def _swallowed(stream: TextIO | None) -> str:
    """What a string in the place of a stream holds."""
    try:
        text = stream.getvalue()  # type: ignore[union-attr]  # of StringIO and the like
    except Exception:
        return ""
    return text if isinstance(text, str) else ""
