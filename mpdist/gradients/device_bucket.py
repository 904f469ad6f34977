"""DeviceBucket: arrays of a GPU travel as one message, through pinned host memory.

An array is copied out as soon as it is ready, in the order of the stream that
computes it. The reduction waits for the copies, and is complete when the results
are back: no thread waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.comm.staged_calls import through
from mpdist.comm.staging import pinned_of
from mpdist.gradients.bucket import Bucket, Place
from mpdist.memory import Buffer, Device
from mpdist.progress.marks import copied, settled

if TYPE_CHECKING:
    from mpdist.comm import Communicator
    from mpdist.gradients.packing import Packing
    from mpdist.memory.accelerator import Accelerator
    from mpdist.memory.elements import Array
    from mpdist.memory.mark import Mark
    from mpdist.memory.pinned import Loan
    from mpdist.progress.collective import Steps
    from mpdist.transport.mpi import Transport


class DevicePlace(Place):
    """Where in a bucket an array of a device is."""

    __slots__ = ("_accelerator", "_loan", "buffer")

    buffer: Buffer

    def __init__(self, packing: Packing, room: Array, accelerator: Accelerator, loan: Loan) -> None:
        super().__init__(packing, room)
        self._accelerator = accelerator
        self._loan = loan

    def enter(self, buffer: Buffer) -> None:
        self._accelerator.follow(buffer)
        self._loan.marks.append(self._accelerator.copy_out(buffer, 0, self._octets))
        self.buffer = buffer

    def leave(self, buffer: Buffer) -> None:
        """It has been copied into the array already, unless that has got other memory meanwhile."""
        if buffer.address != self.buffer.address:
            self._accelerator.follow(buffer)
            self.buffer = buffer
            self.copy_in().wait()

    def copy_in(self) -> Mark:
        """Queue the copy of the result into the array."""
        return self._accelerator.copy_in(self._octets, self.buffer, 0)

    @property
    def _octets(self) -> Any:
        return self._room.view(np.uint8)


class DeviceBucket(Bucket):
    """Arrays of one device that travel together.

    Attributes:
        accelerator: the device.
        loan: the host memory, and the copies of this step that read and write it.
    """

    def __init__(self, device: Device, comm: Communicator, packing: Packing, buffers: Sequence[Buffer]) -> None:
        self._pinned = pinned_of(comm._channel.engine, device)
        self.accelerator = self._pinned.accelerator
        self._own: list[DevicePlace] = []
        super().__init__(comm, packing, buffers)

    def _memory(self, comm: Communicator, count: int, dtype: Any) -> Array:
        self.loan = self._pinned.lend(count * dtype.itemsize)
        return self.loan.bytes.view(dtype)

    def _place(self, room: Array) -> Place:
        self._own.append(DevicePlace(self.packing, room, self.accelerator, self.loan))
        return self._own[-1]

    def start(self, comm: Communicator) -> None:
        self.work = through(comm, self).all_reduce(self._wire, op=self.packing.op)

    def run(
        self, op: str, program: Callable[..., Steps[Any]], arguments: Sequence[Any], transport: Transport
    ) -> Steps[Any]:
        """The reduction between the copies, as StagedChannel posts it."""
        marks = self.loan.marks
        with settled(marks):
            yield from copied(marks)
            yield from program(transport, *arguments)
            marks += self._copy_in()
            yield from copied(marks)

    def _copy_in(self) -> list[Mark]:
        return [place.copy_in() for place in self._own if not place.buffer.readonly]

    def reset(self) -> None:
        super().reset()
        self.loan.marks.clear()
