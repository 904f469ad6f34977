"""Transfers: no memory for a message, and cancellation in the middle of one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from algorithms.forcing import NATIVE, forced

import mpdist
from mpdist import Communicator
from mpdist.memory import BY_DTYPE
from mpdist.progress import wire
from mpdist.progress.transfer import Pieces

# What other tests have freed would be memory for large arrays.
pytestmark = [pytest.mark.ranks(2), pytest.mark.apart]

COUNT = 8 * 1024**2  # 64 MiB of float64


@contextlib.contextmanager
def no_memory_for_large_arrays() -> Iterator[None]:
    """Real MemoryErrors, for what is larger than 16 MiB."""
    gc.collect()  # what goes later would make room
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 16 * 1024**2, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


async def kept(comm: Communicator) -> None:
    """Until a message has come and is kept: a receive of another tag has passed it."""
    while not comm._channel.inbox.unclaimed():
        work = comm.recv(tag=99)
        await asyncio.sleep(0.001)
        assert work.cancel()


@pytest.mark.parametrize(
    "op", ["broadcast_object", "all_gather_object", "scatter", "scatter list", "all_gather", "all_reduce"]
)
async def test_a_collective_for_which_there_is_no_memory_leaves_no_rank_out_of_step(
    comm: Communicator, op: str
) -> None:
    """The other rank waits for what this one had no memory to post: a later collective must not be taken for it."""
    is_short = comm.rank == 1
    x = np.ones(COUNT, np.float16 if op == "all_reduce" else np.float64)

    def call(made: Communicator) -> mpdist.Work[object]:
        if op == "all_reduce":
            return made.all_reduce(x)
        if op == "all_gather":
            return made.all_gather([x])
        if op == "all_gather_object":
            return made.all_gather_object(None if is_short else x)
        if op == "broadcast_object":
            return made.broadcast_object(None if is_short else x)
        whole = [x[:1], x] if op == "scatter list" else x
        return made.scatter(None if is_short else whole, 0)

    async with forced(comm, NATIVE) as made:
        if is_short:
            with no_memory_for_large_arrays(), pytest.raises(mpdist.CommunicationError, match="MemoryError"):
                await call(made)
            with pytest.raises(mpdist.ClosedError, match="had no memory, so its ranks may be out of step"):
                made.barrier()
        else:
            with pytest.raises(mpdist.WorkTimeout):
                await call(made).within(0.5)


async def test_an_array_for_which_there_is_no_memory_stays_queued(comm: Communicator) -> None:
    if comm.rank == 0:
        sent = comm.send(np.arange(COUNT, dtype=np.float64), 1, 3)
        await comm.barrier()
        await sent
        return
    await kept(comm)
    with no_memory_for_large_arrays():
        work = comm.recv(tag=3)
        with pytest.raises(mpdist.CommunicationError, match=f"float64 x {COUNT} from rank 0, tag 3") as caught:
            await work
    for word in ("recv from any rank, tag 3", "stays queued", "free memory", "MemoryError"):
        assert word in str(caught.value)
    assert isinstance(caught.value.__cause__, MemoryError)
    await comm.barrier()
    message = await comm.recv(tag=3)
    assert (message.data == np.arange(COUNT)).all()
    assert comm._channel.unfinished() == []


async def test_a_receive_that_waits_fails_too_and_the_next_gets_the_message(comm: Communicator) -> None:
    if comm.rank == 0:
        await comm.recv(tag=1)
        await comm.send(np.arange(COUNT, dtype=np.float64), 1, 3)
        return
    work = comm.recv(tag=3)
    with no_memory_for_large_arrays():
        await comm.send(np.zeros(1), 0, 1)
        with pytest.raises(mpdist.CommunicationError, match="stays queued"):
            await work
    assert (await comm.recv(np.empty(COUNT), tag=3)).data[-1] == COUNT - 1


@pytest.mark.parametrize("arrays", [0, 1], ids=["whole", "pieces"])
async def test_an_object_for_which_there_is_no_memory_stays_queued(comm: Communicator, arrays: int) -> None:
    """Whole, and where its arrays follow its pickle, which has come already."""
    item = [np.arange(COUNT)] if arrays else [bytes(8 * COUNT)]
    if comm.rank == 0:
        sent = comm.send_object(item, 1, 3)
        await comm.barrier()
        await sent
        return
    await kept(comm)
    with no_memory_for_large_arrays(), pytest.raises(mpdist.CommunicationError, match="stays queued"):
        await comm.recv_object(tag=3)
    await comm.barrier()
    received = (await comm.recv_object(tag=3)).data
    assert (received[0] == item[0]).all() if arrays else received == item
    assert comm._channel.unfinished() == []
    assert comm._channel.inbox.unclaimed() == []


async def test_a_receive_that_is_cancelled_in_the_middle_still_writes_and_the_next_gets_the_message(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The array's second half is sent when the receive of it has been cancelled."""
    count = 1000
    monkeypatch.setattr(wire, "PIECE_BYTES", 8 * count // 2)
    x = np.arange(float(count))
    if comm.rank == 0:
        channel = comm._channel
        tags = [wire.wire_tag(1, code) for code in (wire.ARRAY_IN_PIECES + BY_DTYPE[x.dtype].code, wire.PIECE)]
        requests = [channel.isend([wire.pack_size(x.nbytes), 8, channel.byte], 1, tags[0])]
        requests.append(channel.isend([x, x.nbytes // 2, channel.byte], 1, tags[1]))
        await comm.recv(tag=2)
        requests.append(channel.isend([x[count // 2 :], x.nbytes // 2, channel.byte], 1, tags[1]))
        await comm.barrier()
        assert all(request.Test() for request in requests)
        return
    out = np.full(count, -1.0)
    work = comm.recv(out, tag=1)
    task = asyncio.ensure_future(work)
    while work._request is None:  # type: ignore[attr-defined]  # until it has met its message  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert not work.cancel()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.cancelled()
    assert (out[count // 2 :] == -1).all()
    await comm.send(np.zeros(1), 0, 2)
    message = await comm.recv(tag=1)
    assert (out == x).all()
    assert (message.data == x).all()
    assert not np.shares_memory(message.data, out)
    assert comm._channel.inbox.unclaimed() == []
    assert comm._channel.unfinished() == []
    await comm.barrier()


async def test_pieces_that_come_count_as_a_move(comm: Communicator) -> None:
    """Else a receiver would sleep between two pieces of a message, though it is far from whole."""
    x = np.arange(4.0)
    channel = comm._channel
    if comm.rank == 0:
        frames = [memoryview(pickle.dumps(None)), *[memoryview(x).cast("B")] * 3]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wire, "SMALL_FRAME_BYTES", 0)
            head = wire.pack_frames(frames, inline=False)
            await comm.recv(tag=2)
            requests = [channel.isend([head, len(head), channel.byte], 1, wire.wire_tag(1, wire.OBJECT_IN_PIECES))]
            await comm.recv(tag=2)
            piece = ([x, x.nbytes, channel.byte], 1, wire.wire_tag(1, wire.PIECE))
            requests += [channel.isend(*piece), channel.isend(*piece)]
            await comm.recv(tag=2)
            requests.append(channel.isend(*piece))
            await comm.barrier()
        assert all(request.Test() for request in requests)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "SMALL_FRAME_BYTES", 0)
        work = comm.recv_object(tag=1)
        await comm.send(np.zeros(1), 0, 2)
        while not isinstance(work._request, Pieces):  # type: ignore[attr-defined]
            channel.engine.drive()
        pieces = work._request  # type: ignore[attr-defined]
        await comm.send(np.zeros(1), 0, 2)
        while len(pieces._requests) < 2:
            before = len(pieces._requests)
            moved = channel.engine.drive()
            assert moved or len(pieces._requests) == before
        assert not work.done()
        await comm.send(np.zeros(1), 0, 2)
        assert (await work).data is None
    await comm.barrier()
