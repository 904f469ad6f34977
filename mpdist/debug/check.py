"""Check: before a collective runs, all ranks gather what each of them calls.

The comparison is the collective's own first step, on the same communicator. So it
keeps the order of collectives, and where ranks differ nothing was executed: all of
them skip the call, and the communicator stays usable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.debug.fingerprint import NBYTES, Call, mismatch_error
from mpdist.debug.guard import guard, guarded
from mpdist.debug.lines import caller
from mpdist.memory import as_buffer
from mpdist.progress.collective import Steps

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel
    from mpdist.progress.engine import Engine


def install_debug(engine: Engine) -> None:
    """Watch the operations of the communicators made from now on; to be done on all ranks."""
    engine.on_channel = watch


def watch(channel: Channel) -> None:
    """Compare all its collectives, and guard the memory of all its operations."""
    channel.check = check
    channel.signer = None  # it compares less
    guard(channel)


def check(
    channel: Channel, op: str, details: Callable[[], str], steps: Steps[Any], arguments: Sequence[object]
) -> Steps[Any]:
    """The steps, guarded, after a comparison.

    Raises:
        UsageError: a buffer belongs to another operation; in the collective's Work: an input has changed.
        CollectiveMismatch: in the collective's Work, on all ranks, with each rank's call and line.
    """
    steps = guarded(channel, op, steps, arguments)
    return _compared(channel, channel.sequence + 1, Call(op, details(), caller()), steps)


def _compared(channel: Channel, sequence: int, call: Call, steps: Steps[Any]) -> Steps[Any]:
    rows = np.zeros((channel.size, NBYTES), np.uint8)
    yield channel.transport.iall_gather(as_buffer(call.pack()), as_buffer(rows, writable=True))
    calls = {rank: Call.unpack(row.tobytes()) for rank, row in enumerate(rows)}
    error = mismatch_error(channel.name, sequence, calls)
    if error is not None:
        steps.close()
        raise error
    return (yield from steps)
