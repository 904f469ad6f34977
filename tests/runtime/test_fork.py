"""Forks: signals are held back until a child is disarmed, and no longer, whatever the hooks of others do."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A hook of others that forks once itself; registered before mpdist's, so it runs between mpdist's two.
NESTED = """
import os, signal, sys

def fork(child=lambda: None):
    pid = os.fork()
    if pid == 0:
        child()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

def nested():
    global is_nested
    if not is_nested:
        is_nested = True
        fork()

def none_is_blocked():
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()

def is_blocked():
    assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])

is_nested = False
os.register_at_fork(**{sys.argv[1]: nested})

from mpdist.runtime.fork import on_fork

on_fork(is_blocked)
fork(none_is_blocked)
none_is_blocked()
assert is_nested or sys.argv[1] == "after_in_child"
"""


@pytest.mark.parametrize("hook", ["before", "after_in_parent", "after_in_child"])
def test_forks_in_the_hooks_of_a_fork_leave_no_signal_blocked(hook: str) -> None:
    done = subprocess.run([sys.executable, "-c", NESTED, hook], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
