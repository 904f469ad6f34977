"""Warden: the small parent process of one rank, which sees the end that a rank can't report itself.

    mpdist run -> mpiexec -> (its daemons) -> warden -> rank

The launcher starts the warden in the place of the rank. It forks, and the child
executes the user's program; MPI's variables and file descriptors pass through.
The warden never touches MPI. It is run by file name with `-I -S`, so it imports
nothing of mpdist: a few milliseconds and 10 MB per rank.

* A TCP connection to `mpdist run` carries lines: `hello`, the rank's records
  (mpdist/runtime/completion.py) and its `end` upward; `signal N` and `stop` downward.
  If the connection is lost, `mpdist run` is gone, and the rank is killed.
* A rank that failed leaves its warden waiting for `stop`: meanwhile the launcher
  has not noticed anything (hydra's PMI pipe is still open here), so `mpdist run`
  hears the first cause before the launcher kills the others.
* Of a rank that ended well what its children still write is passed on until they
  close it, where lines are tagged: without tags the launcher waits for it as well.
* The rank is a process group of its own: signals from the launcher reach it once,
  through the warden, and killing the group takes the rank's children along. If the
  warden is killed the kernel kills the rank (PR_SET_PDEATHSIG, Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence

RUN_VARIABLE = "MPDIST_RUN"  # set by `mpdist run`, taken away from the rank: job, secret, addresses
FOLDER_VARIABLE = "MPDIST_FOLDER"  # the same: a folder that nobody needs when the job is over
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

CONNECT_SECONDS = 5.0
# A rank inside MPI never runs its Python signal handler: after this it is killed. Below the 5 s that are promised.
ENDING_SECONDS = 2.0
# The failed rank's warden leaves first, so that the launcher's own message names it; the others follow.
STOPPED_SECONDS = 0.4
# `mpdist run` answers a failure at once. This only ends the wait for one that hangs.
VERDICT_SECONDS = 10.0
# How often to look whether the launcher's daemon, our parent, still lives.
PARENT_SECONDS = 0.5

# Of a line that does not end this much is kept to be written whole; what is longer may be cut by other ranks' lines.
LINE_BYTES = 64 * 1024

PR_SET_PDEATHSIG = 1

# By which launchers tell a process its place on its host.
LOCAL_VARIABLES = (
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)


def main(arguments: Sequence[str]) -> int:
    """Run one rank. Arguments: the variables that may hold its number (comma separated), `tag` or `plain`, command."""
    variables, style, *command = arguments
    rank = next((os.environ[name] for name in variables.split(",") if name in os.environ), "")
    if not rank.isdigit():
        print(f"mpdist: this launcher does not number its processes: none of {variables} is set", file=sys.stderr)
        return 1
    try:
        control = connect(os.environ.pop(RUN_VARIABLE, ""))
    except OSError as error:
        print(f"mpdist: rank {rank} on {socket.gethostname()} can't reach `mpdist run`: {error}", file=sys.stderr)
        return 1
    return Warden(rank, control, tagged=style == "tag").watch([without_colon(word) for word in command])


def with_colon(word: str) -> str:
    """A word as it is passed through the launcher, for which a lone colon separates programs: `:` as `::`."""
    return f"{word}:" if is_colons(word) else word


def without_colon(word: str) -> str:
    """The word as it was before `with_colon`."""
    return word[1:] if is_colons(word) else word


def is_colons(word: str) -> bool:
    """Whether there is nothing else in it."""
    return bool(word) and not word.strip(":")


def connect(contact: str) -> socket.socket:
    """Connect to `mpdist run` at the first address that answers with the job's name.

    Raises:
        OSError: none does; the text says which were tried.
    """
    job, secret, *addresses = contact.split() or ["", ""]
    failures = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            control = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
        except OSError as error:
            failures.append(f"{address} ({error})")
            continue
        if is_greeted(control, job):
            control.settimeout(None)
            control.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            control.sendall(f"{secret}\n".encode())
            return control
        control.close()
        failures.append(f"{address} (not this job)")
    raise OSError(f"tried {', '.join(failures) or 'nothing: it was not started by `mpdist run`'}")


def is_greeted(control: socket.socket, job: str) -> bool:
    """Whether the other side is the `mpdist run` of this job: it speaks first, with the job's name."""
    try:
        return control.recv(64) == f"{job}\n".encode()
    except OSError:
        return False


def heard_signals() -> list[signal.Signals]:
    """Those to forward, without the ones that this process was started to ignore: by `nohup`, or a script's `&`."""
    return [number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN]


def exit_status(wait_status: int) -> int:
    """What a shell would show: the exit code, or 128 + signal."""
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def is_success(wait_status: int, records: Sequence[str]) -> bool:
    """Status 0 counts; once mpdist was started, only with the agreement of all ranks."""
    return wait_status == 0 and ("done" in records or "used" not in records)


def rank_variables(rank: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What scripts written for `torchrun` read, of this rank; see torch_variables.py for the rest."""
    found = {"RANK": rank}
    for local_rank, local_size in LOCAL_VARIABLES:
        if local_rank in environ and local_size in environ:
            found |= {"LOCAL_RANK": environ[local_rank], "LOCAL_WORLD_SIZE": environ[local_size]}
    return found


def say_goodbye_to_hydra() -> None:
    """Sign off in the dead rank's name (PMI-1).

    Else hydra kills the other wardens, which are about to leave anyway, and
    reports the first of them as the one that went wrong.
    """
    with contextlib.suppress(KeyError, ValueError, OSError):
        os.write(int(os.environ["PMI_FD"]), b"cmd=finalize\n")


class Warden:
    """One rank's parent."""

    def __init__(self, rank: str, control: socket.socket, tagged: bool) -> None:
        self.rank = rank
        self.control = control
        self.tagged = tagged
        self.folder = os.environ.pop(FOLDER_VARIABLE, "")
        self.parent = os.getppid()
        self.pid = 0
        self.wait_status: int | None = None
        self.records: list[str] = []
        self.outputs: dict[int, LineTagger] = {}
        self.was_stopped = False  # the end of the rank is somebody else's doing
        self.linger = VERDICT_SECONDS
        self.kill_at = float("inf")
        self.leave_at = float("inf")

    def watch(self, command: Sequence[str]) -> int:
        """Start the rank, stay until it has ended, and return the exit status that the launcher shall see."""
        wakeup = self._catch_signals()
        records = self._start(command)
        self._tell(f"hello {self.rank} {self.pid} {socket.gethostname()}")
        poll = select.poll()
        for fd in (self.control.fileno(), wakeup, records, *self.outputs):
            poll.register(fd, select.POLLIN)
        while not self._has_finished():
            for fd, _ in poll.poll(self._patience() * 1000):
                if fd == self.control.fileno():
                    self._obey()
                elif fd == wakeup:
                    self._on_signals(os.read(wakeup, 256))
                elif not self._relay(fd, records):
                    poll.unregister(fd)
                    self.outputs.pop(fd, None)
            self._look_at_the_clock()
            self._reap(records)
        return self._status()

    def _catch_signals(self) -> int:
        """Turn signals into bytes on a pipe; returns its read end."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (*heard_signals(), signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        return read

    def _start(self, command: Sequence[str]) -> int:
        """Fork the rank; returns the read end of its record pipe."""
        records, records_out = os.pipe()
        streams = [(stream, *os.pipe()) for stream in (1, 2)] if self.tagged else []
        libc = ctypes.CDLL(None)
        self.pid = os.fork()
        if self.pid == 0:
            self._become_rank(command, records_out, [(stream, write) for stream, _, write in streams], libc)
        with contextlib.suppress(PermissionError):  # it has done so itself, and executes the program already
            os.setpgid(self.pid, self.pid)
        os.close(records_out)
        for stream, read, write in streams:
            os.close(write)
            self.outputs[read] = LineTagger(self.rank, stream)
        for fd in (records, *self.outputs):
            os.set_blocking(fd, False)
        return records

    def _become_rank(
        self, command: Sequence[str], records: int, streams: Sequence[tuple[int, int]], libc: ctypes.CDLL
    ) -> None:
        """In the child: execute the program; never returns."""
        try:
            os.setpgid(0, 0)
            if hasattr(libc, "prctl"):
                libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
            for stream, fd in streams:
                os.dup2(fd, stream)
            os.set_inheritable(records, True)
            os.environ["MPDIST_COMPLETION_FD"] = str(records)
            os.environ["MPDIST_COMPLETION_PID"] = str(os.getpid())
            os.environ.update(rank_variables(self.rank, os.environ))
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as it was before this interpreter ignored it
            os.execvp(command[0], list(command))
        except BaseException as error:
            os.write(2, f"mpdist: rank {self.rank} can't execute {command[0]}: {error}\n".encode())
            os._exit(127)

    def _has_finished(self) -> bool:
        if self.wait_status is None:
            return False
        is_good = is_success(self.wait_status, self.records)
        return (is_good and not self.outputs) or time.monotonic() >= self.leave_at

    def _status(self) -> int:
        assert self.wait_status is not None
        if is_success(self.wait_status, self.records):
            return 0
        say_goodbye_to_hydra()
        return exit_status(self.wait_status) or 1

    def _patience(self) -> float:
        """Seconds until the clock has to be looked at."""
        return max(0.0, min(PARENT_SECONDS, self.kill_at - time.monotonic(), self.leave_at - time.monotonic()))

    def _look_at_the_clock(self) -> None:
        if self.wait_status is None and os.getppid() != self.parent:
            self._stop()
        if self.wait_status is None and time.monotonic() >= self.kill_at:
            self._kill()

    def _obey(self) -> None:
        """Do what `mpdist run` says; its absence means stop."""
        try:
            text = self.control.recv(4096).decode()
        except OSError:
            text = ""
        for line in text.splitlines():
            if line.startswith("signal "):
                self._forward(int(line.split()[1]))
        if not text or "stop" in text.splitlines():
            self._stop()
        if not text and self.folder:
            import shutil  # seldom needed, and takes long

            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = ""

    def _stop(self) -> None:
        """Kill the rank; if it has already ended, leave."""
        if self.wait_status is not None:
            self.leave_at = 0.0
            return
        self.was_stopped = True
        self.linger = STOPPED_SECONDS
        self._kill()

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in FORWARDED:
                self._forward(number)

    def _forward(self, number: int) -> None:
        """Pass a signal on; one that ends programs gives the rank some time for it."""
        if self.wait_status is not None:
            self.leave_at = 0.0 if number in ENDING else self.leave_at
            return
        if number in ENDING:
            self.was_stopped = True
            self.kill_at = min(self.kill_at, time.monotonic() + ENDING_SECONDS)
        os.kill(self.pid, number)

    def _kill(self) -> None:
        """Kill the rank and the children in its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the second of zombies
            os.killpg(self.pid, signal.SIGKILL)

    def _relay(self, fd: int, records: int) -> bool:
        """Handle what the rank wrote; False at the end of the pipe."""
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return True
        if fd == records:
            words = [data[i : i + 4].decode() for i in range(0, len(data), 4)]
            self.records += words
            for word in words:
                self._tell(f"record {word}")
        elif data:
            self.outputs[fd].write(data)
        else:
            self.outputs[fd].flush()
        return bool(data)

    def _reap(self, records: int) -> None:
        """Notice the end of the rank, take what it wrote last, and report."""
        if self.wait_status is not None:
            return
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            return
        self._relay(records, records)
        for fd, output in self.outputs.items():
            while select.select([fd], [], [], 0)[0] and self._relay(fd, records):
                pass
            output.flush()
        self.wait_status = status
        if not is_success(status, self.records):
            self._kill()  # what the rank has left behind
            self.leave_at = time.monotonic() + self.linger
        self._tell(f"end {status} {'stopped' if self.was_stopped else 'itself'}")

    def _tell(self, line: str) -> None:
        """Send a line to `mpdist run`; if it is gone, `_obey` will see that too."""
        with contextlib.suppress(OSError):
            self.control.sendall(f"{line}\n".encode())


class LineTagger:
    """Writes whole lines with the rank in front; a carriage return ends a line too, as those of progress bars do."""

    def __init__(self, rank: str, fd: int) -> None:
        self.tag = f"[{rank}] ".encode()
        self.fd = fd
        self.parts: list[bytes] = []  # of the line that has not ended, its tag among them
        self.nbytes = 0  # in them
        self.is_inside = False  # a line has begun: what comes belongs to it
        self.is_returned = False  # the last line ended with a carriage return, whose newline may come yet

    def write(self, data: bytes) -> None:
        whole = 0
        for line in data.splitlines(keepends=True):
            if not self.is_inside and not (self.is_returned and line == b"\n"):
                self.parts.append(self.tag)
            self.parts.append(line)
            self.is_inside = not line.endswith((b"\n", b"\r"))
            self.is_returned = line.endswith(b"\r")
            self.nbytes += len(line)
            if not self.is_inside:
                whole, self.nbytes = len(self.parts), 0
        if self.nbytes > LINE_BYTES:
            whole, self.nbytes = len(self.parts), 0
        if whole:
            self._put(b"".join(self.parts[:whole]))
            del self.parts[:whole]

    def flush(self) -> None:
        """Write an unfinished last line."""
        if self.is_inside:
            self._put(b"".join([*self.parts, b"\n"]))
        self.parts, self.nbytes, self.is_inside, self.is_returned = [], 0, False, False

    def _put(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone; that is noticed elsewhere
            while data:
                data = data[os.write(self.fd, data) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
