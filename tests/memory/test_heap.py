"""Heap: what is kept is counted by page faults, what is set aside is read from /proc; in a process of its own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
knows_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="a kernel without transparent huge pages"
)

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

# Prints kept, MiB of the heap's addresses, of those for which huge pages are asked for, and of the memory there.
SIZES = """
import sys
from mpdist.memory.heap import keep_freed

{before}
kept = keep_freed(int(sys.argv[1]))
{after}
addresses = asking = memory = 0
is_heap = False
for line in open("/proc/self/smaps"):
    key, *values = line.split()
    if not key.endswith(":"):
        is_heap = line.rstrip().endswith("[heap]")
    elif is_heap and key == "Size:":
        size = int(values[0])
        addresses += size
    elif is_heap and key == "Rss:":
        resident = int(values[0])
    elif is_heap and key == "VmFlags:" and "hg" in values:
        asking += size
        memory += resident
print(kept, *(kib // 1024 for kib in (addresses, asking, memory)))
"""
GIB = 1024**3


def run(script: str, nbytes: int, variables: Mapping[str, str] | None = None) -> tuple[str, list[int]]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", script, str(nbytes)]
    done = subprocess.run(command, env=environ | dict(variables or {}), capture_output=True, text=True, check=True)
    kept, *numbers = done.stdout.split()
    return kept, [int(number) for number in numbers]


def faults_of(nbytes: int, variables: Mapping[str, str] | None = None) -> tuple[str, int]:
    kept, (faults,) = run(STEPS, nbytes, variables)
    return kept, faults


def sizes_of(nbytes: int, before: str = "", after: str = "") -> tuple[str, list[int]]:
    return run(SIZES.format(before=before, after=after), nbytes)


def test_what_is_freed_is_there_for_the_next_step() -> None:
    assert faults_of(0) == ("False", pytest.approx(PAGES, rel=0.5))
    kept, faults = faults_of(GIB)
    assert kept == "True"
    assert faults < PAGES / 20


def test_more_than_is_to_be_kept_goes_back() -> None:
    kept, faults = faults_of(10_000_000)
    assert kept == "True"
    assert faults > PAGES / 4


@pytest.mark.parametrize(
    "variables", [{"MALLOC_TOP_PAD_": "1000"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=65536"}], ids=str
)
def test_who_steers_the_allocator_keeps_the_wheel(variables: Mapping[str, str]) -> None:
    kept, faults = faults_of(GIB, variables)
    assert kept == "False"
    assert faults > PAGES / 4


def test_more_bytes_than_glibc_can_be_told_are_as_many_as_it_can() -> None:
    assert faults_of(2**40)[0] == "True"


@knows_huge_pages
def test_huge_pages_are_asked_for_where_the_next_steps_will_lie() -> None:
    kept, (addresses, asking, memory) = sizes_of(GIB)
    assert kept == "True"
    assert 800 < asking <= addresses < 1100
    assert memory < 50


@knows_huge_pages
def test_blocks_lie_there() -> None:
    block = "block = bytearray(30 * 1024**2)"
    assert sizes_of(GIB, after=block)[1][2] - sizes_of(GIB)[1][2] == pytest.approx(30, abs=3)


@pytest.mark.parametrize("nbytes", [0, 100 * 1024**2], ids=["nothing", "less than may be free before it"])
def test_nothing_is_set_aside_for(nbytes: int) -> None:
    kept, (addresses, asking, _) = sizes_of(nbytes)
    assert (kept, asking) == (str(nbytes > 0), 0)
    assert addresses < 100


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_nothing_is_set_aside_where_addresses_are_limited(limit: str) -> None:
    before = f"import resource; resource.setrlimit(resource.{limit}, (2 * 1024**3,) * 2)"
    kept, (addresses, asking, _) = sizes_of(GIB, before)
    assert (kept, asking) == ("True", 0)
    assert addresses < 100


def test_a_heap_that_cannot_grow_is_left_alone() -> None:
    # Right behind it something else is mapped, so the C library goes on elsewhere.
    before = """
import ctypes, mmap
libc = ctypes.CDLL(None)
libc.sbrk.restype = libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
end = -(-libc.sbrk(0) // 4096) * 4096
assert libc.mmap(end, 4096, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000, -1, 0) == end
"""
    after = "blocks = [bytearray(2_000_000) for _ in range(20)]; del blocks"
    kept, (addresses, asking, _) = sizes_of(GIB, before, after)
    assert (kept, asking) == ("True", 0)
    assert addresses < 100


@knows_huge_pages
def test_a_forked_child_goes_on_with_it() -> None:
    after = """
import os
blocks = [bytearray(b"x" * 2_000_000) for _ in range(20)]
child = os.fork()
if not child:
    blocks += [bytearray(b"y" * 2_000_000) for _ in range(20)]
    os._exit(sum(block[-1] for block in blocks) != 20 * (ord("x") + ord("y")))
assert os.waitpid(child, 0)[1] == 0
assert {block[0] for block in blocks} == {ord("x")}
"""
    assert sizes_of(GIB, after=after)[1][1] > 800
