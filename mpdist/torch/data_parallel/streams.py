"""Streams: gradients of one backward may come from several streams of a device, and travel in one message."""

from __future__ import annotations

from typing import Any

import torch

from mpdist.torch.devices import streams_of


class Streams:
    """The streams in which the gradients of this backward are computed: those in which the forward ran."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = streams_of(device)
        self._seen: set[Any] = set()

    def begin(self) -> None:
        """A new backward."""
        self._seen.clear()

    def note(self) -> None:
        """A gradient was queued on this thread's stream."""
        self._seen.add(self._module.current_stream(self._device))

    def join(self) -> None:
        """Let this thread's stream wait for all gradients noted; the host does not."""
        current = self._module.current_stream(self._device)
        for stream in self._seen:
            if stream != current:
                current.wait_stream(stream)
