"""Dropped: communicators that went without `close()` are closed when another one is made.

Python drops them on each rank at a moment of its own, so one that is gone here may still be in use elsewhere.
Where ranks make a communicator, they tell each other which they have dropped; those that all their members have
are closed like any other, and given back to MPI, which has room for some 2000 (MPICH).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from mpdist.memory import as_buffer
from mpdist.progress.collective import Steps, Until

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel, Dropped
    from mpdist.transport.mpi import Transport

_NOBODY = 0  # fills the rows of members that have dropped fewer


def closable(dropped: list[Dropped]) -> list[Dropped]:
    """Those on which nothing is pending here; the others stay for later, but for those that were closed meanwhile."""
    for each in list(dropped):  # a collector of garbage may add to it at any moment
        if each.channel.broken:
            dropped.remove(each)
    return [each for each in list(dropped) if not each.channel.unfinished()]


def close_common(transport: Transport, own: Sequence[Dropped], dropped: list[Dropped], most: int) -> Steps[None]:
    """Close what all members have dropped; collective over the transport.

    Args:
        own: what this member has, those that are closed go from `dropped`, too.
        most: so many has the member that has most.
    """
    if not most:
        return
    mine, everyone = np.full(most, _NOBODY, np.uint64), np.empty((transport.size, most), np.uint64)
    mine[: len(own)] = [_key(each.channel) for each in own]
    yield transport.iall_gather(as_buffer(mine), as_buffer(everyone))
    keys = {rank: set(row.tolist()) for rank, row in zip(transport.world_ranks(), everyone, strict=True)}
    common = [
        each
        for each in own
        if each in dropped  # where several are made at once, another may have closed it meanwhile
        and all(_key(each.channel) in keys.get(rank, ()) for rank in each.channel.world_ranks)
    ]
    for each in common:
        dropped.remove(each)
    closings = [each.close() for each in common]
    yield Until(lambda: all(work._done for work in closings))


def _key(channel: Channel) -> int:
    return int.from_bytes(blake2b(channel.name.encode(), digest_size=8).digest()) or 1
