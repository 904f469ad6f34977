"""Between nodes: calls that do not go together, requests that MPI fails, inputs that are sent as they are.

What each operation gives, on one rank of each node, too: test_shared_memory.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from algorithms.forcing import ALONE, PAIRS, Way, forced, replaced

import mpdist
from mpdist import Communicator
from mpdist.memory import Buffer, as_buffer
from mpdist.progress.roll import Signer
from mpdist.transport.mpi import Transport

pytestmark = [pytest.mark.ranks(3), pytest.mark.limit(60)]

SLICE = 256 * 1024
"""Of a chain, at the least."""


@pytest.fixture
async def lost(comm: Communicator) -> AsyncIterator[Communicator]:
    """A communicator with one rank on each node, on which ranks get out of step; nobody waits for its end."""
    with replaced(comm, ALONE):
        lost = await comm.dup()
        yield lost
        lost._closed("the test is over")
        await comm.barrier()


@pytest.mark.parametrize("op", ["all_gather", "broadcast", "all_to_all"])
async def test_slices_of_different_calls_are_not_taken_for_each_others(
    lost: Communicator, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """Rank 1 has more slices than the others, all as long: none may end well, with a wrong slice."""
    monkeypatch.setattr(Signer, "_differ", lambda *arguments: None)  # which ranks of other nodes would not tell
    slices = {"all_gather": 4, "broadcast": 4, "all_to_all": 12}[op]
    x = np.full(SLICE * (slices + 3 * (lost.rank == 1)), lost.rank, np.uint8)
    call = {"all_gather": lost.all_gather, "broadcast": partial(lost.broadcast, src=1), "all_to_all": lost.all_to_all}
    ended = await asyncio.gather(call[op](x).within(0.5), return_exceptions=True)
    if not (op == "broadcast" and lost.rank == 1):  # its messages may have gone
        assert isinstance(ended[0], mpdist.WorkTimeout)


async def test_where_mpi_fails_one_request_of_several_the_communicator_is_given_up(
    lost: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = Transport.ireceive_from
    calls = [0]

    def into_too_little(self: Transport, buffer: Buffer, src: int, tag: int) -> Any:
        calls[0] += 1
        return receive(self, as_buffer(buffer.array()[:16]) if calls[0] == 2 else buffer, src, tag)

    out = np.zeros((3, 8 * SLICE), np.uint8)
    wrecks = lost._channel.engine.wrecks
    before = len(wrecks)
    if lost.rank == 1:
        monkeypatch.setattr(Transport, "ireceive_from", into_too_little)
        with pytest.raises(mpdist.CommunicationError, match=r"all_gather.*(?i:truncate)"):
            await lost.all_gather(out[1].copy(), out=out)
        assert len(wrecks) == before + 1  # what it holds stays, for MPI may write to it
        with pytest.raises(mpdist.ClosedError, match="out of step"):
            lost.barrier()
    else:
        with pytest.raises(mpdist.WorkTimeout):
            await lost.all_gather(out[lost.rank].copy(), out=out).within(0.5)


@pytest.mark.parametrize("way", [ALONE, PAIRS], ids=str)
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("count", [1, 999, 200_003])
async def test_reduce_scatter_only_reads_its_input(
    comm: Communicator, way: Way, op: str, dtype: str, count: int
) -> None:
    x = (np.arange(3 * count) % 61 + comm.rank).astype(dtype)
    x.flags.writeable = False
    before = x.copy()
    own = (np.arange(3 * count) % 61)[comm.rank * count :][:count]
    wanted = {"sum": 3 * own + 3, "avg": own + 1, "max": own + 2}[op]
    async with forced(comm, way) as made:
        result = await made.reduce_scatter(x, op)
    assert result.dtype == x.dtype
    np.testing.assert_array_equal(result, wanted.astype(dtype))
    np.testing.assert_array_equal(x, before)
