"""Overlap: who drives the reductions while backward computes.

A thread of ours does where there is a core for it, or a network that would else stand still. On a node whose cores
are all busy it only takes turns with backward: there each rank moves what is under way when it starts a bucket, and
does the rest at the end. So it does where arrays may go straight between the GPUs of one node: that takes less time
than the hooks of backward would lose to a thread that holds the interpreter now and then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from mpdist.algorithms.devices.joining import can_join
from mpdist.torch.progress import Progress, is_thread_worth

if TYPE_CHECKING:
    from mpdist.comm import Communicator


class Overlap:
    """Drives the reductions of one module.

    Attributes:
        has_thread: a thread drives during backward; else the caller does, now and then.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        engine = comm._channel.engine
        self._engine = engine
        self._progress = Progress(engine)
        nodes = len({engine.nodes[rank] for rank in comm.ranks})
        self.has_thread = (
            comm.size > 1
            and engine.is_threaded
            and (device.type == "cpu" or not can_join(comm._channel))
            and is_thread_worth(nodes, *engine.crowd, computing_threads(device))
        )

    def started(self, is_last: bool) -> None:
        """A bucket has started; after the last one backward ends soon, and this thread drives then."""
        if self.has_thread:
            self._progress.posted()
        elif not is_last:
            self._engine.drive()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """This thread waits, and so drives by itself."""
        thread = threading.get_ident()
        self._progress.waiting.add(thread)
        try:
            yield
        finally:
            self._progress.waiting.discard(thread)

    def stop(self) -> None:
        """End the thread."""
        self._progress.stop()


def computing_threads(device: torch.device) -> int:
    """Threads of a rank that backward keeps busy; that of a device only queues kernels."""
    return torch.get_num_threads() if device.type == "cpu" else 1
