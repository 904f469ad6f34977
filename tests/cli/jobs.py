"""Jobs: start `mpdist run` as a user would, and find every process that it has left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PROMISED_SECONDS = 5.0
START_SECONDS = 30.0
FAILING_RANK = str(Path(__file__).with_name("failing_rank.py"))
ROOT = str(Path(__file__).parents[2])


def job_environ() -> dict[str, str]:
    """The environment, with this mpdist."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])}


def run_mpdist(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command `mpdist` to its end."""
    command = [sys.executable, "-m", "mpdist", *arguments]
    return subprocess.run(
        command, env=job_environ(), capture_output=True, text=True, timeout=START_SECONDS, check=False
    )


def heed(ignored: Collection[signal.Signals] = ()) -> None:
    """In a child, before it executes its program: of the signals that end jobs these are ignored, and no others.

    A shell without job control ignores SIGINT in all that it starts in the background, tests included.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)


@dataclass
class Ended:
    """A job that is over.

    Attributes:
        seconds: from the moment when all ranks were ready, or from the action on the job, to its end.
    """

    status: int
    out: str
    err: str
    seconds: float

    @property
    def last_line(self) -> str:
        return self.err.strip().splitlines()[-1].strip()


class Job:
    """A running `mpdist run`; its processes carry a marker in their command lines."""

    def __init__(self, *arguments: str, stdin: str | None = None, ignored: Collection[signal.Signals] = ()) -> None:
        self.marker = f"marker-{uuid.uuid4().hex}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mpdist", "run", *arguments, self.marker],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=job_environ(),
            preexec_fn=lambda: heed(ignored),
        )  # fmt: skip
        self.stdin = stdin
        self.out = ""
        self.since = time.monotonic()

    def processes(self) -> list[psutil.Process]:
        """All processes of this job that still run, `mpdist run` included."""
        found = []
        for process in psutil.process_iter():
            try:
                if self.marker in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def wait_ready(self, ranks: int) -> None:
        """Until every rank has said that it is ready; the clock of `finish` starts here."""
        assert self.process.stdout
        while self.out.count("is ready") < ranks:
            line = self.process.stdout.readline()
            assert line, f"the job ended before it was ready: {self.finish()}"
            self.out += line
        self.since = time.monotonic()

    def act(self, action: Callable[[], None]) -> None:
        """Do something to the job; the clock of `finish` starts here."""
        self.since = time.monotonic()
        action()

    def finish(self, timeout: float = START_SECONDS) -> Ended:
        """Wait for the end of `mpdist run`."""
        out, err = self.process.communicate(self.stdin, timeout=timeout)
        seconds = time.monotonic() - self.since
        return Ended(self.process.returncode, self.out + out, err, seconds)

    def left_over(self) -> list[str]:
        """Command lines of what still runs when the promised time is over."""
        while self.processes() and time.monotonic() < self.since + PROMISED_SECONDS:
            time.sleep(0.05)
        return [" ".join(process.cmdline()) for process in self.processes()]


@contextmanager
def job(*arguments: str, stdin: str | None = None, ignored: Collection[signal.Signals] = ()) -> Iterator[Job]:
    """A job, of which nothing is left at the end of the block."""
    started = Job(*arguments, stdin=stdin, ignored=ignored)
    try:
        yield started
    finally:
        for process in started.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        started.process.wait()
        for stream in (started.process.stdin, started.process.stdout, started.process.stderr):
            if stream:
                stream.close()
