"""Bucket: memory in which several arrays of one type travel as one message; those of a device: `device_bucket.py`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.gradients.packing import Packing, as_wire
from mpdist.memory import Buffer
from mpdist.memory.elements import Array

if TYPE_CHECKING:
    from mpdist.comm import Communicator
    from mpdist.progress import Work


class Place:
    """Where in a bucket an array is; it does not know the bucket, whose memory goes with the last that does.

    Attributes:
        is_entered: whether it is there in this step.
        copying: held while it is copied in.
    """

    __slots__ = ("_packing", "_room", "copying", "is_entered")

    def __init__(self, packing: Packing, room: Array) -> None:
        self._packing = packing
        self._room = room
        self.is_entered = False
        self.copying = threading.Lock()

    def enter(self, buffer: Buffer) -> None:
        """Copy the array in."""
        self._packing.enter(buffer.array(), self._room)

    def leave(self, buffer: Buffer) -> None:
        """Copy the result into the array."""
        self.read(buffer.array())

    def read(self, out: Array) -> None:
        """Copy the result into host memory."""
        self._packing.leave(self._room, out)


class Bucket:
    """Arrays that travel together.

    Attributes:
        places: one for each array, in order.
        missing: arrays that are not yet ready in this step.
        work: the reduction, once it has started.
    """

    work: Work[Any] | None = None

    def __init__(self, comm: Communicator, packing: Packing, buffers: Sequence[Buffer]) -> None:
        self.packing = packing
        memory = self._memory(comm, sum(buffer.count for buffer in buffers), packing.wire.storage)
        self._wire = as_wire(memory, packing.wire)
        self.places: list[Place] = []
        start = 0
        for buffer in buffers:
            self.places.append(self._place(memory[start : start + buffer.count]))
            start += buffer.count
        self.missing = len(buffers)

    def _memory(self, comm: Communicator, count: int, dtype: np.dtype[Any]) -> Array:
        return comm.empty(count, dtype)

    def _place(self, room: Array) -> Place:
        return Place(self.packing, room)

    def start(self, comm: Communicator) -> None:
        """Post the reduction."""
        self.work = comm.all_reduce(self._wire, op=self.packing.op)

    def reset(self) -> None:
        """Be empty for the next step."""
        self.work = None
        self.missing = len(self.places)
        for place in self.places:
            place.is_entered = False
