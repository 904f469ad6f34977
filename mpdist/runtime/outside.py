"""Outside: what may set a waiting task going, beside operations and other tasks.

Timers, descriptors, signal handlers and threads of the program. What they will do
can't be known: where there are any, a wait that they may end is not held for endless.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from mpdist.progress.engine import Engine
from mpdist.progress.ticking import Ticking

# asyncio's own timers wake tasks that are seen to sleep, or to have a limit; the Engine's only looks.
_TICK = Ticking._tick.__qualname__


def has_timers(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the program has asked the loop to call something later: a timeout of anyio's kind, maybe."""
    return any(
        getattr(callback, "__qualname__", "") != _TICK
        and not str(getattr(callback, "__module__", None)).startswith("asyncio.")
        for callback in _scheduled(loop)
    )


def _scheduled(loop: asyncio.AbstractEventLoop) -> Iterator[Any]:
    """Callbacks of the loop's timers, of asyncio's and of uvloop's kind."""
    for handle in gc.get_objects():
        if type(handle).__name__ != "TimerHandle" or handle.cancelled() or not getattr(handle, "_scheduled", True):
            continue
        parts = gc.get_referents(handle)
        if any(part is loop for part in parts):
            yield from [part for part in parts if callable(part) and not isinstance(part, type)][:1]


def has_events(engine: Engine, loop: asyncio.AbstractEventLoop) -> bool:
    """Whether descriptors or signals have callbacks; uvloop does not tell."""
    if getattr(loop, "_signal_handlers", None):
        return True
    selector: Any = getattr(loop, "_selector", None)
    if selector is None:
        return False
    watched = selector.get_map() or ()
    own = getattr(loop, "_internal_fds", 0) + (engine.doorbell.fileno() in watched)
    return len(watched) > own


def has_threads(*but: int) -> bool:
    """Whether the program has threads that may run, other than these, the caller and mpdist's own."""
    own = {thread.ident for thread in threading.enumerate() if thread.name.startswith("mpdist-")}
    own |= {threading.get_ident(), *but}
    return any(thread not in own and not _is_idle(frame) for thread, frame in sys._current_frames().items())


def has_joined_threads() -> bool:
    """Whether there are threads with something to do for whose end Python waits at its own."""
    frames = sys._current_frames()
    threads = [each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    return any(each.ident in frames and not _is_idle(frames[each.ident]) for each in threads)


def _is_idle(frame: FrameType) -> bool:
    """Whether it is a thread of an executor that waits for something to do."""
    code = frame.f_code
    return code.co_name == "_worker" and code.co_filename.endswith("concurrent/futures/thread.py")
