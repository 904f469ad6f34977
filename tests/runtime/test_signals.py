"""Signals: a handler that the program sets later stays its own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from cli.jobs import heed, job_environ

PROGRAM = """
import asyncio, os, signal, sys, threading
from mpdist.runtime import signals
from mpdist.runtime.board import Board, board_bytes
from mpdist.runtime.failure import Ender

signals.FINALLY_SECONDS = 0.0
ours = signals.Signals(Ender(0, 2, Board(bytearray(board_bytes(2)), 0, [0]), list))
ours.install()
thread = next(each for each in threading.enumerate() if each.name == "mpdist-signals")

def interrupt(seconds=0.3):
    os.kill(os.getpid(), signal.SIGINT)
    thread.join(seconds)  # where it has heard of that it ends the process
    print("goes on", flush=True)
    os._exit(0)

async def rearm_in_loop():
    ours.rearm()
    interrupt(20)

handle = lambda *_: print("heard")
"""


@pytest.mark.parametrize(
    ("program", "status", "out"),
    [
        ("signal.signal(signal.SIGINT, handle); ours.rearm(); interrupt()", 0, "heard\ngoes on\n"),
        ("signal.signal(signal.SIGINT, signal.SIG_IGN); ours.rearm(); interrupt()", 0, "goes on\n"),
        ("signal.signal(signal.SIGINT, signal.SIG_IGN); ours.remove(); interrupt()", 0, "goes on\n"),
        ("signal.signal(signal.SIGINT, signal.SIG_DFL); ours.remove(); interrupt()", -signal.SIGINT, ""),
        ("signal.signal(signal.SIGINT, handle); ours.remove(); interrupt()", 0, "heard\ngoes on\n"),
        ("asyncio.run(rearm_in_loop())", 130, ""),
    ],
)
def test_what_the_program_has_set_stays(program: str, status: int, out: str) -> None:
    command = [sys.executable, "-c", PROGRAM + program]
    done = subprocess.run(
        command, capture_output=True, text=True, env=job_environ(), timeout=60, check=False, preexec_fn=heed
    )
    assert (done.returncode, done.stdout) == (status, out), done.stderr
