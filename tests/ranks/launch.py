"""Launch: one `mpiexec` of inner pytests, and a line of JSON to and from each rank.

The ranks connect to a Unix socket, so that the harness itself needs no MPI: it
works before MPI starts, after it broke, and notices at once when a rank dies.
Everything that a launch writes is in one temporary folder, removed at the end.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import psutil

from mpdist.cli.launcher import Kind
from mpdist.cli.segments import own_segments

Message = Mapping[str, object]

SOCKET_NAME = "s"
TESTS_NAME = "tests.json"
LOG_NAME = "launcher.log"

# A launcher that ended shows itself in no selector.
POLL_SECONDS = 0.1
# The launcher may clean up (session folders, shared memory) before it is killed.
TERMINATE_SECONDS = 2.0
# A rank reads the files of its stack for the answer: on a busy machine that has taken more than a second.
WHERE_SECONDS = 5.0

# At SIGUSR2 faulthandler writes the stacks of a hundred threads at the most, the main thread's last; at this one it
# writes that alone.
MAIN_STACK_SIGNAL = signal.SIGRTMIN
STACK_SECONDS = 0.05
LOG_TAIL_LINES = 40

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


class Launch:
    """A running job.

    Attributes:
        ranks: how many.
        tests: ids of the tests that it can be told to run.
        died: ranks that are gone, in the order in which that was noticed.
    """

    def __init__(self, tests: Sequence[str], ranks: int, arguments: Sequence[str], shows_output: bool) -> None:
        """Start `python -m pytest ARGUMENTS` on every rank."""
        self.ranks = ranks
        self.tests = list(tests)
        self.died: list[int] = []
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        self._processes: dict[int, psutil.Process] = {}
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self._folder / SOCKET_NAME))
        self._server.listen(ranks)
        self._selector.register(self._server, selectors.EVENT_READ)
        (self._folder / TESTS_NAME).write_text(json.dumps(self.tests))
        inner = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", "pytest"]
        with open(self._folder / LOG_NAME, "wb") as log:
            self._launcher = psutil.Popen(
                [*mpiexec(ranks), *inner, "--ranks-inner", str(self._folder), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=None if shows_output else log,
                stderr=None if shows_output else log,
                env=_environment(ranks, self._folder),
                start_new_session=True,
            )

    def __repr__(self) -> str:
        return f"<Launch of {self.ranks} ranks, {len(self._connections)} connected, died: {self.died}>"

    @property
    def has_ended(self) -> bool:
        """Whether the launcher process ended."""
        return self._launcher.poll() is not None

    def send(self, message: Message) -> None:
        """Tell all ranks that live."""
        for connection in self._connections.values():
            connection.send(message)

    def messages(self, until: float) -> Iterator[tuple[int, Message]]:
        """Rank and message, as they come, until that `time.monotonic()` or the end of the job."""
        while True:
            ended = self.has_ended
            timeout = 0.0 if ended else min(POLL_SECONDS, until - time.monotonic())
            ready = self._selector.select(max(timeout, 0.0))
            for key, _ in ready:
                yield from self._read(key.data)
            if time.monotonic() >= until or (ended and not ready):
                return

    def locate(self, ranks: Iterable[int]) -> dict[int, Message]:
        """Where these ranks are: their Python stacks, tasks and pending operations, as far as they can tell."""
        missing = {rank for rank in ranks if rank in self._processes}
        for number in (MAIN_STACK_SIGNAL, signal.SIGUSR2):
            for rank in missing:
                with contextlib.suppress(psutil.Error):
                    self._processes[rank].send_signal(number)
            time.sleep(STACK_SECONDS)  # faulthandler does nothing at a signal that comes while it writes
        found: dict[int, Message] = {}
        for rank, message in self.messages(time.monotonic() + WHERE_SECONDS):
            if message["event"] == "where":
                found[rank] = message
            if missing <= found.keys():
                break
        return {rank: {"stack": self._native_stack(rank)} for rank in missing} | found

    def wait(self, seconds: float) -> int | None:
        """Exit status of the launcher; None if it still runs after that time."""
        try:
            return int(self._launcher.wait(seconds))
        except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
            return None

    def output(self) -> str:
        """The last lines of what the launcher and the ranks printed outside of tests."""
        text = (self._folder / LOG_NAME).read_text(errors="replace")
        return "\n".join(text.rstrip().splitlines()[-LOG_TAIL_LINES:])

    def close(self) -> None:
        """Kill what still runs, also what the ranks started, and remove the folder."""
        processes = self._all_processes()
        if not self.has_ended:
            self._launcher.terminate()
            self.wait(TERMINATE_SECONDS)
        processes |= self._all_processes()
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._launcher.pid, signal.SIGKILL)
        psutil.wait_procs(processes, timeout=TERMINATE_SECONDS)
        self._launcher.wait()
        for connection in self._connections.values():
            connection.close()
        self._selector.close()
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _all_processes(self) -> set[psutil.Process]:
        """The launcher's descendants, and the ranks' (an orphan is nobody's descendant)."""
        found: set[psutil.Process] = set()
        for process in [self._launcher, *self._processes.values()]:
            with contextlib.suppress(psutil.Error):
                found |= {process, *process.children(recursive=True)}
        return found - {self._launcher}

    def _read(self, connection: _Connection | None) -> Iterator[tuple[int, Message]]:
        if connection is None:
            client, _ = self._server.accept()
            self._selector.register(client, selectors.EVENT_READ, _Connection(client))
            return
        messages = connection.receive()
        if messages is None:
            self._selector.unregister(connection.socket)
            if connection.rank is not None:
                self.died.append(connection.rank)
            return
        for message in messages:
            if message["event"] == "hello":
                self._introduce(connection, message)
            if connection.rank is not None:
                yield connection.rank, message

    def _introduce(self, connection: _Connection, message: Message) -> None:
        rank, pid = int(str(message["rank"])), int(str(message["pid"]))
        connection.rank = rank
        self._connections[rank] = connection
        with contextlib.suppress(psutil.NoSuchProcess):
            self._processes[rank] = psutil.Process(pid)

    def _native_stack(self, rank: int) -> str:
        """What faulthandler wrote: it works while the rank is inside C code."""
        path = stack_path(self._folder, rank)
        return path.read_text() if path.exists() else ""


class _Connection:
    """The socket to one rank: JSON objects, one per line."""

    def __init__(self, client: socket.socket) -> None:
        self.socket = client
        self.rank: int | None = None
        self._rest = b""

    def send(self, message: Message) -> None:
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """The messages that are complete; None if the other side is gone."""
        try:
            data = self.socket.recv(1 << 20)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self.socket.close()


def stack_path(folder: Path, rank: int) -> Path:
    """The file into which faulthandler writes a rank's stack."""
    return folder / f"stack.{rank}"


def mpiexec(ranks: int) -> list[str]:
    """The command that starts `ranks` processes: the environment's own mpiexec, and what that MPI needs."""
    path, is_openmpi = _find_mpiexec()
    if not is_openmpi:
        return [path, "-n", str(ranks)]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [path, *root, "--oversubscribe", "--bind-to", "none", *_segments(), "-n", str(ranks)]


@lru_cache
def _segments() -> tuple[str, ...]:
    """Options by which the jobs of this process meet no other's shared memory, see mpdist/cli/segments.py."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    variables = stack.enter_context(own_segments(Kind.OPENMPI, os.environ, is_local=True))
    return tuple(word for folder in variables.values() for word in ("--mca", "btl_sm_backing_directory", folder))


@lru_cache
def _find_mpiexec() -> tuple[str, bool]:
    """Path of mpiexec, and whether it is Open MPI's."""
    path = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if path is None:
        raise FileNotFoundError(f"no mpiexec beside {sys.executable} or on PATH: pip install 'mpdist[mpich]'")
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True)
    return path, "Open MPI" in done.stdout


def _environment(ranks: int, folder: Path) -> dict[str, str]:
    """Variables of the ranks."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # Ranks share the cores: a pool of threads in each only gets in the way.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if ranks > len(os.sched_getaffinity(0)):
        environ["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return threads | environ | {"TMPDIR": str(folder)}
