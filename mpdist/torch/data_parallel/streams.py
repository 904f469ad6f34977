"""Streams: gradients of one backward may come from several streams of a device, and travel in one message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mpdist.torch.devices import streams_of


class Streams:
    """The streams in which the gradients of this backward are computed: those in which the forward ran."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = streams_of(device)
        self._handle_of = _handles_of(device)
        self._seen: dict[object, Any] = {}

    def begin(self) -> None:
        """A new backward."""
        self._seen.clear()

    def note(self) -> None:
        """A gradient was queued on this thread's stream."""
        handle = self._handle_of(self._device.index)
        if handle not in self._seen:
            self._seen[handle] = self._module.current_stream(self._device)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """What is queued in here on this thread's stream follows all gradients noted; the host waits for nothing.

        What is queued later on their streams follows it: gradients that are freed in here may lend their memory to it.
        """
        current = self._module.current_stream(self._device)
        others = [stream for stream in self._seen.values() if stream != current]
        for stream in others:
            current.wait_stream(stream)
        yield
        for stream in others:
            stream.wait_stream(current)


def _handles_of(device: torch.device) -> Callable[[int], object]:
    """What tells a thread's streams apart: torch's objects take microseconds to make, for each gradient."""
    quick: Callable[[int], object] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return quick if quick is not None and device.type == "cuda" else streams_of(device).current_stream
