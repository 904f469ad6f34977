"""Whole jobs and shared memory: too little of it, what is left behind, ranks that do not come, several hosts."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from cli.jobs import ROOT, Ended
from runtime.programs import IS_OPENMPI, Program, program, run
from runtime.test_control_jobs import run_job

pytestmark = [pytest.mark.job, pytest.mark.either_mpi, pytest.mark.limit(180)]

SCRIPT = str(Path(__file__).with_name("scripts") / "node_memory.py")
FAKECLUSTER = os.environ.get("MPDIST_FAKECLUSTER", "")

SHARED = {"MPDIST_ALGORITHM": "shared"}
PAIRS = {"MPDIST_ALGORITHM": "hierarchical", "MPDIST_RANKS_PER_NODE": "2"}


def succeeded(ended: Ended) -> Ended:
    assert ended.status == 0, ended.err
    return ended


# ---------------------------------------------------------------------- too little memory


@pytest.fixture
def small_folder() -> Iterator[str]:
    """A memory file system of 64 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    with tempfile.TemporaryDirectory(prefix="small-") as folder:
        command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
        yield folder
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("environ", [SHARED, PAIRS], ids=["shared", "hierarchical"])
def test_a_small_memory_file_system_gives_private_arrays_and_right_results(
    small_folder: str, environ: dict[str, str]
) -> None:
    ended = succeeded(run("bare", 4, SCRIPT, "short", environ=environ | {"MPDIST_SHARED_MEMORY_DIR": small_folder}))
    said = [line for line in ended.err.splitlines() if "no shared memory is left" in line]
    assert 1 <= len(said) <= 4, ended.err
    assert os.listdir(small_folder) == []


def test_where_one_rank_has_no_memory_for_slots_all_do_without(small_folder: str) -> None:
    environ = SHARED | {"MPDIST_SHARED_MEMORY_DIR": small_folder}
    ended = succeeded(run("bare", 2, SCRIPT, "short_on_one", environ=environ))
    said = [line for line in ended.err.splitlines() if "no shared memory is left" in line]
    assert 1 <= len(said) <= 2, ended.err
    assert "no shared memory is left for collectives on 'world/dup" in ended.err


@pytest.mark.parametrize("environ", [{"MPDIST_SHARED_MEMORY": "0"}, SHARED | {"MPDIST_RANKS_PER_NODE": "1"}, PAIRS])
def test_with_and_without_sharing_the_results_are_the_same(environ: dict[str, str]) -> None:
    ended = succeeded(run("bare", 3, SCRIPT, "reference", environ=environ))
    assert ended.out.count("rank ") == 3, ended.out


# ---------------------------------------------------------------------- what is left


@pytest.mark.parametrize(
    "count", [300, pytest.param(10_000, marks=[pytest.mark.large, pytest.mark.limit(1200)])], ids=str
)
def test_communicators_that_come_and_go_leave_nothing(count: int) -> None:
    with program("bare", 2, SCRIPT, "leak", str(count), environ=SHARED) as running:
        succeeded(running.finish(timeout=60 + count / 10))


def test_communicators_over_nodes_that_come_and_go_leave_nothing() -> None:
    """They have rails, and MPI has a limit of about 2000 communicators."""
    with program("bare", 3, SCRIPT, "leak", "100", environ=PAIRS) as running:
        succeeded(running.finish(timeout=120))


def kill_all(job: Program) -> None:
    ranks = [each for each in job.processes() if SCRIPT in each.cmdline() and "mpiexec" not in each.name()]
    for process in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):  # the launcher ends the others when it has lost one
            process.kill()


def kill_launcher(job: Program) -> None:
    job.process.kill()


@pytest.mark.parametrize("end", [kill_all, kill_launcher])
@pytest.mark.parametrize("with_folder", [False, True], ids=["without a name", "in a folder"])
def test_killed_jobs_leave_no_file(tmp_path: Path, end: Callable[[Program], None], with_folder: bool) -> None:
    """`program` looks for mpdist's files everywhere else."""
    environ = SHARED | ({"MPDIST_SHARED_MEMORY_DIR": str(tmp_path)} if with_folder else {})
    with program("bare", 2, SCRIPT, "stays", environ=environ) as running:
        running.wait_ready(2)
        ranks = [process for process in running.processes() if SCRIPT in process.cmdline()]
        deleted = [path for process in ranks for path in mapped_files(process)]
        assert deleted, "the ranks map shared files"
        running.act(lambda: end(running))
        running.finish()
    assert list(tmp_path.iterdir()) == []


def mapped_files(process: psutil.Process) -> list[str]:
    """mpdist's files that the process maps; all without a name by now."""
    try:
        lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    except OSError:
        return []
    found = [line for line in lines if "mpdist" in line and "(deleted)" in line]
    assert all("(deleted)" in line for line in lines if "mpdist-" in line or "memfd:mpdist" in line)
    return found


# ---------------------------------------------------------------------- ranks that do not come


@pytest.mark.parametrize("environ", [SHARED, PAIRS], ids=["shared", "hierarchical"])
def test_a_timeout_names_the_rank_that_did_not_come(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    for name, value in (environ | {"MPDIST_TIMEOUT": "1"}).items():
        monkeypatch.setenv(name, value)
    start = time.monotonic()
    ended = run_job("loads_for_long")
    assert ended.returncode != 0
    assert time.monotonic() - start < 20
    assert re.search(
        r"all_reduce float32 x 4 sum #2 on 'world' .* is not done after 1 s, waiting for rank 1", ended.stderr
    ), ended.stderr
    assert re.search(r"not arrived: rank 1: .*now at .*late_rank.py:\d+ in load_batch: time.sleep", ended.stderr)


def test_debug_mode_names_each_ranks_call_on_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (SHARED | {"MPDIST_DEBUG": "1"}).items():
        monkeypatch.setenv(name, value)
    ended = run_job("calls_another")
    assert ended.returncode != 0
    assert "CollectiveMismatch: call 1 on 'world' differs between ranks:" in ended.stderr
    assert re.search(r"rank 0: all_reduce float32 x 4 sum +\(.*late_rank.py:\d+\)", ended.stderr)
    assert re.search(r"rank 1: broadcast +float32 x 4 from 0 +\(.*late_rank.py:\d+\)", ended.stderr)


@pytest.mark.parametrize("environ", [SHARED, PAIRS], ids=["shared", "hierarchical"])
def test_debug_mode_compares_and_lets_right_calls_pass(environ: dict[str, str]) -> None:
    succeeded(run("bare", 3, SCRIPT, "reference", environ=environ | {"MPDIST_DEBUG": "1"}))


@pytest.mark.parametrize(
    ("name", "value"), [("MPDIST_TUNING", "/nowhere.json"), ("MPDIST_SHARED_MEMORY_DIR", "/nowhere/at/all")]
)
def test_a_wrong_path_ends_the_job_with_its_name(name: str, value: str) -> None:
    ended = run("bare", 2, SCRIPT, "reference", environ={name: value})
    assert ended.status != 0
    assert value in ended.err


# ---------------------------------------------------------------------- several hosts


@pytest.mark.skipif(not FAKECLUSTER, reason="MPDIST_FAKECLUSTER does not name the tool that makes several hosts")
@pytest.mark.skipif(os.geteuid() != 0, reason="making several hosts needs root")
def test_two_hosts_with_two_ranks_each() -> None:
    name = f"t{os.getpid()}"
    environ = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}

    def cluster(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [FAKECLUSTER, "--name", name, *arguments],
            env=environ, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip

    up = cluster("up", "2", "--rate", "1gbit")
    if up.returncode:
        pytest.skip(f"no cluster can be made here: {(up.stderr or up.stdout).strip()}")
    try:
        done = cluster(
            "run", "--mpi", "openmpi" if IS_OPENMPI else "mpich", "--ranks-per-host", "2", "--timeout", "120",
            "--env", f"PYTHONPATH={ROOT}", "--env", "MPDIST_ALGORITHM=hierarchical", "--env", "OMP_NUM_THREADS=1",
            "--", sys.executable, SCRIPT, "reference", timeout=150,
        )  # fmt: skip
    finally:
        cluster("down")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(re.findall(r"rank (\d) of 4 on nodes \[0, 2\]: Cluster", done.stdout))
    assert lines == ["0", "1", "2", "3"], done.stdout
