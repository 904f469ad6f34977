"""Standstill: ends a pause as soon as the thread that made it has fallen asleep, as one does that waits in C++.

Python does not see such a wait. The kernel says of a thread whether it sleeps, and how often it has run: one that only
waits for its turn at the interpreter wakes every few milliseconds, and one that the machine leaves no time does not
sleep.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from typing import Protocol

# A thread that has slept so long without waking waits for something. DDP with a static graph comes here once.
SECONDS = 0.05


class Pause(Protocol):
    """What is held while a thread goes on; to resume again, or after something else has, is without effect."""

    def resume(self) -> None:
        """End the pause, without waiting for anything."""
        ...


class _Watched:
    """A pause, the thread that has begun it, and how that was seen last."""

    def __init__(self, pause: Pause) -> None:
        self.number = id(pause)
        self._pause = weakref.ref(pause)
        self._thread = threading.get_native_id()
        self._state: str | None = None

    def is_over(self) -> bool:
        """Whether its thread has slept since this was asked last: then it ends."""
        pause = self._pause()
        if pause is None:
            return True
        before, self._state = self._state, _sleep(self._thread)
        if before is None or before != self._state:
            return False
        pause.resume()
        return True


# Python says of this queue that it may be put into wherever garbage is collected.
_made: queue.SimpleQueue[_Watched | Pause] = queue.SimpleQueue()
_starting = threading.Lock()
_thread: threading.Thread | None = None


def start() -> None:
    """Start the thread that ends pauses; before the first is made."""
    global _thread
    if _thread is None:
        with _starting:
            if _thread is None:
                _thread = threading.Thread(target=_watch, name="mpdist-standstill", daemon=True)
                _thread.start()


def once_asleep(pause: Pause) -> None:
    """End the pause as soon as this thread sleeps."""
    _made.put(_Watched(pause))


def elsewhere(pause: Pause) -> None:
    """End the pause at once, in another thread: this one may hold any lock."""
    _made.put(pause)


def _watch() -> None:
    watched: dict[int, _Watched] = {}
    while True:
        while not (watched and _made.empty()):
            latest = _made.get()
            if isinstance(latest, _Watched):
                watched[latest.number] = latest
            else:
                latest.resume()
            del latest
        time.sleep(SECONDS)
        watched = {key: each for key, each in watched.items() if not each.is_over()}


def _sleep(thread: int) -> str | None:
    """Of a thread that sleeps, how often it has run, else None; where the kernel doesn't say, it always sleeps."""
    try:
        with open(f"/proc/self/task/{thread}/status") as file:
            text = file.read()
    except OSError:
        return ""
    state, _, rest = text.partition("State:\t")[2].partition("\n")
    return rest.partition("voluntary_ctxt_switches:")[2] if state.startswith("S") else None
