"""Streams: gradients of one backward may come from several streams of a device, and travel in one message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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

    @contextmanager
    def joined(self) -> Iterator[None]:
        """What is queued in here on this thread's stream follows all gradients noted; the host waits for nothing.

        What is queued later on their streams follows it: gradients that are freed in here may lend their memory to it.
        """
        current = self._module.current_stream(self._device)
        others = [stream for stream in self._seen if stream != current]
        for stream in others:
            current.wait_stream(stream)
        yield
        for stream in others:
            stream.wait_stream(current)
