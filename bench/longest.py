"""Longest: how long single callbacks hold the event loop, and what goes over a host's link."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import TracebackType
from typing import Any


class Callbacks:
    """Times every callback of the event loop inside a `with` block.

    Attributes:
        cpu: seconds of this thread's processor time, of each callback.
        wall: seconds of the clock, of each callback.
    """

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []

    def __enter__(self) -> Callbacks:
        self._original = original = asyncio.Handle._run
        cpu, wall = self.cpu, self.wall

        def timed(handle: Any) -> None:
            start, start_cpu = time.perf_counter(), time.thread_time()
            try:
                original(handle)
            finally:
                cpu.append(time.thread_time() - start_cpu)
                wall.append(time.perf_counter() - start)

        asyncio.Handle._run = timed  # type: ignore[method-assign, assignment]  # there is no hook
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        asyncio.Handle._run = self._original  # type: ignore[method-assign]


def link_bytes() -> int:
    """Bytes that this host has sent on all its links but the loopback."""
    rows = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    found = dict(row.split(":", 1) for row in rows)
    return sum(int(values.split()[8]) for name, values in found.items() if name.strip() != "lo")
