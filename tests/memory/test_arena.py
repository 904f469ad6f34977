"""Arena: what it hands out never overlaps, comes back whole, and takes pages only while it is used."""

from __future__ import annotations

import gc
import mmap
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpdist.errors import UsageError
from mpdist.memory import as_buffer
from mpdist.memory.arena import LARGE_BYTES, LINE_BYTES, PAGE_BYTES, PIECE_BYTES, SPARE_BYTES, Arena, Block
from mpdist.transport.neighbours import Neighbours
from mpdist.transport.sharing import nameless_file

NBYTES = 64 * PAGE_BYTES
SMALL_FILE_SYSTEM = 64 << 20


class File:
    """An arena over a file of its own."""

    def __init__(self, nbytes: int = NBYTES, folder: str = "") -> None:
        self.descriptor, path = nameless_file(nbytes, folder)
        if path:
            os.unlink(path)
        self.arena = Arena(self.descriptor, mmap.mmap(self.descriptor, nbytes))

    @property
    def pages(self) -> int:
        """How many the system has given."""
        return os.fstat(self.descriptor).st_blocks * 512 // PAGE_BYTES


@pytest.fixture
def file() -> Iterator[File]:
    made = File()
    yield made
    os.close(made.descriptor)


def take(arena: Arena, nbytes: int) -> Block:
    block = arena.allocate(nbytes)
    assert block is not None
    return block


# ---------------------------------------------------------------------- blocks


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4095, 4096, 4097, 100_000])
def test_blocks_begin_on_lines_and_large_ones_on_pages(file: File, nbytes: int) -> None:
    first, second = take(file.arena, nbytes), take(file.arena, nbytes)
    for block in (first, second):
        assert block.offset % LINE_BYTES == 0
        assert block.nbytes >= max(nbytes, 1)
        if nbytes >= PAGE_BYTES:
            assert block.offset % PAGE_BYTES == 0
    assert not set(range(first.offset, first.offset + first.nbytes)) & {second.offset}


def test_freed_blocks_join_in_any_order(file: File) -> None:
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1)):
        blocks: list[Block | None] = [take(file.arena, NBYTES // 4) for _ in range(4)]
        assert file.arena.allocate(1) is None
        for place in order:
            blocks[place] = None
        assert file.arena.used_bytes == 0
        whole = take(file.arena, NBYTES)
        assert whole.offset == 0
        del whole


def test_an_array_keeps_its_block_and_so_does_each_view(file: File) -> None:
    x = file.arena.empty((3, 5), np.float64)
    assert x is not None
    x[:] = 7
    part, flat = x[1:, ::2], as_buffer(x).array()
    del x
    gc.collect()
    other = file.arena.empty(1000, np.float64)
    assert other is not None
    other[:] = -1
    assert (part == 7).all()
    assert (flat == 7).all()
    del part
    assert file.arena.used_bytes > 8000
    del flat, other
    assert file.arena.used_bytes == 0


@pytest.mark.parametrize("shape", [(), 0, 5, (2, 0, 3), (2, 3), np.int64(4), (np.int64(2), 1), np.array([3, 4])])
@pytest.mark.parametrize("dtype", ["float32", "complex128", "bool", "uint16", "(2,3)f4", ">i2", "f4,i2", "S", "U", "V"])
def test_arrays_have_the_shapes_of_numpy(file: File, shape: int | tuple[int, ...], dtype: str) -> None:
    x = file.arena.empty(shape, dtype)
    like = np.empty(shape, dtype)
    assert x is not None
    assert (x.shape, x.dtype) == (like.shape, like.dtype)
    assert x.size == 0 or x.strides == like.strides
    assert x.flags.c_contiguous
    assert x.flags.writeable
    assert x.ctypes.data % LINE_BYTES == 0


@pytest.mark.parametrize(("shape", "dtype"), [(-1, "f4"), ((3, -2), "f4"), (4, object)])
def test_what_cannot_be_shared_is_refused(file: File, shape: int | tuple[int, ...], dtype: object) -> None:
    with pytest.raises(UsageError, match="lengths are >= 0"):
        file.arena.empty(shape, dtype)  # type: ignore[arg-type]
    assert file.arena.used_bytes == 0


def test_more_than_there_is_gives_none_and_takes_nothing(file: File) -> None:
    assert file.arena.allocate(NBYTES + 1) is None
    assert file.arena.empty(NBYTES, np.float64) is None
    assert file.arena.used_bytes == 0


def test_offsets_lead_to_arrays_of_this_arena_only(file: File) -> None:
    x = file.arena.empty(100, np.float32)
    assert x is not None
    start = file.arena.address
    assert file.arena.offset_of(x.ctypes.data, x.nbytes) == x.ctypes.data - start
    assert file.arena.offset_of(np.empty(9).ctypes.data, 72) is None
    assert file.arena.offset_of(start + NBYTES - 8, 8) == NBYTES - 8
    assert file.arena.offset_of(start + NBYTES - 8, 9) is None
    assert file.arena.offset_of(start - 8, 16) is None


operations = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 5 * PAGE_BYTES)), st.tuples(st.just("free"), st.integers(0, 1000))
    ),
    max_size=60,
)


@given(operations)
def test_no_two_live_blocks_overlap_and_none_is_lost(steps: list[tuple[str, int]]) -> None:
    file = File()
    try:
        live: list[Block] = []
        for what, number in steps:
            if what == "free" and live:
                live.pop(number % len(live))
            elif what == "take":
                live.extend(filter(None, [file.arena.allocate(number)]))
            spans = sorted((block.offset, block.offset + block.nbytes) for block in live)
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))
            assert all(start >= 0 and end <= NBYTES for start, end in spans)
            assert file.arena.used_bytes == sum(block.nbytes for block in live)
        live.clear()
        assert take(file.arena, NBYTES).nbytes == NBYTES
    finally:
        os.close(file.descriptor)


# ---------------------------------------------------------------------- who frees, and when


def test_blocks_may_be_freed_in_any_thread(file: File) -> None:
    rounds, threads = 300, 4
    problems: list[str] = []

    def work(number: int) -> None:
        for turn in range(rounds):
            x = file.arena.empty(1 + (turn * 37 + number) % 3000, np.int32)
            if x is None:
                continue
            x[:] = number
            if (x != number).any():
                problems.append(f"thread {number}, turn {turn}")

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert problems == []
    assert file.arena.used_bytes == 0


def test_a_block_may_be_freed_while_another_is_taken(file: File) -> None:
    """The garbage collector runs inside any line, also under the arena's lock: nothing may wait."""
    with file.arena._lock:
        block = take_without_lock(file.arena)
        del block
        gc.collect()
    assert file.arena.used_bytes == 0


def take_without_lock(arena: Arena) -> Block:
    offset = arena._take(LINE_BYTES, LINE_BYTES)
    assert offset is not None
    return Block(arena, offset, LINE_BYTES)


def test_blocks_in_reference_cycles_come_back(file: File) -> None:
    class Node:
        pass

    for _ in range(100):
        node = Node()
        node.array = file.arena.empty(PAGE_BYTES, np.uint8)  # type: ignore[attr-defined]
        node.itself = node  # type: ignore[attr-defined]
        if file.arena.used_bytes > NBYTES // 2:
            gc.collect()
    del node
    gc.collect()
    assert file.arena.used_bytes == 0


def test_a_forked_child_frees_nothing_of_its_parents(file: File) -> None:
    x = file.arena.empty(3 * PAGE_BYTES, np.uint8)
    assert x is not None
    x[:] = 5
    child = os.fork()
    if child == 0:
        del x
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (x == 5).all()
    assert file.pages == 3


# ---------------------------------------------------------------------- pages


def test_pages_are_there_before_use_and_go_with_the_block(file: File) -> None:
    assert file.pages == 0
    first, second = take(file.arena, 10 * PAGE_BYTES), take(file.arena, 5 * PAGE_BYTES)
    assert file.pages == 15
    del first
    assert file.pages == 5
    del second
    assert file.pages == 0


def test_pages_are_taken_between_two_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before Linux 6.11: a signal undoes a call, and Python makes it again, here where it takes too long."""
    fallocate, asked = os.posix_fallocate, []

    def fallocate_unless_interrupted(descriptor: int, offset: int, nbytes: int) -> None:
        assert nbytes <= 256 * 1024, "interrupted again and again"
        asked.append((offset, nbytes))
        fallocate(descriptor, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", fallocate_unless_interrupted)
    large = File(16 << 20)
    block = take(large.arena, (5 << 20) + PAGE_BYTES)
    assert large.pages * PAGE_BYTES == block.nbytes == sum(nbytes for _, nbytes in asked)
    assert [offset for offset, _ in asked] == list(range(block.offset, block.offset + block.nbytes, 256 * 1024))
    del block
    os.close(large.descriptor)


def test_pages_that_are_mapped_are_written_without_a_fault(file: File) -> None:
    faults = []
    for maps in (False, True):
        block = take(file.arena, NBYTES)
        array = block.bytes()
        if maps:
            file.arena.map_now(block.offset, block.nbytes)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        array[::PAGE_BYTES] = 1
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        del array, block
    can_map = sys.platform == "linux" and tuple(map(int, platform.release().split(".")[:2])) >= (5, 14)
    assert faults[1] <= faults[0] / 4 or not can_map


def test_a_page_goes_with_the_last_of_its_small_blocks(file: File) -> None:
    blocks = [take(file.arena, 64) for _ in range(2 * PAGE_BYTES // 64)]
    assert file.pages == 2
    del blocks[::2]
    assert file.pages == 2
    del blocks[PAGE_BYTES // 128 :]
    assert file.pages == 1
    blocks.clear()
    assert file.pages == 0


def test_a_neighbour_keeps_its_bytes_when_a_page_is_shared(file: File) -> None:
    arrays = [file.arena.empty(700, np.uint8) for _ in range(40)]
    for number, array in enumerate(arrays):
        assert array is not None
        array[:] = number
    kept = arrays[::3]
    arrays.clear()
    for place, array in enumerate(kept):
        assert array is not None
        assert (array == 3 * place).all()


def test_pages_that_the_system_does_not_take_back_are_used_again() -> None:
    """On ramfs, or where the process locks its memory: each free failed, some of them within a later allocation."""
    code = (
        "import ctypes, gc, mmap, os, sys, numpy as np\n"
        "from mpdist.memory.arena import Arena\n"
        "from mpdist.transport.sharing import nameless_file\n"
        "descriptor, path = nameless_file(1 << 20)\n"
        "memory = mmap.mmap(descriptor, 1 << 20)\n"
        "arena = Arena(descriptor, memory)\n"
        "if ctypes.CDLL(None).mlock(ctypes.c_void_p(arena.address), ctypes.c_size_t(len(memory))):\n"
        "    sys.exit('locked out')\n"
        "for _ in range(5):\n"
        "    x = arena.empty(1 << 20, np.uint8)\n"
        "    x[:] = 1\n"
        "    del x\n"
        "    assert arena.used_bytes == 0\n"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=60)
    if "locked out" in done.stderr:
        pytest.skip("memory cannot be locked here")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---------------------------------------------------------------------- a file system without space


@pytest.fixture
def small_folder() -> Iterator[Path]:
    """A memory file system of 64 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    with tempfile.TemporaryDirectory(prefix="small-") as folder:
        options = f"size={SMALL_FILE_SYSTEM}"
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
        yield Path(folder)
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_file_system_gives_none_and_no_fault(small_folder: Path) -> None:
    file = File(1 << 30, str(small_folder))
    arrays = []
    while (x := file.arena.empty(10 << 20, np.uint8)) is not None:
        x[:] = 1
        arrays.append(x)
    assert len(arrays) == 6
    assert file.arena.used_bytes == 60 << 20
    arrays.pop(3)
    again = file.arena.empty(10 << 20, np.uint8)
    assert again is not None
    again[:] = 2
    assert all((array == 1).all() for array in arrays)
    del arrays, again, x
    os.close(file.descriptor)


def test_more_than_the_machine_has_left_is_not_taken() -> None:
    asked = []

    def has_room(nbytes: int) -> bool:
        asked.append(nbytes - SPARE_BYTES)
        return len(asked) < 3

    descriptor, path = nameless_file(1 << 30)
    assert path == ""
    arena = Arena(descriptor, mmap.mmap(descriptor, 1 << 30), has_room)
    assert arena.allocate(LARGE_BYTES - PAGE_BYTES) is not None
    assert asked == []
    assert arena.allocate(4 * PIECE_BYTES) is None  # others have taken the rest meanwhile
    assert asked == [4 * PIECE_BYTES, 3 * PIECE_BYTES, 2 * PIECE_BYTES]
    assert arena.used_bytes == 0
    assert os.fstat(descriptor).st_blocks == 0
    os.close(descriptor)


def test_a_private_array_takes_its_place_and_that_is_said_once(
    small_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    descriptor, path = nameless_file(1 << 30, str(small_folder))
    os.unlink(path)
    neighbours = Neighbours(descriptor, [mmap.mmap(descriptor, 1 << 30)], [0], 0, None, None)
    arrays = [neighbours.empty(40 << 20, np.uint8) for _ in range(4)]
    for array in arrays:
        array[:] = 1
    resident = [neighbours.offset_of(as_buffer(array)) is not None for array in arrays]
    assert resident == [True, False, False, False]
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert "no shared memory is left for an array of shape 41943040 (40 MiB are in use by this rank)" in said[0]
    assert neighbours.allocate(1 << 26, "collectives on 'world'") is None
    assert capsys.readouterr().err == ""
    del arrays, array
    os.close(descriptor)


def test_nothing_is_said_of_an_array_that_fits_nowhere(file: File, capsys: pytest.CaptureFixture[str]) -> None:
    """It was said to be in private memory, and of later ones that were there nothing was said."""
    neighbours = Neighbours(file.descriptor, [file.arena.memory], [0], 0, None, None)
    for shape in ((1 << 40, 1 << 40), 1 << 70):
        with pytest.raises(ValueError, match=r"too big|dimension exceeded"):
            neighbours.empty(shape, np.uint8)
    assert capsys.readouterr().err == ""


def test_a_folder_that_cannot_be_written_to_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="No such file"):
        nameless_file(PAGE_BYTES, "/nowhere/at/all")


def test_a_child_that_ends_normally_runs_no_free_at_its_end() -> None:
    """At the interpreter's end arrays are left to the system, without a word."""
    code = (
        "import mmap, os, numpy as np\n"
        "from mpdist.memory.arena import Arena\n"
        "from mpdist.transport.sharing import nameless_file\n"
        "descriptor, path = nameless_file(1 << 20)\n"
        "arena = Arena(descriptor, mmap.mmap(descriptor, 1 << 20))\n"
        "kept = [arena.empty(5000, np.float32) for _ in range(3)]\n"
        "cycle = [kept]; cycle.append(cycle)\n"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
