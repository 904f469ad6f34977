"""Real jobs: whatever happens to a rank, a warden, mpiexec or `mpdist run` itself, the whole job ends."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from cli.jobs import FAILING_RANK, PROMISED_SECONDS, START_SECONDS, Ended, Job, job, job_environ

from mpdist.cli.launcher import Kind, core_count, find_launcher

pytestmark = pytest.mark.job

# how rank 1 ends -> (status of the job, words of the last line)
ENDS = {
    "exit0": (1, "left with exit status 0, as by os._exit(0), before the job was agreed to be finished"),
    "exit3": (3, "left with exit status 3 before the job was agreed to be finished"),
    "sigkill": (137, "was killed by SIGKILL"),
    "sigsegv": (139, "was killed by SIGSEGV"),
}


def run(*arguments: str, stdin: str | None = None) -> Ended:
    """Run a job to its end; nothing may be left of it."""
    with job(*arguments, stdin=stdin) as running:
        ended = running.finish()
        assert running.left_over() == []
    return ended


def script(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("where", ["barrier", "recv", "poll", "idle"])
@pytest.mark.parametrize("how", ENDS)
def test_lost_rank_ends_the_job_and_is_named(how: str, where: str) -> None:
    status, words = ENDS[how]
    with job("-n", "3", FAILING_RANK, how, where) as running:
        running.wait_ready(3)
        ended = running.finish()
        assert running.left_over() == []
    assert ended.status == status
    assert ended.last_line.startswith("mpdist: rank 1 of 3 (host ")
    assert words in ended.last_line
    assert ended.err.count("mpdist:") == 1, "the first cause is named once"
    assert ended.seconds < PROMISED_SECONDS


def test_finished_job_returns_zero_and_says_nothing() -> None:
    ended = run("-n", "3", FAILING_RANK, "finish", "nowhere")
    assert (ended.status, ended.err) == (0, "")
    assert all(ended.out.count(f"rank {rank} of 3 is ready") == 1 for rank in range(3))


def test_a_job_runs_where_home_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    ended = run("-n", "2", FAILING_RANK, "finish", "nowhere")
    assert (ended.status, ended.err) == (0, "")


def test_rank_that_has_explained_itself_is_not_explained_again() -> None:
    ended = run("-n", "3", FAILING_RANK, "told", "barrier")
    assert ended.status == 5
    assert "rank 1 explains itself" in ended.err
    assert "mpdist:" not in ended.err


def test_an_error_before_mpdist_is_started_and_after_mpi_is(tmp_path: Path) -> None:
    """As after Lightning's `Trainer()`: mpi4py would wait for the other rank."""
    text = """
import sys
from mpi4py import MPI
import mpdist
if MPI.COMM_WORLD.Get_rank() == 1:
    raise ValueError("too early")
mpdist.init().barrier().wait()
"""
    ended = run("-n", "2", script(tmp_path, text))
    assert ended.status == 1
    assert "ValueError: too early" in ended.err
    assert ended.last_line.startswith("mpdist: rank 1 of 2 (host ")
    assert "left with exit status 1 before it started mpdist (what it printed says why)" in ended.last_line
    assert ended.seconds < START_SECONDS


@pytest.mark.parametrize("first", ["left", "started"])
def test_rank_that_has_left_before_mpdist_is_started_is_not_waited_for(first: str, tmp_path: Path) -> None:
    text = f"""
import os, sys, time
is_first = os.environ["RANK"] == "1"
time.sleep(1.0 if is_first == ({first!r} == "started") else 0.0)
if is_first:
    sys.exit(0)
import mpdist
mpdist.init()
"""
    ended = run("-n", "2", script(tmp_path, text))
    assert ended.status == 1
    assert ended.last_line.startswith("mpdist: rank 1 of 2 (host ")
    assert ended.last_line.endswith("has never started mpdist, for which the others wait; the job is stopped")


@pytest.mark.parametrize("status", [0, 7])
def test_status_of_a_program_without_mpi_passes(status: int, tmp_path: Path) -> None:
    ended = run("-n", "2", script(tmp_path, f"import sys; sys.exit({status})"))
    assert ended.status == status
    assert ended.err.count("mpdist:") == (status != 0)


def test_lost_warden_ends_the_job() -> None:
    with job("-n", "3", FAILING_RANK, "warden", "barrier") as running:
        running.wait_ready(3)
        ended = running.finish()
        assert running.left_over() == []
    assert ended.status != 0
    assert "mpdist:" in ended.last_line
    assert ended.seconds < PROMISED_SECONDS


@pytest.mark.parametrize("where", ["barrier", "idle"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_mpiexec_ends_the_job(number: signal.Signals, where: str) -> None:
    with job("-n", "2", FAILING_RANK, "nothing", where) as running:
        running.wait_ready(2)
        mpiexec = psutil.Process(running.process.pid).children()[0]
        running.act(lambda: mpiexec.send_signal(number))
        ended = running.finish()
        assert running.left_over() == []
    assert ended.status != 0
    assert "did not finish" in ended.last_line
    assert ended.seconds < PROMISED_SECONDS


@pytest.mark.parametrize("where", ["recv", "idle"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_mpdist_run_ends_the_job(number: signal.Signals, where: str) -> None:
    with job("-n", "2", FAILING_RANK, "nothing", where) as running:
        running.wait_ready(2)
        running.act(lambda: running.process.send_signal(number))
        ended = running.finish()
        assert running.left_over() == []
    if number != signal.SIGKILL:
        assert ended.status == 128 + number
        assert ended.last_line == f"mpdist: the job was stopped by {number.name}"
    assert ended.seconds < PROMISED_SECONDS


def test_finally_blocks_run_on_every_rank_at_ctrl_c() -> None:
    with job("-n", "3", FAILING_RANK, "nothing", "finally") as running:
        running.wait_ready(3)
        time.sleep(0.5)  # past the pause of the program, into the `try`
        running.act(lambda: running.process.send_signal(signal.SIGINT))
        ended = running.finish()
        assert running.left_over() == []
    assert ended.status == 130
    assert all(ended.out.count(f"rank {rank} cleaned up") == 1 for rank in range(3))


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_the_job_was_started_to_ignore_does_not_end_it(number: signal.Signals, tmp_path: Path) -> None:
    """As `nohup` does with SIGHUP, and a shell's script with SIGINT for `mpdist run ... &`."""
    text = "import sys; print('is ready', flush=True); sys.stdin.readline(); print('finished')"
    with job("-n", "1", script(tmp_path, text), stdin="go on\n", ignored=[number]) as running:
        running.wait_ready(1)
        running.process.send_signal(number)
        ended = running.finish()
        assert running.left_over() == []
    assert (ended.status, ended.err) == (0, "")
    assert "finished" in ended.out


def test_a_wrong_variable_gets_no_hint_of_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPDIST_TIMEOUT", "x")
    ended = run("-n", "2", script(tmp_path, "import mpdist; mpdist.init()"))
    assert ended.status == 1
    assert "MPDIST_TIMEOUT='x' is not valid" in ended.err
    assert "while it started mpdist (what it printed says why); the job is stopped" in ended.last_line


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_job_without_standard_files_runs(closed: str, tmp_path: Path) -> None:
    path = script(tmp_path, "import pathlib, sys; print('lost', file=sys.stderr); pathlib.Path(sys.argv[1]).touch()")
    command = shlex.join([sys.executable, "-m", "mpdist", "run", "-n", "1", path, str(tmp_path / "done")])
    done = subprocess.run(["sh", "-c", f"{command} {closed}"], env=job_environ(), timeout=60, check=False)
    assert done.returncode == 0
    assert (tmp_path / "done").exists()


def test_nothing_that_was_opened_is_forgotten(tmp_path: Path) -> None:
    path = script(tmp_path, "")
    command = [sys.executable, "-X", "dev", "-m", "mpdist", "run", "-n", "1", path]
    done = subprocess.run(command, env=job_environ(), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_children_of_a_lost_rank_are_ended_too(tmp_path: Path) -> None:
    text = f"""
import os, subprocess, sys, time
subprocess.Popen([{sys.executable!r}, "-c", "import time; time.sleep(60)", sys.argv[-1]])
os._exit(3)
"""
    assert run("-n", "2", script(tmp_path, text)).status == 3


def test_forked_children_can_not_complete_the_job(tmp_path: Path) -> None:
    text = """
import os
from mpdist.runtime.completion import record_completion, record_start
record_start()
if os.fork() == 0:
    record_completion()
    os._exit(0)
os.wait()
"""
    ended = run("-n", "1", script(tmp_path, text))
    assert ended.status == 1
    assert "before the job was agreed to be finished" in ended.last_line


def test_tagged_lines_carry_their_rank_and_keep_their_order(tmp_path: Path) -> None:
    text = """
import os, sys
for i in range(200):
    print("line", i)
print("no newline", end="")
print("error", file=sys.stderr)
"""
    ended = run("-n", "2", "--tag-output", script(tmp_path, text))
    assert ended.status == 0
    for rank in range(2):
        lines = [line.strip() for line in ended.out.splitlines() if line.startswith(f"[{rank}] ")]
        assert lines == [*(f"[{rank}] line {i}" for i in range(200)), f"[{rank}] no newline"]
        assert f"[{rank}] error" in ended.err


@pytest.mark.parametrize("options", [[], ["--tag-output"]])
def test_what_children_write_after_the_end_of_their_rank_is_shown(options: list[str], tmp_path: Path) -> None:
    text = """
import os, sys, time
print("rank ends", flush=True)
rank = os.getpid()
if os.fork() == 0:
    while os.getppid() == rank:
        time.sleep(0.01)
    time.sleep(0.2)
    print("child ends")
"""
    ended = run("-n", "1", *options, script(tmp_path, text))
    tag = "[0] " if options else ""
    assert (ended.status, ended.out.split("\n")) == (0, [f"{tag}rank ends", f"{tag}child ends", ""])


def test_arguments_and_stdin_reach_the_program(tmp_path: Path) -> None:
    # A line, not read(): Open MPI 5.0.11's own mpiexec does not pass on the end of stdin either.
    text = "import sys; print(sys.argv[1:-1], sys.stdin.readline())"
    ended = run("-n", "1", script(tmp_path, text), "-n", "a b", ":", "::", "--tag-output", stdin="from stdin\n")
    assert ended.out.strip() == "['-n', 'a b', ':', '::', '--tag-output'] from stdin"


def test_module_runs_as_with_python_m() -> None:
    ended = run("-n", "1", "-m", "platform")
    assert (ended.status, ended.err) == (0, "")


def test_several_hosts_are_reached_by_address(tmp_path: Path) -> None:
    """Launcher arguments may name other hosts, so the wardens get this host's addresses, not only the loopback."""
    place = ["--launcher-arg=-wdir", f"--launcher-arg={tmp_path}"]
    ended = run("-n", "1", *place, script(tmp_path, "import os; print(os.getcwd())"))
    assert (ended.status, ended.out.strip()) == (0, str(tmp_path))


def test_a_host_may_have_room_for_more_ranks_than_it_has_cores(tmp_path: Path) -> None:
    ranks = core_count() + 1
    hosts = tmp_path / "hosts"
    hosts.write_text(f"localhost:{ranks}\n" if find_launcher().kind is Kind.MPICH else f"localhost slots={ranks}\n")
    ended = run("-n", str(ranks), "--hostfile", str(hosts), script(tmp_path, "print('here')"))
    assert (ended.status, ended.out.count("here"), ended.err) == (0, ranks, "")


def test_failed_launch_is_not_a_success() -> None:
    ended = run("-n", "1", "--launcher-arg=--no-such-option", FAILING_RANK)
    assert ended.status != 0
    assert "started no rank" in ended.last_line


def test_rank_does_not_see_the_secret_of_the_job(tmp_path: Path) -> None:
    ended = run("-n", "1", script(tmp_path, "import os; print('MPDIST_RUN' in os.environ)"))
    assert ended.out.strip() == "False"


def test_only_the_record_pipe_is_added_to_the_files_of_a_rank(tmp_path: Path) -> None:
    """The warden's connection and pipes do not leak into the program."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    text = """
import os
def files(pid):
    folder = f"/proc/{pid}/fd"
    links = {fd: os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder) if os.path.exists(f"{folder}/{fd}")}
    return {fd: link for fd, link in links.items() if link.startswith(("pipe:", "socket:"))}
warden = files(os.getppid())
print([fd for fd, link in files(os.getpid()).items() if warden.get(fd) != link] == [os.environ["MPDIST_COMPLETION_FD"]])
"""
    assert run("-n", "1", script(tmp_path, text)).out.strip() == "True"


def test_job_helper_finds_the_processes_of_a_job() -> None:
    """Else `left_over` would prove nothing."""
    with job("-n", "2", FAILING_RANK, "nothing", "idle") as running:
        running.wait_ready(2)
        assert isinstance(running, Job)
        assert len(running.processes()) >= 1 + 2 * 2, "mpdist run, and a warden and a rank each"
