"""Back-off: how long to wait between two looks at the pending operations.

Pure arithmetic, tested without a clock. MPI has no file descriptor to wait on,
so whoever waits must look again. Short operations end within microseconds:
look at once for a while, then sleep a fraction of the time already waited, so
that the sleep never adds more than that fraction to a wait, and no more than
the cap. Whoever is woken by the doorbell of a peer sleeps for longer yet when
it has waited for long: its timer is for a ring that was lost.
"""

from __future__ import annotations

from dataclasses import dataclass

# An await drives the Engine itself before it gives its turn away. Both limits keep other tasks alive: bench/core.py.
TURN_CREDIT = 128
"""What operations that complete inside awaits may cost together before the event loop gets a real turn."""
USUAL_CREDIT = 2
"""What one costs that goes through MPI or the Engine, or is a collective; half as much a message by shared memory."""
TURN_SECONDS = 0.0005
"""The same as time, where it is looked at."""
TURN_BYTES = 32 * 1024
"""Each further so many bytes cost one more credit: MPI copies about 3-10 GB/s, a turn is to end within TURN_SECONDS."""

# MPI moves large data by a segment at a look, and a look does not say whether it did; both sides must look for each. So
# nobody sleeps while data of some MiB may be moving: a reduce of 4 MiB by Open MPI took 550 ms with sleeps, and takes 8
# without. A request that does not end within a second waits for a late rank, which rings when it comes.
REQUEST_HOT_SECONDS = 0.02
REQUEST_CAP_SECONDS = 0.0002
REQUEST_SECONDS = 1.0


@dataclass(frozen=True)
class Backoff:
    """How patient a waiter is.

    Attributes:
        inline_polls: looks inside an await before the task is parked.
        hot_seconds: time since the last progress during which nobody sleeps.
        fraction: sleep this part of the time waited so far.
        cap_seconds: but never longer than this,
        rung_fraction: nor, where only messages are awaited whose senders ring, than this part of the time waited,
        rung_cap_seconds: nor than this.
        yields: give the processor away between two looks inside an await, too; for more ranks than cores. A loop's
            turns do so in any case: others may use the cores, of whom nobody tells.
    """

    inline_polls: int = 400
    hot_seconds: float = 0.001
    fraction: float = 0.25
    cap_seconds: float = 0.01
    rung_fraction: float = 0.04
    rung_cap_seconds: float = 0.05
    yields: bool = False

    def delay(self, idle_seconds: float, has_requests: bool = False, is_rung: bool = False) -> float:
        """Seconds to sleep after `idle_seconds` without progress; 0 is "look again at once".

        Args:
            has_requests: MPI has something of ours under way, which may need many looks that show nothing.
            is_rung: the sleep ends when a peer rings.
        """
        if idle_seconds < self.hot_seconds:
            return 0.0
        if has_requests and idle_seconds < REQUEST_SECONDS:
            if idle_seconds < REQUEST_HOT_SECONDS:
                return 0.0
            return min(REQUEST_CAP_SECONDS, self.fraction * idle_seconds)
        cap = self.cap_seconds
        if is_rung and not has_requests:
            cap = max(cap, min(self.rung_cap_seconds, self.rung_fraction * idle_seconds))
        return min(cap, self.fraction * idle_seconds)


def policy(ranks: int, cores: int) -> Backoff:
    """The patience for this many ranks that share this many cores."""
    if ranks <= cores:
        return Backoff()
    # A rank that sleeps in the middle of MPI's steps holds all others up; one that yields costs nobody anything.
    return Backoff(inline_polls=200, hot_seconds=0.02, yields=True)


def message_credit(nbytes: int) -> int:
    """What a message of this size costs of a turn's credit."""
    return USUAL_CREDIT + nbytes // TURN_BYTES
