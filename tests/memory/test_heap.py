"""Heap: what is kept is counted by page faults, in a process of its own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")

# As the gradients of a step: several blocks of some MiB, all free at the end of it.
STEPS = """
import resource, sys
from mpdist.memory.heap import keep_freed

kept = keep_freed(int(sys.argv[1]))

def step():
    blocks = [bytearray(2_000_000) for _ in range(20)]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(3):
    step()
before = faults()
for _ in range(10):
    step()
print(kept, (faults() - before) // 10)
"""
PAGES = 20 * 2_000_000 // 4096


def run(nbytes: int, variables: Mapping[str, str] | None = None) -> tuple[str, int]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", STEPS, str(nbytes)]
    done = subprocess.run(command, env=environ | dict(variables or {}), capture_output=True, text=True, check=True)
    kept, faults = done.stdout.split()
    return kept, int(faults)


def test_what_is_freed_is_there_for_the_next_step() -> None:
    assert run(0) == ("False", pytest.approx(PAGES, rel=0.5))
    kept, faults = run(1024**3)
    assert kept == "True"
    assert faults < PAGES / 20


def test_more_than_is_to_be_kept_goes_back() -> None:
    kept, faults = run(10_000_000)
    assert kept == "True"
    assert faults > PAGES / 4


@pytest.mark.parametrize(
    "variables", [{"MALLOC_TOP_PAD_": "1000"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=65536"}], ids=str
)
def test_who_steers_the_allocator_keeps_the_wheel(variables: Mapping[str, str]) -> None:
    kept, faults = run(1024**3, variables)
    assert kept == "False"
    assert faults > PAGES / 4


def test_more_bytes_than_glibc_can_be_told_are_as_many_as_it_can() -> None:
    assert run(2**40)[0] == "True"
