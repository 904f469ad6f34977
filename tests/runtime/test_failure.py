"""Parts of the failure policy that need no job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from cli.jobs import job_environ

from mpdist.runtime.board import Board, board_bytes
from mpdist.runtime.failure import describe_error, exit_code, one_line


@pytest.mark.parametrize(
    ("code", "status"), [(None, 0), (0, 0), (3, 3), (-1, 255), (256, 1), (True, 1), ("text", 1), ((), 1)]
)
def test_exit_code_is_what_python_makes_of_it_but_never_a_success_by_chance(code: object, status: int) -> None:
    assert exit_code(code) == status


def test_error_without_a_text_is_described() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe_error(ValueError("x")) == "ValueError: x"
    assert "Broken" in describe_error(Broken())


def test_call_that_holds_the_gil_does_not_hold_the_end_up() -> None:
    text = "import ctypes; from mpdist.runtime import failure; failure.ABORT_SECONDS = 0.01; failure._limit_abort()"
    command = [sys.executable, "-c", f"{text}; ctypes.PyDLL(None).sleep(60)"]
    done = subprocess.run(command, capture_output=True, text=True, env=job_environ(), timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


# ---------------------------------------------------------------------- board


def boards(size: int) -> list[Board]:
    memory = bytearray(board_bytes(size))
    return [Board(memory, rank, range(size)) for rank in range(size)]


def test_of_a_long_reason_its_begin_is_told_and_the_cause_at_its_end() -> None:
    trace = "File loader.py\n  ^^^^^\n" * 100
    told = one_line(f"ValueError: Caught ValueError in DataLoader worker process 1.\n{trace}ValueError: corrupt 13")
    assert told.startswith("ValueError: Caught ValueError in DataLoader worker process 1. File")
    assert " ... " in told
    assert told.endswith("ValueError: corrupt 13")
    assert len(told) < 700
    assert one_line("ValueError:\n boom") == "ValueError: boom"


def test_first_rank_reports_and_no_other() -> None:
    first, second = boards(2)
    assert second.claim()
    assert second.claim(), "it may ask again"
    assert not first.claim()


def test_wait_ends_when_all_are_ready_to_go() -> None:
    ranks = boards(3)
    for rank in ranks:
        rank.leave()
    ranks[0].wait_for_all(60)
    ranks = boards(3)
    ranks[1].leave()
    ranks[0].wait_for_all(0.05)


def test_rank_whose_process_is_gone_is_found() -> None:
    ranks = boards(3)
    assert ranks[0].lost() == []
    pid = os.fork()
    if pid == 0:
        signal.pause()
    ranks[1]._pid = pid
    ranks[1]._write(is_ready=False)
    assert ranks[0].lost() == []
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ranks[0].lost() == [(1, pid)], "a zombie"
    os.waitpid(pid, 0)
    assert ranks[0].lost() == [(1, pid)]


# ---------------------------------------------------------------------- exits

# program -> what exits.status() says in its atexit handler
EXITS = {
    "sys.exit(3)": "3",
    "exit(3)": "3",
    "exit(code=3)": "3",
    "sys.exit('text')": "'text'",
    "sys.exit()": "None",
    "pass": "None",
    "in_loop()": "3",
    "in_function()": "3",
    "again()": "3",
    "caught()": "None",
    "caught_from_loop()": "None",
    "suppressed()": "None",
    "kept()": "None",
    "in_thread()": "None",
    "in_thread_of_c()": "None",
    "asyncio.run(asyncio.to_thread(sys.exit, 3))": "3",
    "caught(); sys.exit(0)": "0",
    "atexit.register(sys.exit, 3)": "None",
    "atexit.register(raise_exit)": "None",
    "atexit.register(sys.exit, 3); sys.exit(4)": "4",
    "atexit.register(sys.exit, 0); in_loop()": "3",
}
PROGRAM = """
import _thread, asyncio, atexit, contextlib, sys, threading
from mpdist.runtime import exits
exits.install()
atexit.register(lambda: print(repr(exits.status())))
async def coroutine():
    await asyncio.sleep(0)
    sys.exit(3)
def in_loop():
    asyncio.run(coroutine())
def in_function():
    try:
        sys.exit(3)
    finally:
        pass
def again():
    try:
        sys.exit(3)
    except SystemExit:
        raise
def caught():
    try:
        sys.exit(3)
    except SystemExit:
        return
def caught_from_loop():
    try:
        in_loop()
    except SystemExit:
        return
def suppressed():
    with contextlib.suppress(SystemExit): in_loop()
def kept():
    global error
    try:
        sys.exit(3)
    except SystemExit as caught:
        error = caught
def in_thread():
    threading.excepthook = lambda args: None
    thread = threading.Thread(target=sys.exit, args=(3,))
    thread.start()
    thread.join()
def in_thread_of_c():
    over = threading.Event()
    class Local:
        def __del__(self): over.set()  # the exception refers to the frame
    def leave():
        local = Local()
        sys.exit(3)
    _thread.start_new_thread(leave, ())
    assert over.wait(60)
def raise_exit():
    raise SystemExit(3)
"""


@pytest.mark.parametrize("end", EXITS)
def test_exit_status_is_known_before_the_end(end: str) -> None:
    command = [sys.executable, "-c", PROGRAM + end]
    done = subprocess.run(command, capture_output=True, text=True, env=job_environ(), check=False)
    assert done.stdout == f"{EXITS[end]}\n", done.stderr


UNCAUGHT = """
import atexit, code, sys
from mpdist.runtime import exits
sys.excepthook = lambda *_: print("hook")
atexit.register(lambda: print(repr(exits.uncaught())))
def console():
    code.InteractiveInterpreter().runsource("1 / 0")
def caught():
    try: boom()
    except ValueError as error: sys.last_value = error
def boom():
    raise ValueError("boom")
"""


@pytest.mark.parametrize(
    ("end", "out"),
    [
        ("boom()", "hook\nValueError('boom')\n"),
        ("pass", "None\n"),
        ("console()", "hook\nNone\n"),
        ("caught()", "None\n"),
        ("caught(); boom()", "hook\nValueError('boom')\n"),
    ],
)
def test_exception_that_has_left_the_program_is_known_before_the_end(end: str, out: str) -> None:
    command = [sys.executable, "-c", UNCAUGHT + end]
    done = subprocess.run(command, capture_output=True, text=True, env=job_environ(), check=False)
    assert done.stdout == out, done.stderr


def test_sys_exit_is_put_back() -> None:
    text = "import sys; before = sys.exit; exits.install(); exits.install(); exits.remove(); print(sys.exit is before)"
    command = [sys.executable, "-c", f"from mpdist.runtime import exits; {text}"]
    assert subprocess.run(command, capture_output=True, text=True, env=job_environ(), check=True).stdout == "True\n"
