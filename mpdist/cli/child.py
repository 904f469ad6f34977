"""Child: a job that a command starts and waits for. What would end the command ends the job first.

The job is in a session of its own, as mpiexec is in `mpdist run`: a terminal sends ^C to the command alone,
which passes it on once; of a second one `mpdist run` would stop the job at once.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from mpdist.cli.warden import ENDING

SIGNALLED = 128
"""A shell's exit status of what a signal has ended, less its number."""


class Ended(Exception):
    """A signal ends this command; raised where that can clean up behind itself."""

    def __init__(self, number: int) -> None:
        self.status = SIGNALLED + number


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """In here signals that end a process raise Ended instead."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Ended(number)

    with handled_by(end):
        yield


def run_child(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run it to its end; returns its exit status.

    Raises:
        Ended: a signal has come meanwhile; the child has had it, too, and has ended.
    """
    process: subprocess.Popen[bytes] | None = None
    heard: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if process is not None:
            process.send_signal(number)

    with handled_by(pass_on):
        process = subprocess.Popen(command, env=environ, start_new_session=True)
        for number in heard:
            process.send_signal(number)
        status = process.wait()
    if heard:
        raise Ended(heard[0])
    return status


@contextlib.contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Signals that end a process go to the handler, but those that this one was started to ignore."""
    before = {number: signal.getsignal(number) for number in ENDING}
    caught = [number for number, its_handler in before.items() if its_handler is not signal.SIG_IGN]
    for number in caught:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number])
