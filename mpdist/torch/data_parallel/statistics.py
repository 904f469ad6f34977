"""Statistics: where the time of a step goes.

A step begins where the one before ended. All ranks end a step together, because
the last message needs all of them: so the rank that computed longest is the one
that the others waited for, and no common clock is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpdist.torch.data_parallel.bucket import Bucket

# So many steps are remembered.
REMEMBERED = 1000


@dataclass(frozen=True)
class Step:
    """Seconds of one step on this rank.

    Attributes:
        step: its number, from 1.
        total: from the end of the step before to the end of this one.
        compute: until backward was over: forward, backward, and whatever else the program did.
        backward: the part of it in backward.
        communication: during which a message was under way.
        hidden: the part of it during backward.
        exposed: from the end of backward until all gradients were averaged.
        waiting: the part of `exposed` in which the slowest rank still computed.
        slowest: rank that computed longest; this rank if it was itself.
        nbytes: bytes of gradients sent.
        buckets: number of messages.
    """

    step: int
    total: float
    compute: float
    backward: float
    communication: float
    hidden: float
    exposed: float
    waiting: float
    slowest: int
    nbytes: int
    buckets: int


@dataclass(frozen=True)
class Statistics:
    """The last steps of this rank, and their means in seconds.

    Attributes:
        steps: the steps themselves, the last one at the end; the first one of the training is not among them.
        slowest: for each rank, in how many of the steps it was the slowest.
    """

    steps: tuple[Step, ...]
    total: float
    compute: float
    communication: float
    hidden: float
    exposed: float
    waiting: float
    slowest: dict[int, int]
    nbytes: int

    def __str__(self) -> str:
        if not self.steps:
            return "no steps yet"
        share = self.hidden / self.communication if self.communication else 0.0
        rank, often = max(self.slowest.items(), key=lambda item: item[1])
        return (
            f"{len(self.steps)} steps of {1e3 * self.total:.2f} ms: compute {1e3 * self.compute:.2f}, "
            f"communication {1e3 * self.communication:.2f} ({100 * share:.0f} % hidden), exposed "
            f"{1e3 * self.exposed:.2f}, of it waiting {1e3 * self.waiting:.2f} (slowest: rank {rank} in "
            f"{100 * often / len(self.steps):.0f} %), {self.nbytes / 2**20:.2f} MiB a step"
        )


class Clock:
    """Takes the times of the steps."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._steps: deque[Step] = deque(maxlen=REMEMBERED)
        self._number = 0
        self._last = perf_counter()
        self._begin = self._end = self._last

    def backward_begins(self) -> None:
        self._begin = self._end = perf_counter()

    def backward_ends(self) -> None:
        self._end = perf_counter()

    def computed(self) -> float:
        """Seconds that this rank has computed in this step so far."""
        return perf_counter() - self._last

    def step_ends(self, buckets: Sequence[Bucket], seconds: Sequence[float]) -> None:
        """All gradients are averaged; `seconds` is what each rank computed, as far as told."""
        now = perf_counter()
        self._number += 1
        spans = [(bucket.started_at, bucket.done_at or now) for bucket in buckets if bucket.started_at]
        compute = self._end - self._last
        slowest = max(range(len(seconds)), key=seconds.__getitem__) if seconds else self._rank
        behind = max(0.0, seconds[slowest] - compute) if seconds else 0.0
        if self._number > 1:  # the first step makes the buckets
            self._steps.append(
                Step(
                    step=self._number,
                    total=now - self._last,
                    compute=compute,
                    backward=self._end - self._begin,
                    communication=covered(spans),
                    hidden=covered([(start, min(end, self._end)) for start, end in spans if start < self._end]),
                    exposed=now - self._end,
                    waiting=min(behind, now - self._end),
                    slowest=slowest,
                    nbytes=sum(bucket.nbytes for bucket in buckets),
                    buckets=len(buckets),
                )
            )
        self._last = now

    def statistics(self, last: int | None = None) -> Statistics:
        """The last steps, and their means."""
        steps = tuple(self._steps)[-last if last else 0 :]
        count = max(1, len(steps))
        slowest: dict[int, int] = {}
        for step in steps:
            slowest[step.slowest] = slowest.get(step.slowest, 0) + 1
        return Statistics(
            steps,
            sum(step.total for step in steps) / count,
            sum(step.compute for step in steps) / count,
            sum(step.communication for step in steps) / count,
            sum(step.hidden for step in steps) / count,
            sum(step.exposed for step in steps) / count,
            sum(step.waiting for step in steps) / count,
            slowest,
            sum(step.nbytes for step in steps) // count,
        )


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
