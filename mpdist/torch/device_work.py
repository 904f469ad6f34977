"""DeviceWork: a posted operation on tensors of a device.

When it is done its results are complete in the device's memory, so every stream sees them. What has to be brought to
where it belongs is brought there in the stream in which the operation was posted, which has the memory for that; the
stream of whoever waits is ordered behind it, as with NCCL. That happens when somebody looks, not before: the program's
stream must not get kernels in the middle of something else.
"""

from __future__ import annotations

from typing import Any

from mpdist.torch.devices import streams_of
from mpdist.torch.work import Work


class DeviceWork(Work):
    """A Work whose outputs are on a device."""

    _brought: Any = None

    def _finish_when_done(self) -> None:
        """Not by itself."""
        self._device = self._outputs[0].device
        self._stream = streams_of(self._device).current_stream(self._device)

    def _bring(self) -> None:
        with streams_of(self._device).stream(self._stream):
            super()._bring()
            self._brought = self._stream.record_event()

    def _finish_once(self) -> None:
        super()._finish_once()
        if self._brought is not None:
            current = streams_of(self._device).current_stream(self._device)
            if current != self._stream:
                current.wait_event(self._brought)
