"""Monitored barrier: a barrier that names the ranks which did not come.

Rank 0 hears from every other rank, and then answers. So it knows who is missing; the texts are those of torch's own
for gloo, which programs look for. Nothing here is a collective: after a failure the group stays usable.

After a timeout messages of that barrier are still to come. So each carries a stamp, which grows from barrier to
barrier, and those of earlier barriers are dropped.
"""

from __future__ import annotations

from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from mpdist.errors import MpdistError
from mpdist.torch.errors import OperationFailed, OperationTimeout, WrongCall

if TYPE_CHECKING:
    from mpdist.progress.work import Work
    from mpdist.torch.group import Group

# The largest tags are ours; torch's users count from 0.
_ARRIVED, _PASSED = 0, 1

Stamp = tuple[int, int]
"""How many collectives the group has had, and how many monitored barriers since the last of them: a rank that has left
a barrier out is in step again after the next collective."""


def monitored_barrier(group: Group, timeout: timedelta | float | None, *, wait_all_ranks: bool) -> None:
    """Return when all ranks of the group have called it.

    Raises:
        OperationTimeout: not within the timeout; on rank 0 the text names who is missing.
    """
    seconds = _seconds(group, timeout)
    if group._rank == 0:
        _collect(group, seconds, wait_all_ranks=wait_all_ranks)
    else:
        _report(group, seconds)


def _collect(group: Group, seconds: float, *, wait_all_ranks: bool) -> None:
    end = monotonic() + seconds
    stamp = _next_stamp(group)
    arrivals = {rank: _receive(group, rank, _ARRIVED) for rank in range(1, group._size)}
    came: dict[int, Stamp] = {}
    missing = []
    for rank, arrival in arrivals.items():
        theirs = _heard(group, rank, _ARRIVED, arrival, stamp, end)
        if theirs is not None:
            came[rank] = theirs
            continue
        missing.append(rank)
        if not wait_all_ranks:
            break
    for arrival in arrivals.values():
        if not arrival.done():
            arrival.cancel()
    if missing:
        raise OperationTimeout(_text(missing, seconds, wait_all_ranks=wait_all_ranks), None, missing)
    for rank, theirs in came.items():
        _send(group, rank, _PASSED, theirs)


def _report(group: Group, seconds: float) -> None:
    stamp = _next_stamp(group)
    _send(group, 0, _ARRIVED, stamp)
    answer = _receive(group, 0, _PASSED)
    # Rank 0 waits for others within its own limit, and may have come later than we.
    if _heard(group, 0, _PASSED, answer, stamp, monotonic() + 2 * seconds) is None:
        rank = group._rank
        raise OperationTimeout(
            f"[Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
            "send/recv from rank 0. Please check rank 0 logs for faulty rank.\n Original exception: \n"
            f"mpdist: Timed out waiting {2 * seconds * 1000:g}ms for the answer of rank 0",
            answer,
            [0],
        )


def _heard(group: Group, rank: int, stage: int, message: Work[Any], stamp: Stamp, end: float) -> Stamp | None:
    """The stamp of a message of this barrier, received until `end`; those of earlier ones are dropped."""
    while _came(group, message, end - monotonic()):
        sequence, count = message.result().data.tolist()
        if (sequence, count) >= stamp:
            return sequence, count
        message = _receive(group, rank, stage)
    message.cancel()
    return None


def _next_stamp(group: Group) -> Stamp:
    sequence, count = group._monitored
    here = group._channel.sequence
    group._monitored = (here, count + 1 if here == sequence else 0)
    return group._monitored


def _text(missing: list[int], seconds: float, *, wait_all_ranks: bool) -> str:
    milliseconds = f"{seconds * 1000:g} ms"
    if seconds == 0:
        return f"[Rank 0]: Rank {missing[0]} failed: Rank 0 timed out in monitoredBarrier after {milliseconds}."
    if wait_all_ranks:
        return f"[Rank 0]: Ranks {', '.join(map(str, missing))} failed to pass monitoredBarrier in {milliseconds}"
    return f"[Rank 0]: Rank {missing[0]} failed to pass monitoredBarrier in {milliseconds}"


def _seconds(group: Group, timeout: timedelta | float | None) -> float:
    if timeout is None:
        return group._waiter.seconds or float("inf")
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if not isinstance(timeout, int | float):
        raise WrongCall(f"monitored_barrier: timeout must be a timedelta, got {type(timeout).__name__}")
    return float(timeout)


def _came(group: Group, work: Work[Any], seconds: float) -> bool:
    try:
        if not group._engine.wait(work, max(seconds, 0.0) if seconds < threading_limit() else None):
            return False
        work.result()
    except MpdistError as error:
        raise OperationFailed(f"monitored_barrier: {error}") from error
    return True


def threading_limit() -> float:
    """More seconds than this are for ever."""
    import threading

    return threading.TIMEOUT_MAX


def _tag(group: Group, stage: int) -> int:
    return group._channel.max_tag - stage


def _send(group: Group, rank: int, stage: int, stamp: Stamp) -> None:
    group._comm.send(torch.tensor(stamp, device="cpu"), rank, _tag(group, stage))


def _receive(group: Group, rank: int, stage: int) -> Any:
    return group._comm.recv(torch.zeros(2, dtype=torch.int64, device="cpu"), rank, _tag(group, stage))
