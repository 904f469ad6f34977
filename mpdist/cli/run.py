"""Run: start a job, hear of every rank, end it as a whole.

`mpdist run` listens on a TCP port and starts mpiexec, which starts a warden per
rank (warden.py); address and secret travel in the variable MPDIST_RUN. TCP,
because it works on one host (127.0.0.1 only) and on many alike, needs no file,
and tells both sides at once when the other is gone. Each warden keeps its
connection for life, so a rank that can't report is noticed at the start, not
after a night of computing. What follows from the reports is decided in job.py.

The job ends in steps, each with a deadline, in less than 5 s together: wardens
are told to stop and kill their ranks; mpiexec, left without ranks, ends (else
SIGTERM, then SIGKILL). Ctrl-C goes to the ranks through the wardens, not through
mpiexec, so that `finally` blocks run under every launcher; mpiexec is therefore
in a session of its own, and a terminal is not passed on as stdin.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import re
import resource
import secrets
import selectors
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpdist.cli import warden
from mpdist.cli.hosts import parse, require_room
from mpdist.cli.job import Job, Rank, Verdict
from mpdist.cli.launcher import (
    Kind,
    Launcher,
    Placement,
    core_count,
    exported_variables,
    find_launcher,
    inspect_launcher,
    is_bound,
    is_local,
    launch_command,
    launch_variables,
)
from mpdist.cli.segments import own_segments
from mpdist.cli.torch_variables import common_variables
from mpdist.errors import UsageError
from mpdist.transport.facts import RANK_VARIABLES
from mpdist.transport.start_up import missing_home

# After a signal ranks have warden.ENDING_SECONDS to end by themselves; then everything is stopped.
INTERRUPT_SECONDS = warden.ENDING_SECONDS + 0.3
# A rank that has explained its failure ends the job by itself (MPI_Abort); if that hangs, we do.
TOLD_SECONDS = 3.0
# The launcher is killing the job: the first cause may still be on its way to us.
LOST_SECONDS = 0.3
# The same where a rank on one of several hosts may have ended because one on another host has.
VICTIM_SECONDS = 0.2
# The start of mpdist waits for a rank that has left: those that start it may yet tell of something else.
ABSENT_SECONDS = 1.0
# mpiexec, from `stop` to SIGTERM, and from there to SIGKILL.
LAUNCHER_SECONDS = 1.2
TERM_SECONDS = 0.6
# Wardens, after the end of mpiexec.
DRAIN_SECONDS = 1.0

_INTERPRETER = re.compile(r"python[\d.]*")

SPARE_FILES = 64
SIOCGIFADDR = 0x8915


def run(options: argparse.Namespace) -> int:
    """Carry out `mpdist run`; returns the job's exit status."""
    launcher = _choose_launcher(options)
    place = Placement(
        ranks=options.ranks,
        cores=core_count(),
        is_root=os.geteuid() == 0,
        hostfile=options.hostfile,
        extra=options.launcher_arg,
        is_local=is_local(options.hostfile, options.launcher_arg, os.environ),
        is_bound=is_bound(options.launcher_arg, os.environ),
    )
    program = rank_program(options, launcher.kind)
    hosts = _read_hosts(options.hostfile) if options.hostfile else []
    if options.hostfile and launcher.kind is not Kind.OTHER:
        require_room(options.hostfile, parse(hosts), place.ranks, launcher.kind, place.extra, os.environ)
    common = common_variables(place.ranks, hosts, os.environ, is_local=place.is_local)
    variables = launch_variables(launcher.kind, place) | common
    if launcher.kind is Kind.OPENMPI:
        variables |= missing_home(os.environ)
    exported = [] if place.is_local else [*exported_variables({**os.environ, warden.RUN_VARIABLE: ""}), *common]
    command = launch_command(launcher, place, exported, program)
    if options.verbose or options.dry_run:
        words = [*(f"{name}={value}" for name, value in variables.items()), *command]
        print(f"mpdist: {launcher.version}: {shlex.join(words)}", file=sys.stderr, flush=True)
    if options.dry_run:
        return 0
    with own_segments(launcher.kind, os.environ, is_local=place.is_local) as segments:
        verdict = Supervisor(options.ranks, place.is_local).run(command, variables | segments)
    for line in verdict.lines:
        print(line, file=sys.stderr, flush=True)
    return verdict.status


def _choose_launcher(options: argparse.Namespace) -> Launcher:
    if options.mpiexec:
        return inspect_launcher(options.mpiexec)
    return find_launcher(None if options.mpi == "auto" else Kind(options.mpi))


def _read_hosts(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"mpdist run: the host file {path!r} cannot be read: {error}") from error


def rank_program(options: argparse.Namespace, kind: Kind) -> list[str]:
    """What the launcher starts: a warden that starts the user's program.

    Raises:
        UsageError: there is no such script.
    """
    names = [RANK_VARIABLES[kind.value]] if kind.value in RANK_VARIABLES else list(RANK_VARIABLES.values())
    ranks = ",".join(name.rank for name in names)
    style = "tag" if options.tag_output else "plain"
    script = [warden.with_colon(word) for word in _script(options)]
    return [sys.executable, "-I", "-S", warden.__file__, ranks, style, sys.executable, *script]


def _script(options: argparse.Namespace) -> list[str]:
    words = [word for i, word in enumerate(options.program) if i or word != "--"]
    if not words:
        raise UsageError("mpdist run: no program; give a script and its arguments, or -m module")
    if options.module:
        return ["-m", *words]
    if _INTERPRETER.fullmatch(os.path.basename(words[0])):
        raise UsageError(f"mpdist run: it starts Python itself: leave {words[0]!r} out")
    if not options.hostfile and not os.path.exists(words[0]):
        raise UsageError(f"mpdist run: no script {words[0]!r} here; give a Python script, or -m module")
    return words


@dataclass
class Connection:
    """One warden's line to us."""

    sock: socket.socket
    rest: bytes = b""
    is_trusted: bool = False
    rank: Rank | None = None

    def read_lines(self) -> list[str] | None:
        """Whole lines that have come; None when the warden is gone."""
        try:
            data = self.sock.recv(65536)
        except OSError:
            return None
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines] if data else None

    def send(self, line: str) -> None:
        """Send a line; whether the warden is gone shows when reading."""
        try:
            self.sock.sendall(f"{line}\n".encode())
        except OSError:
            return


@dataclass
class Deadlines:
    """When to take which step of ending the job, in time.monotonic()."""

    stop: float = float("inf")
    terminate: float = float("inf")
    kill: float = float("inf")
    is_stopping: bool = False

    def stop_within(self, seconds: float) -> None:
        """Stop the job soon, if it is not being stopped already."""
        if not self.is_stopping:
            self.stop = min(self.stop, time.monotonic() + seconds)

    def patience(self) -> float | None:
        """Seconds until the next step; None if none is due."""
        first = min(self.stop, self.terminate, self.kill)
        return None if first == float("inf") else max(0.0, first - time.monotonic())


@dataclass
class Supervisor:
    """Owner of mpiexec and of the wardens' connections, for one job of `size` ranks."""

    size: int
    is_local: bool
    job: Job = field(init=False)
    name: str = field(init=False)
    secret: str = field(init=False)
    connections: list[Connection] = field(default_factory=list)
    deadlines: Deadlines = field(default_factory=Deadlines)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def __post_init__(self) -> None:
        self.job = Job(self.size)
        self.name = f"mpdist-{secrets.token_hex(8)}"
        self.secret = secrets.token_hex(16)

    def run(self, command: Sequence[str], variables: dict[str, str]) -> Verdict:
        """Run the job to its end."""
        allow_files(self.size + SPARE_FILES)
        with self._listen() as listener:
            self.selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
            with self._caught_signals():
                environ = {**os.environ, **variables, warden.RUN_VARIABLE: self._contact(listener)}
                self.launcher = start_launcher(command, environ)
                while self.launcher.poll() is None:
                    self._turn(self.deadlines.patience())
                    self._take_due_steps()
                self._drain()
        return self.job.verdict(self.launcher.returncode)

    def _listen(self) -> socket.socket:
        listener = socket.create_server(("127.0.0.1" if self.is_local else "", 0), backlog=min(self.size, 4096))
        listener.setblocking(False)
        return listener

    def _contact(self, listener: socket.socket) -> str:
        port = listener.getsockname()[1]
        hosts = ["127.0.0.1"] if self.is_local else [*own_addresses(), "127.0.0.1"]
        return " ".join([self.name, self.secret, *(f"{host}:{port}" for host in hosts)])

    @contextlib.contextmanager
    def _caught_signals(self) -> Iterator[None]:
        """Signals, SIGCHLD of mpiexec among them, arrive as bytes on a socket pair."""
        self.wakeup, write = socket.socketpair()
        with self.wakeup, write:
            self.wakeup.setblocking(False)
            write.setblocking(False)
            signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
            for number in (*warden.heard_signals(), signal.SIGCHLD):
                signal.signal(number, lambda *_: None)
            self.selector.register(self.wakeup, selectors.EVENT_READ, self._on_signals)
            try:
                yield
            finally:
                signal.set_wakeup_fd(-1)

    def _turn(self, seconds: float | None) -> None:
        for key, _ in self.selector.select(seconds):
            action: Callable[[], None] = key.data
            action()

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        sock.setblocking(True)
        connection = Connection(sock)
        self.connections.append(connection)
        connection.send(self.name)
        self.selector.register(sock, selectors.EVENT_READ, lambda: self._hear(connection))

    def _hear(self, connection: Connection) -> None:
        lines = connection.read_lines()
        if lines is None:
            self._lose(connection)
            return
        for line in lines:
            if not connection.is_trusted and line != self.secret:
                self._lose(connection)
                return
            if connection.is_trusted:
                self._on_line(connection, line.split())
            connection.is_trusted = True

    def _lose(self, connection: Connection) -> None:
        self.selector.unregister(connection.sock)
        connection.sock.close()
        self.connections.remove(connection)
        if connection.rank and connection.rank.wait_status is None:
            self.deadlines.stop_within(LOST_SECONDS)

    def _on_line(self, connection: Connection, words: Sequence[str]) -> None:
        match words:
            case ["hello", number, pid, host]:
                connection.rank = self.job.started(int(number), int(pid), host)
                if self.deadlines.is_stopping:
                    connection.send("stop")
            case ["record", word] if connection.rank:
                self.job.recorded(connection.rank, word)
                if word == "told":
                    self.deadlines.stop_within(TOLD_SECONDS)
                self._look_for_absent()
            case ["end", status, whose] if connection.rank:
                self._on_end(connection.rank, int(status), by_itself=whose == "itself")

    def _on_end(self, rank: Rank, wait_status: int, by_itself: bool) -> None:
        self.job.ended(rank, wait_status, by_itself)
        if self.job.is_over and any(not rank.is_good for rank in self.job.ranks.values()):
            self.deadlines.stop_within(0)
        elif not rank.is_good and self.job.interrupted_by is None:
            at_once = VICTIM_SECONDS if rank.may_be_a_victim and not self.is_local else 0.0
            self.deadlines.stop_within(at_once if by_itself else LOST_SECONDS)
        self._look_for_absent()

    def _look_for_absent(self) -> None:
        if self.job.blame_absent():
            self.deadlines.stop_within(ABSENT_SECONDS)

    def _on_signals(self) -> None:
        for number in self.wakeup.recv(4096):
            if number not in warden.FORWARDED:
                continue
            if number in warden.ENDING:
                self.deadlines.stop_within(0 if self.job.interrupted_by else INTERRUPT_SECONDS)
                self.job.interrupted_by = number
            self._broadcast(f"signal {number}")

    def _take_due_steps(self) -> None:
        now = time.monotonic()
        if now >= self.deadlines.stop:
            self._broadcast_stop()
            self.deadlines = Deadlines(terminate=now + LAUNCHER_SECONDS, is_stopping=True)
        if now >= self.deadlines.terminate:
            self.launcher.terminate()
            self.deadlines = Deadlines(kill=now + TERM_SECONDS, is_stopping=True)
        if now >= self.deadlines.kill:
            self.launcher.kill()
            self.deadlines.kill = float("inf")

    def _drain(self) -> None:
        """After the end of mpiexec: hear what was still on its way, and leave no warden behind."""
        self._broadcast_stop()
        end = time.monotonic() + DRAIN_SECONDS
        while self.connections and time.monotonic() < end:
            self._turn(max(0.0, end - time.monotonic()))
        for connection in list(self.connections):
            self._lose(connection)

    def _broadcast_stop(self) -> None:
        """Stop every rank; the warden of the one that caused it leaves first."""
        for connection in sorted(self.connections, key=lambda c: c.rank is not self.job.cause):
            connection.send("stop")

    def _broadcast(self, line: str) -> None:
        for connection in self.connections:
            connection.send(line)


def start_launcher(command: Sequence[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start mpiexec in its own session; on Linux the kernel ends it if we are killed."""
    libc = ctypes.CDLL(None)

    def die_with_parent() -> None:
        if hasattr(libc, "prctl"):
            libc.prctl(warden.PR_SET_PDEATHSIG, int(signal.SIGTERM))

    stdin = subprocess.DEVNULL if os.isatty(0) else None
    return subprocess.Popen(command, env=environ, stdin=stdin, start_new_session=True, preexec_fn=die_with_parent)


def allow_files(count: int) -> None:
    """Raise the soft limit of open files where it is too low for `count`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


def own_addresses() -> list[str]:
    """IPv4 addresses of this host's interfaces, without the loopback."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            addresses.append(socket.inet_ntoa(reply[20:24]))
    return [address for address in addresses if not address.startswith("127.")]
