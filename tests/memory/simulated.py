"""A GPU that is a thread: streams, events and copies that take their time, over memory that nobody else may touch.

Each stream is a queue that a thread works off, after a pause before each piece, so
that whoever does not wait for what it must sees old values.
"""

from __future__ import annotations

import ctypes
import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from memory.simulated_sharing import SimulatedSharing

from mpdist.errors import UsageError
from mpdist.memory import Buffer, Device, accelerator
from mpdist.memory.cuda_errors import failures
from mpdist.memory.elements import Array
from mpdist.memory.mark import OVER, Mark
from mpdist.progress.backoff import Backoff

DEVICE = Device("cuda", 0)

# How long a rank that waits for a piece of work looks again at once, and how long it sleeps then at the most.
HOT_SECONDS = 0.0003
SLEEP_SECONDS = 0.0002


class DeviceArray:
    """An array as CuPy shows it."""

    def __init__(self, values: Any) -> None:
        self._values = values
        self.shape = values.shape
        self.dtype = values.dtype

    @property
    def device(self) -> Any:
        return type("Device", (), {"id": 0})

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        address = _address(self._values) if self._values.size else 0  # all empty ones are there, as CuPy's
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (address, not self._values.flags.writeable),
            "version": 3,
        }

    def __getitem__(self, span: slice) -> DeviceArray:
        return DeviceArray(self._values[span])

    def reshape(self, shape: tuple[int, ...]) -> DeviceArray:
        return DeviceArray(self._values.reshape(shape))

    def get(self) -> Any:
        """What is there now, whatever is still queued."""
        return self._values.copy()


class Stream:
    """A queue of work, done in order by a thread of its own, which ends when nobody has the stream any more."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._random = random.Random(0)
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue()
        threading.Thread(target=_work_off, args=(self._queue,), daemon=True, name="mpdist-simulated").start()
        weakref.finalize(self, self._queue.put, None).atexit = False

    def is_idle(self) -> bool:
        return not self._queue.unfinished_tasks

    def run(self, piece: Callable[[], object]) -> None:
        def late() -> None:
            time.sleep(self._random.random() * self._seconds)
            piece()

        self._queue.put(late)

    def mark(self) -> SimulatedMark:
        mark = SimulatedMark()
        self._queue.put(mark.event.set)
        return mark

    def follow(self, mark: SimulatedMark) -> None:
        self._queue.put(mark.event.wait)


def _work_off(pieces: queue.Queue[Callable[[], object] | None]) -> None:
    while (piece := pieces.get()) is not None:
        piece()
        del piece  # before it is done for others: its arrays, which it holds, may be asked after
        pieces.task_done()


class SimulatedMark:
    def __init__(self) -> None:
        self.event = threading.Event()
        self.error: Exception | None = None

    def Test(self) -> bool:
        with failures(RuntimeError):
            if self.error is not None:
                raise self.error
        return self.event.is_set()

    def wait(self) -> None:
        self.event.wait()


class Simulated:
    """The accelerator, and the stream in which a program computes."""

    def __init__(self, seconds: float = 0.0002, can_pin: bool = True) -> None:
        self._seconds = seconds
        self.program = Stream(5 * seconds)
        self._out, self._in = Stream(seconds), Stream(seconds)
        self.shared = SimulatedSharing(self)
        self._can_pin = can_pin
        self.pinned: set[int] = set()
        self.is_capturing = False
        self.fails: Exception | None = None
        self.copies: list[tuple[str, int]] = []
        self.threads: set[threading.Thread] = set()
        self.place = os.getpid()

    def follow(self, x: Buffer) -> None:
        if self.is_capturing:
            raise UsageError("the array is being recorded into a CUDA graph")
        if self.program.is_idle():
            return
        mark = self.program.mark()
        self._out.follow(mark)
        self._in.follow(mark)

    def ready(self, x: Buffer) -> Mark:
        if self.is_capturing:
            raise UsageError("the array is being recorded into a CUDA graph")
        if self.program.is_idle() and self.fails is None:
            return OVER
        mark = self.program.mark()
        mark.error = self.fails
        return mark

    def attend(self) -> None:
        self.threads.add(threading.current_thread())

    def identity(self) -> int:
        return self.place

    def describe(self) -> str:
        return "a simulated GPU"

    def copy_out(self, source: Buffer, start: int, target: Array) -> SimulatedMark:
        return self._copy("out", self._out, _address(target), source.address + start, target.nbytes)

    def copy_in(self, source: Array, target: Buffer, start: int) -> SimulatedMark:
        return self._copy("in", self._in, target.address + start, _address(source), source.nbytes)

    def _copy(self, what: str, stream: Stream, target: int, source: int, nbytes: int) -> SimulatedMark:
        self.copies.append((what, nbytes))
        stream.run(lambda: ctypes.memmove(target, source, nbytes))
        mark = stream.mark()
        mark.error = self.fails
        return mark

    def empty(self, shape: Sequence[int], dtype: Any) -> DeviceArray:
        values = np.empty(shape, dtype)
        values.reshape(-1).view(np.uint8).fill(0xAB)
        return DeviceArray(values)

    def pin(self, memory: Array) -> bool:
        if self._can_pin:
            self.pinned.add(_address(memory))
        return self._can_pin

    def unpin(self, memory: Array) -> None:
        self.pinned.remove(_address(memory))

    def sharing(self) -> SimulatedSharing:
        return self.shared

    def stream(self) -> Stream:
        """A new one."""
        return Stream(self._seconds)

    def settle(self) -> None:
        """All that is queued is over."""
        for stream in (self.program, self._out, self._in):
            stream.mark().wait()

    def entered(self) -> SimulatedMark:
        """What copies to the device wait for."""
        return self._in.mark()

    # what a program does with it

    def array(self, values: Any) -> DeviceArray:
        """An array that gets its values late, in the program's stream; until then it holds others."""
        values = np.asarray(values)
        array = self.empty(values.shape, values.dtype)
        self.fill(array, values)
        return array

    def fill(self, array: DeviceArray, values: Any) -> None:
        """Give an array its values, as late."""

        def late() -> None:
            array._values[...] = values

        self.program.run(late)

    def private(self, shape: Sequence[int], dtype: Any) -> DeviceArray:
        """A new array in memory that has no handle."""
        return self.empty(shape, dtype)

    def pooled(self, shape: Sequence[int], dtype: Any) -> Any:
        """One in a segment of the program's library."""
        return self.shared.pooled(shape, dtype)

    def give_back_all(self) -> int:
        """Segments without an array go back to the driver; how many."""
        return self.shared.give_back_all()


def _delay(backoff: Backoff, idle_seconds: float, *_: bool, **__: bool) -> float:
    """Sleep soon, and shortly: of more ranks than cores those that wait would keep these threads from their work."""
    return 0.0 if idle_seconds < HOT_SECONDS else min(SLEEP_SECONDS, backoff.fraction * idle_seconds)


def _address(memory: Array) -> int:
    return int(memory.__array_interface__["data"][0])


@contextmanager
def simulated(device: Simulated | None = None, **options: Any) -> Iterator[Simulated]:
    """Arrays on cuda:0 are those of a simulated GPU."""
    device = device or Simulated(**options)
    before = accelerator._known.get(DEVICE)
    accelerator._known[DEVICE] = device
    delay = Backoff.delay
    Backoff.delay = _delay
    try:
        yield device
    finally:
        Backoff.delay = delay
        del accelerator._known[DEVICE]
        if before is not None:
            accelerator._known[DEVICE] = before
