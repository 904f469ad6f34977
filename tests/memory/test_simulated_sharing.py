"""The simulated GPU, as several processes share it: as late and as strict as CUDA."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest
from memory.simulated import Simulated
from memory.simulated_sharing import FREED, NEW, SimulatedSharing

from mpdist.errors import DeviceFailed
from mpdist.memory import Folder, as_op, element_of

NBYTES = 4096

PRELUDE = """
import ctypes, sys
from memory.simulated import Simulated
from mpdist.errors import DeviceFailed
sharing = Simulated().sharing()
handles = [bytes.fromhex(each) for each in sys.argv[1:]]
def read(address): return set(ctypes.string_at(address, 4096))
"""


def in_another_process(code: str, *handles: bytes) -> str:
    """What it prints."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PRELUDE + code, *[handle.hex() for handle in handles]]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def sharing() -> SimulatedSharing:
    return Simulated().sharing()


def test_a_block_is_the_same_memory_in_both(sharing: SimulatedSharing) -> None:
    block = sharing.export(NBYTES)
    assert in_another_process("print(read(sharing.open(handles[0])))", block.handle) == str({NEW})
    in_another_process("ctypes.memset(sharing.open(handles[0]), 7, 4096)", block.handle)
    assert set(ctypes.string_at(block.address, NBYTES)) == {7}


def test_a_block_is_opened_once_in_a_process_and_not_in_its_owners(sharing: SimulatedSharing) -> None:
    block = sharing.export(NBYTES)
    twice = """
address = sharing.open(handles[0])
try:
    sharing.open(handles[0])
except DeviceFailed as error:
    print(error)
sharing.close(address)
sharing.close(sharing.open(handles[0]))
"""
    assert "already mapped" in in_another_process(twice, block.handle)
    with pytest.raises(DeviceFailed, match="context"):
        sharing.open(block.handle)
    with pytest.raises(DeviceFailed, match="invalid argument"):
        sharing.close(block.address)


def test_a_block_that_was_given_back_is_poisoned_and_its_handle_stale(sharing: SimulatedSharing) -> None:
    block = sharing.export(NBYTES)
    code = "address = sharing.open(handles[0]); print('open', flush=True); input(); print(read(address))"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PRELUDE + code, block.handle.hex()]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environ, text=True, **pipes) as child:  # type: ignore[call-overload]
        assert child.stdout.readline() == "open\n"
        sharing.release(block)
        assert child.communicate("\n", timeout=60)[0] == f"{ {FREED} }\n"
    sharing.export(NBYTES)  # may get the number of the file that is gone
    stale = "try: sharing.open(handles[0])\nexcept DeviceFailed as error: print(error)"
    assert "invalid resource handle" in in_another_process(stale, block.handle)


def test_work_is_late_and_in_order() -> None:
    device = Simulated(seconds=0.02)
    sharing = device.sharing()
    block, lane = sharing.export(NBYTES), sharing.lane()
    x = np.arange(100, dtype=np.float32)
    address = x.__array_interface__["data"][0]
    folder = Folder(as_op("sum"), element_of(x.dtype), None)  # type: ignore[arg-type]  # there is one
    lane.copy(address, block.address, x.nbytes)
    lane.fold(folder, [address, block.address], [block.address], x.size)
    mark = lane.mark()
    there = np.frombuffer((ctypes.c_char * x.nbytes).from_address(block.address), np.float32)
    assert not mark.Test()
    assert not np.array_equal(there, 2 * x)
    mark.wait()
    np.testing.assert_array_equal(there, 2 * x)


def test_an_event_is_waited_for_as_it_was_recorded_last() -> None:
    device = Simulated(seconds=0.05)
    sharing = device.sharing()
    event = sharing.signal()
    lane = sharing.lane()
    waits = """
lane = sharing.lane()
event = sharing.open_signal(handles[0])
lane.wait(event)
lane.mark().wait()
print("over")
"""
    assert in_another_process(waits, event.handle) == "over"  # it was not recorded: no wait at all
    for _ in range(20):
        lane.copy(event.event, event.event, 0)
    lane.record(event.event)
    assert in_another_process(waits, event.handle) == "over"
    words = sharing.event(event.event).words()
    assert (words[0], words[1]) == (1, 1)


def test_what_cannot_be_shared_is_told(sharing: SimulatedSharing) -> None:
    sharing.can_share = False
    with pytest.raises(DeviceFailed, match="not supported"):
        sharing.export(NBYTES)
