"""Cache: what a trial has shown, in a file for each installation in the user's cache folder.

A file that cannot be read, or is of another installation, is as good as none; one
that cannot be written is tried again by the next program.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from mpdist.transport.cuda_aware.table import Answer, Finding

# Of the file and of what the trial does: what an earlier one has shown does not count.
FORMAT = 1

# A trial that could not be made is made again after this time: a GPU may have been in use.
PROBLEM_SECONDS = 3600.0

LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Installation:
    """What the answers depend on.

    Attributes:
        library: path of the MPI library.
        nbytes, mtime_ns: of it.
        version: in its own words.
        device: name of the GPU, and version of its driver.
        settings: variables that steer MPI.
    """

    library: str
    nbytes: int
    mtime_ns: int
    version: str
    mpi4py: str
    device: str
    settings: Mapping[str, str]

    @classmethod
    def of(cls, library: str, version: str, mpi4py: str, device: str, settings: Mapping[str, str]) -> Installation:
        """That of a library, which is looked at; one that is not there has size 0."""
        try:
            stat = os.stat(library)
        except OSError:
            return cls(library, 0, 0, version, mpi4py, device, settings)
        return cls(library, stat.st_size, stat.st_mtime_ns, version, mpi4py, device, settings)


class Cache:
    """The file of one installation."""

    def __init__(self, installation: Installation, folder: Path | None = None) -> None:
        self._key = {"format": FORMAT, **asdict(installation)}
        digest = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()
        self.path = (folder or default_folder()) / f"cuda-aware-{digest[:20]}.json"

    def load(self) -> Finding | None:
        """What is kept; None if there is nothing."""
        try:
            kept = json.loads(self.path.read_text())
            if kept["installation"] != self._key or (kept["problem"] and time.time() > kept["at"] + PROBLEM_SECONDS):
                return None
            return Finding({str(op): Answer(answer) for op, answer in kept["answers"].items()}, str(kept["problem"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def store(self, finding: Finding) -> None:
        """Keep it; a reader sees the old file or the new one."""
        answers = {op: answer.value for op, answer in finding.answers.items()}
        kept = {"installation": self._key, "answers": answers, "problem": finding.problem, "at": time.time()}
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.stem)
            try:
                with open(descriptor, "w") as file:
                    file.write(json.dumps(kept, indent=2))
                os.replace(name, self.path)
            except BaseException:
                os.unlink(name)
                raise

    @contextlib.contextmanager
    def alone(self, is_over: threading.Event) -> Iterator[None]:
        """Inside, no other process of this user is, unless `is_over`; where files cannot be locked, others may be."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open(self.path.with_suffix(".lock"), "w"))
                _lock(file, is_over)
            yield


def _lock(file: TextIO, is_over: threading.Event) -> None:
    while not _locked(file) and not is_over.wait(LOOK_SECONDS):
        pass


def _locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def default_folder() -> Path:
    """`mpdist` in the user's cache folder; where there is no home, one in which nothing can be kept."""
    home = os.environ.get("XDG_CACHE_HOME")
    if home:
        return Path(home) / "mpdist"
    try:
        return Path.home() / ".cache" / "mpdist"
    except RuntimeError:
        return Path(os.devnull) / "mpdist"
