"""The failure policy with real jobs: whatever happens to rank 1 of 3, the whole job ends within 5 s, and says why."""

from __future__ import annotations

import itertools
import platform
import signal
from collections.abc import Callable

import pytest
from cli.jobs import PROMISED_SECONDS
from runtime.programs import CHILDREN, FAILING, IS_OPENMPI, LAUNCHERS, Program, fail, program, report, run

pytestmark = pytest.mark.job

# how rank 1 fails -> (status of the job, reason on stderr)
WAYS = {
    "exception": (1, "ValueError: boom"),
    "hook": (1, "ValueError: boom"),
    "memory": (1, "MemoryError"),
    "thread": (1, "ValueError: boom (in thread 'loader')"),
    "hidden": (1, "ValueError: boom (in thread 'loader')"),
    "task": (1, "ValueError: boom (in task "),
    "callback": (1, "ValueError: boom (in a callback)"),
    "group": (1, "ExceptionGroup: "),
    "import": (1, "ModuleNotFoundError: No module named 'no_such_module'"),
    "exit": (4, "sys.exit(4)"),
    "sysexit3": (3, "sys.exit(3)"),
    "sysexit256": (1, "sys.exit(256)"),
    "exittext": (1, "sys.exit('no more data')"),
    "raise": (5, "SystemExit(5)"),
    "sigterm": (143, "SIGTERM"),
}
# the same, of the ranks that wait for it
LEAVES = {"sysexit0": 1, "nothing": 1}
IN_TASKS = ("task", "callback", "group")
WAITING = ("recv", "barrier", "all_reduce")

ALWAYS = [
    ("bare", "exception", "recv", "run"),
    ("bare", "hook", "all_reduce", "run"),
    ("bare", "memory", "barrier", "plain"),
    ("bare", "exception", "idle", "uvloop"),
    ("bare", "thread", "recv", "plain"),
    ("bare", "task", "recv", "run"),
    ("bare", "callback", "idle", "uvloop"),
    ("bare", "import", "recv", "plain"),
    ("bare", "exit", "recv", "plain"),
    ("bare", "sysexit3", "idle", "loop"),
    ("bare", "raise", "recv", "plain"),
    ("bare", "raise", "idle", "loop"),
    ("bare", "raise", "barrier", "main"),
    ("bare", "sysexit3", "idle", "main"),
    ("bare", "sigterm", "all_reduce", "run"),
    ("mpdist", "raise", "idle", "main"),
    ("mpdist", "exception", "recv", "run"),
    ("mpdist", "hidden", "idle", "plain"),
    ("mpdist", "sysexit3", "idle", "run"),
]
FORMS = (("bare", "run"), ("bare", "plain"), ("mpdist", "run"))
ALL = [
    (launcher, how, where, style)
    for (launcher, style), how, where in itertools.product(FORMS, WAYS, (*WAITING, "idle"))
    if (launcher, how, where, style) not in ALWAYS
    and not (how in IN_TASKS and style == "plain")
    and not (how == "import" and style != "plain")
]


@pytest.mark.parametrize(
    ("launcher", "how", "where", "style"), [*ALWAYS, *(pytest.param(*case, marks=pytest.mark.large) for case in ALL)]
)
def test_failure_of_a_rank_ends_the_job_and_is_named(launcher: str, how: str, where: str, style: str) -> None:
    status, reason = WAYS[how]
    if style in ("run", "uvloop"):
        reason = reason.replace("SystemExit", "sys.exit")  # what leaves run() is the same
    if style == "main":
        reason = reason.replace("sys.exit", "SystemExit")
    ended = fail(launcher, how, where, style)
    assert ended.status == status
    line = report(ended)
    assert line.startswith("mpdist: rank 1 of 3 (host ")
    assert f"): {reason}" in line
    assert line.endswith("; the job is stopped")
    if reason.startswith("ValueError"):
        assert ended.err.index("Traceback") < ended.err.index("mpdist: ")
    if how not in ("thread", "hidden", "import", "task", "callback"):
        assert "rank 1 cleaned up" in ended.out


@pytest.mark.parametrize(
    ("launcher", "how", "where", "style"),
    [
        ("bare", "nothing", "recv", "run"),
        ("bare", "nothing", "barrier", "plain"),
        ("bare", "sysexit0", "all_reduce", "loop"),
        ("mpdist", "sysexit0", "recv", "run"),
        *(
            pytest.param(*case, marks=pytest.mark.large)
            for case in itertools.product(LAUNCHERS, LEAVES, WAITING, ("uvloop", "plain"))
        ),
    ],
)
def test_rank_that_leaves_while_others_wait_ends_the_job(launcher: str, how: str, where: str, style: str) -> None:
    ended = fail(launcher, how, where, style)
    assert ended.status == LEAVES[how]
    line = report(ended)
    assert f"waits in {where}" in line
    assert "for rank 1, which has finished" in line
    assert "; the job is stopped" in line
    assert "failing.py:" in line


@pytest.mark.parametrize(
    ("how", "status", "text"),
    [
        ("exception", 1, "ValueError: boom"),
        ("sysexit3", 3, "sys.exit(3)"),
        ("exit_callback", 3, "sys.exit(3)"),
        ("stop", 1, ": Stop;"),
        ("cancelled", 1, "CancelledError"),
    ],
)
def test_finally_block_that_waits_for_a_waiting_rank_does_not_hold_the_end_up(how: str, status: int, text: str) -> None:
    ended = fail("bare", f"finally-{how}", "recv", "run")
    assert ended.status == status
    assert text in report(ended)
    assert "pending: recv from 0, tag 99" in ended.err


def test_thread_that_waits_for_a_waiting_rank_does_not_hold_the_end_up() -> None:
    """Python waits for it before it calls atexit handlers."""
    ended = fail("bare", "pool", "recv", "plain")
    assert ended.status == 3
    assert "sys.exit(3)" in report(ended)
    assert "pending: recv from 0, tag 9" in ended.err


@pytest.mark.skipif(not IS_OPENMPI, reason="hydra kills all ranks as soon as one has closed its socket")
def test_rank_that_has_closed_all_files_ends_the_job() -> None:
    """The launcher's and the warden's, too: MPI_Abort waits for an answer for ever."""
    ended = fail("mpdist", "closed_files", "recv", "plain")
    assert ended.status == 1
    assert ended.err.index("Traceback") < ended.err.index("ValueError: boom; the job is stopped")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_rank_on_which_mpdist_cannot_start_ends_the_job(launcher: str) -> None:
    ended = run(launcher, 3, FAILING, "start", "nowhere", "plain")
    assert ended.status == 1
    assert "mpdist could not start: OSError: [Errno 24] Too many open files; the job is stopped" in ended.err


@pytest.mark.parametrize("how", ["sigsegv", "_exit0"])
def test_lost_rank_is_named_under_mpdist_run(how: str) -> None:
    ended = fail("mpdist", how, "recv", "run")
    assert ended.status != 0
    assert report(ended).startswith("mpdist: rank 1 of 3 (host ")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library may not look")
@pytest.mark.parametrize("launcher", ["bare", "mpdist"])
def test_a_broken_heap_ends_the_job(launcher: str) -> None:
    ended = fail(launcher, "heap", "barrier", "plain")
    assert ended.status != 0
    assert ended.seconds < PROMISED_SECONDS


@pytest.mark.parametrize(("how", "name"), [("sigsegv", "SIGSEGV"), ("sigabrt", "SIGABRT"), ("thread_crash", "SIGSEGV")])
def test_crash_shows_the_python_stack_then_names_the_rank(how: str, name: str) -> None:
    ended = fail("bare", how, "recv", "run")
    assert ended.status != 0
    line = report(ended)
    assert "mpdist: rank 1 of 3 (host " in line
    assert line.endswith(f"): crashed by {name}; the job is stopped")
    assert ended.err.index("failing.py") < ended.err.index("mpdist: rank")


def test_endless_recursion_in_c_code_shows_the_python_stack() -> None:
    """There is no room on the stack for more than faulthandler."""
    ended = fail("bare", "overflow", "recv", "plain")
    assert ended.status != 0
    assert "failing.py" in ended.err


def test_crash_of_a_child_names_no_rank() -> None:
    ended = run("bare", 2, CHILDREN, "crash")
    assert ended.status == 0
    assert ended.out.count("added") == 2
    assert "mpdist: " not in ended.err


@pytest.mark.skipif(not IS_OPENMPI, reason="hydra stops the other ranks by SIGKILL: they can't say anything")
def test_ranks_that_are_stopped_name_the_one_that_has_died() -> None:
    ended = fail("bare", "_exit0", "recv", "run")
    assert ended.status != 0
    assert "rank 1 of 3" in report(ended)
    assert "has died" in report(ended)


# ---------------------------------------------------------------------- signals to the launcher


def send(number: signal.Signals) -> Callable[[Program], None]:
    return lambda running: running.process.send_signal(number)


@pytest.mark.parametrize(
    ("number", "status", "style"),
    [(signal.SIGINT, 130, "uvloop"), (signal.SIGTERM, 143, "run"), (signal.SIGHUP, 129, "plain")],
)
def test_interrupted_job_runs_its_finally_blocks(number: signal.Signals, status: int, style: str) -> None:
    ended = fail("mpdist", "wait", "recv", style, send(number))
    assert ended.status == status
    assert ended.out.count("cleaned up") == 3
    assert ended.last_line == f"mpdist: the job was stopped by {number.name}"


@pytest.mark.skipif(
    IS_OPENMPI, reason="Open MPI's mpiexec kills its ranks 0.2 s after a signal, and drops their output"
)
@pytest.mark.parametrize(
    ("number", "status", "reason", "where"),
    [(signal.SIGINT, 130, "KeyboardInterrupt", "idle"), (signal.SIGTERM, 143, "SIGTERM", "all_reduce")],
)
def test_interrupted_bare_job_reports_once(number: signal.Signals, status: int, reason: str, where: str) -> None:
    ended = fail("bare", "wait", where, "run", send(number))
    assert ended.status == status
    assert ended.out.count("cleaned up") == 3
    assert reason in report(ended)


@pytest.mark.parametrize(
    ("number", "where"),
    [(signal.SIGINT, "idle"), (signal.SIGTERM, "compute"), (signal.SIGKILL, "idle")],
)
def test_nothing_is_left_when_the_launcher_is_stopped(number: signal.Signals, where: str) -> None:
    """Also of ranks that are inside a long call of C code."""
    ended = fail("bare", "wait", where, "plain", send(number))
    assert ended.status != 0


@pytest.mark.skipif(IS_OPENMPI, reason="needs a launcher that passes signals on")
def test_rank_in_c_code_does_not_hold_the_end_up() -> None:
    """All ranks compute; none comes to run Python's signal handler."""
    ended = fail("bare", "compute", "compute", "plain", send(signal.SIGTERM))
    assert ended.status == 143
    assert "it has not ended within" in report(ended)
    assert "failing.py" in ended.err


def test_processes_of_a_program_are_found() -> None:
    """Else `left_over` would prove nothing."""
    with program("bare", 3, FAILING, "wait", "idle", "plain") as running:
        running.wait_ready(3)
        running.since -= PROMISED_SECONDS
        assert len([line for line in running.left_over() if "failing.py" in line]) >= 3
        for process in running.processes():
            process.kill()
        running.act(lambda: None)
