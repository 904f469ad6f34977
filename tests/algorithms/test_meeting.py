"""Members that come together by messages: nothing that the user calls is taken for a part of it."""

from __future__ import annotations

import numpy as np
import pytest
from algorithms.forcing import CHOSEN, PAIRS, SHARED, Way, replaced

import mpdist
from mpdist import Communicator

pytestmark = pytest.mark.ranks(2, 3)

COUNT = 210_000


async def test_mpis_call_on_another_rank_is_no_part_of_the_meeting(comm: Communicator) -> None:
    """The first collective that shares memory tells where: nothing else that a rank calls must be taken for that."""
    with replaced(comm, CHOSEN):
        made = await comm.dup()
    made._channel.signer = None  # as between nodes, where a rank does not see what another one calls
    mine = comm.empty(COUNT, np.int64)
    mine[:] = 7
    is_last = made.rank == made.size - 1
    call = made.barrier() if is_last else made.all_reduce(np.full(4, 4096))
    with pytest.raises(mpdist.WorkTimeout):
        await call.within(0.5)
    assert (mine == 7).all()
    await comm.barrier()
    with pytest.raises(ZeroDivisionError):
        async with made:
            raise ZeroDivisionError


@pytest.mark.parametrize("way", [SHARED, PAIRS], ids=str)
async def test_members_meet_while_others_of_their_communicators_do(comm: Communicator, way: Way) -> None:
    """Each rank uses two new communicators in an order of its own."""
    with replaced(comm, way):
        made = [await comm.dup() for _ in range(2)]
        works = [each.all_reduce(np.ones(COUNT)) for each in (made if comm.rank else reversed(made))]
        for work in works:
            assert (await work == comm.size).all()
    for each in made:
        await each.close()
