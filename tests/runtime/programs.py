"""Programs: run a script as a job, under the bare launcher or under `mpdist run`, to its end."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from cli.jobs import PROMISED_SECONDS, Ended, Job, heed, job_environ
from ranks.launch import mpiexec

SCRIPTS = Path(__file__).with_name("scripts")
FAILING = str(SCRIPTS / "failing.py")
ENDING = str(SCRIPTS / "ending.py")
CHILDREN = str(SCRIPTS / "children.py")

LAUNCHERS = ("bare", "mpdist")
IS_OPENMPI = "--oversubscribe" in mpiexec(1)

_SHARED_MEMORY = Path("/dev/shm")


class Program(Job):
    """A script that runs on some ranks; its processes carry a marker in their command lines."""

    def __init__(self, launcher: str, ranks: int, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        self.marker = f"marker-{uuid.uuid4().hex}"
        self.stdin = None
        self.out = ""
        run = [sys.executable, "-m", "mpdist", "run", "-n", str(ranks)]
        bare = [*mpiexec(ranks), sys.executable]
        self.process = subprocess.Popen(
            [*(run if launcher == "mpdist" else bare), *arguments, self.marker],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=job_environ() | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | dict(environ or {}),
            preexec_fn=heed,
        )  # fmt: skip
        self.since = time.monotonic()


@contextmanager
def program(launcher: str, ranks: int, *arguments: str, environ: Mapping[str, str] | None = None) -> Iterator[Program]:
    """A running job, with a folder for temporary files of its own; nothing may be left of it, in the end."""
    before = own_files(_SHARED_MEMORY)
    with tempfile.TemporaryDirectory(prefix="job-") as folder:
        started = Program(launcher, ranks, *arguments, environ={"TMPDIR": folder} | dict(environ or {}))
        try:
            yield started
            assert started.left_over() == []
            assert own_files(Path(folder)) == set()
            assert own_files(_SHARED_MEMORY) <= before
        finally:
            for process in started.processes():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            started.process.wait()
            for stream in (started.process.stdout, started.process.stderr):
                if stream:
                    stream.close()


def run(launcher: str, ranks: int, *arguments: str, environ: Mapping[str, str] | None = None) -> Ended:
    """Run a job to its end, whatever that is."""
    with program(launcher, ranks, *arguments, environ=environ) as running:
        return running.finish()


def fail(launcher: str, how: str, where: str, style: str, act: Callable[[Program], None] | None = None) -> Ended:
    """Run scripts/failing.py on three ranks to its end, which must come in time.

    Args:
        act: what is done to the job when all ranks are ready, instead of a failure of its own.
    """
    with program(launcher, 3, FAILING, how, where, style) as running:
        if how != "import":
            running.wait_ready(3)
        if act is not None:
            time.sleep(0.6)  # past the pause of the program, into the `try`
            running.act(lambda: act(running))
        ended = running.finish()
    if how != "import":
        assert ended.seconds < PROMISED_SECONDS
    return ended


def report(ended: Ended) -> str:
    """The one line in which mpdist names the cause; no output of Python comes after it."""
    lines = ended.err.splitlines()
    own = [place for place, line in enumerate(lines) if "mpdist: " in line]
    assert len(own) == 1, ended.err
    assert not re.search(r"^(Traceback|\w*Error\b|Exception ignored)", "\n".join(lines[own[0] + 1 :]), re.M), ended.err
    return lines[own[0]]


def own_files(folder: Path) -> set[str]:
    """Files there that bear mpdist's name."""
    return {str(path) for path in folder.glob("*mpdist*")}
