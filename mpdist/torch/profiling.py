"""Profiling: an event for each operation, `mpdist:all_reduce`, from its call to its end.

torch takes an event for asynchronous if it ends on another thread than it began on; so ours ends on the thread for
asynchronous operations, and whoever waits for the operation waits for that. An event must not end after its profiler:
its memory is gone then. So the end of a profiler ends the events that are open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpdist.torch.registration import NAME

if TYPE_CHECKING:
    from mpdist.torch.progress import Progress

_Record: Any = getattr(torch._C._profiler, "_RecordFunctionFast", None)

is_enabled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Whether a profiler runs on this thread."""

_open: set[Event] = set()
_hooking = threading.Lock()
_is_hooked = False


class Event:
    """An event that has begun."""

    def __init__(self, name: str, tensors: Sequence[Tensor], progress: Progress) -> None:
        self._record = _Record(f"{NAME}:{name}", list(tensors))
        self._progress = progress
        self._thread = threading.get_ident()
        self._ending = threading.Lock()
        self._record.__enter__()
        _open.add(self)

    def end(self) -> None:
        """End it, once; returns when that is done."""
        if threading.get_ident() != self._thread:
            self._end()
            return
        ended = threading.Event()

        def end_elsewhere() -> None:
            self._end()
            ended.set()

        self._progress.later(end_elsewhere)
        ended.wait()

    def _end(self) -> None:
        with self._ending:
            record, self._record = self._record, None
            if record is not None:
                record.__exit__(None, None, None)
        _open.discard(self)


def begin(name: str, tensors: Sequence[Tensor], progress: Progress) -> Event | None:
    """Begin an event; None where torch has none of this kind."""
    if _Record is None or not _hook():
        return None
    return Event(name, tensors, progress)


def _hook() -> bool:
    """Let the end of a profiler end the open events; False where this torch ends profilers in another way."""
    global _is_hooked
    with _hooking:
        if _is_hooked:
            return True
        profiler: Any = torch.autograd.profiler
        disable = getattr(profiler, "_disable_profiler", None)
        if disable is None:
            return False

        def end_events_and_disable(*args: Any, **kwargs: Any) -> Any:
            for event in list(_open):
                event.end()
            return disable(*args, **kwargs)

        profiler._disable_profiler = end_events_and_disable
        _is_hooked = True
        return True
