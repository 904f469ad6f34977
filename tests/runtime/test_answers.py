"""Answers: what a rank can say of its pending operations."""

from __future__ import annotations

import numpy as np
import pytest

from mpdist import Communicator
from mpdist.runtime.answers import operation_of

pytestmark = pytest.mark.ranks(2, 3)


async def test_a_receive_knows_what_has_come_from_its_peers_unasked(comm: Communicator) -> None:
    if comm.rank == 1:
        for tag in (1, 3):
            await comm.send(np.ones(tag), 0, tag)
    elif comm.rank == 0:
        works = [comm.recv(src=1, tag=2), comm.recv(tag=2), comm.recv(src=0)]
        await comm.recv(src=1, tag=3)  # it comes behind the other
        come = ("float64 x 1 from rank 1, tag 1",)
        assert [operation_of(work).queued for work in works] == [come, come, ()]
        for work in works:
            work.cancel()
        await comm.recv(src=1, tag=1)
