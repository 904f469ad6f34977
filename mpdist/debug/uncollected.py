"""Uncollected: while frames of other threads are read, no garbage is collected.

In Python 3.11 to read `frame.f_back` may make an object, so it may start a collection, whose finalizers may let the
other thread run: its frames end while C code still goes through them, and the process with it.
"""

from __future__ import annotations

import gc
import threading
from contextlib import ContextDecorator


class _Uncollected(ContextDecorator):
    """A block, or a function, in any number of threads at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._was_enabled:
                gc.enable()


uncollected = _Uncollected()
