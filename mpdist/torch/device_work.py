"""DeviceWork: a posted operation on tensors of a device.

When it is done its results are complete in the device's memory, so every stream sees them; but where this rank is the
only one nothing has waited for what computes them. What has to be brought to where it belongs is brought there in the
stream in which the operation was posted, which has the memory for that, when somebody looks and not before: the
program's stream must not get kernels in the middle of something else. The stream of whoever waits is ordered behind all
that, as with NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from mpdist.torch.compiling import leave_alone
from mpdist.torch.devices import streams_of
from mpdist.torch.options import NO_TIMEOUT
from mpdist.torch.work import Complete, Work


class Place:
    """Where an operation was posted: a stream, and how far it was."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self.device = outputs[0].device
        self.streams = streams_of(self.device)
        self.stream: Any = self.streams.current_stream(self.device)
        self.reached: Any = self.stream.record_event()

    def order(self) -> None:
        """Let this thread's stream come after it; the host does not wait."""
        current = self.streams.current_stream(self.device)
        if current != self.stream:
            current.wait_event(self.reached)


class DeviceWork(Work):
    """A Work whose outputs are on a device."""

    def __init__(
        self, waiter: Any, posted: Any, outputs: Sequence[Tensor], finish: Any = None, event: Any = None
    ) -> None:
        self._place = Place(outputs)
        super().__init__(waiter, posted, outputs, finish, event)

    @leave_alone
    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """As of all; and what this thread's stream does later follows the result."""
        super().wait(timeout)
        self._place.order()
        return True

    def _finish_when_done(self) -> None:
        """Not by itself."""

    def _bring(self) -> None:
        place = self._place
        with place.streams.stream(place.stream):
            super()._bring()
            place.reached = place.stream.record_event()

    def _finish_once(self) -> None:
        super()._finish_once()
        self._place.order()


class CompleteThere(Complete):
    """An operation on a device's tensors that had nothing to wait for but what computes them."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__(outputs)
        self._place = Place(outputs)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        self._place.order()
        return True

    def synchronize(self) -> None:
        """The same."""
        self.wait()
