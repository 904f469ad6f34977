"""Receives: given up while their message still comes, met by one that does not fit, and what they keep alive."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from typing import Any, cast

import numpy as np
import pytest

import mpdist
from mpdist import Communicator
from mpdist.memory import as_buffer
from mpdist.progress import wire
from mpdist.progress.array_receive import ArrayReceive
from mpdist.progress.message import Message
from mpdist.progress.receive import Receive
from mpdist.progress.sending import posted

pytestmark = pytest.mark.ranks(2)

SOON, HERE, GO = 3, 4, 5
FIRST = np.arange(1000.0)
SECOND = np.full(4, -1.0)


def post(comm: Communicator, data: bytes | np.ndarray[Any, Any], tag: int, code: int) -> mpdist.Work[None]:
    channel = comm._channel
    request = channel.isend([data, len(memoryview(data).cast("B")), channel.byte], 1, wire.wire_tag(tag, code))
    return posted(channel, request, 1, tag, data)


async def send_held_back(comm: Communicator, head: bytes, code: int, piece: np.ndarray[Any, Any]) -> None:
    """Rank 0: a message in pieces, another one, and the piece of the first; each when the receiver says so."""
    await post(comm, head, SOON, code)
    await comm.recv(src=1, tag=GO)
    await comm.send(SECOND, 1, SOON)
    await comm.send(SECOND, 1, HERE)
    await comm.recv(src=1, tag=GO)
    await post(comm, piece, SOON, wire.PIECE)


async def send_array_held_back(comm: Communicator) -> None:
    code = wire.ARRAY_IN_PIECES + as_buffer(FIRST).element.code
    await send_held_back(comm, wire.pack_size(FIRST.nbytes), code, FIRST)


async def give_up(receive: mpdist.Work[Any]) -> None:
    """Cancel an await whose message comes."""
    task = asyncio.ensure_future(receive)
    while cast(Receive, receive).order > 0:  # noqa: ASYNC110  # nothing else tells that it has met its message
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert receive.cancelled()


async def release(comm: Communicator) -> None:
    """The earlier message has been given up: the later one comes, and then the rest of the earlier one."""
    await comm.send(np.zeros(1), 0, GO)
    await comm.recv(src=0, tag=HERE)
    await comm.send(np.zeros(1), 0, GO)


async def test_the_next_receive_waits_for_a_message_that_still_comes(comm: Communicator) -> None:
    if comm.rank == 0:
        await send_array_held_back(comm)
        return
    await give_up(comm.recv(np.empty(1000), 0, SOON))
    first, second = comm.recv(np.empty(1000), 0, SOON), comm.recv(src=0, tag=SOON)
    await release(comm)
    assert (await first).data.tolist() == FIRST.tolist()
    assert (await second).data.tolist() == SECOND.tolist()


async def test_a_receive_that_was_posted_before_waits_for_it_too(comm: Communicator) -> None:
    if comm.rank == 0:
        await send_array_held_back(comm)
        return
    given_up = comm.recv(np.empty(1000), 0, SOON)
    first = comm.recv(src=0, tag=SOON)
    await give_up(given_up)
    await release(comm)
    assert (await first).data.tolist() == FIRST.tolist()
    assert (await comm.recv(src=0, tag=SOON)).count == 4


async def test_a_probe_waits_for_it_too(comm: Communicator) -> None:
    if comm.rank == 0:
        await send_array_held_back(comm)
        return
    await give_up(comm.recv(np.empty(1000), 0, SOON))
    probe = comm.probe(0, SOON)
    await release(comm)
    probed = await probe
    assert probed.count == 1000
    assert (await comm.recv(src=0, tag=SOON)).count == 4
    assert (await probed.recv()).data.tolist() == FIRST.tolist()


async def test_it_may_be_given_up_again(comm: Communicator) -> None:
    if comm.rank == 0:
        await send_array_held_back(comm)
        return
    await give_up(comm.recv(np.empty(1000), 0, SOON))
    await give_up(comm.recv(np.empty(1000), 0, SOON))
    withdrawn = comm.recv(src=0, tag=SOON)
    assert withdrawn.cancel()
    await release(comm)
    assert (await comm.recv(src=0, tag=SOON)).data.tolist() == FIRST.tolist()
    assert (await comm.recv(src=0, tag=SOON)).count == 4


async def test_a_receive_past_its_limit_gives_its_message_back(comm: Communicator) -> None:
    if comm.rank == 0:
        await send_array_held_back(comm)
        return
    with pytest.raises(mpdist.WorkTimeout):
        await comm.recv(np.empty(1000), 0, SOON).within(0.1)
    first = comm.recv(src=0, tag=SOON)
    await release(comm)
    assert (await first).data.tolist() == FIRST.tolist()
    assert (await comm.recv(src=0, tag=SOON)).count == 4


async def test_a_misfit_stays_queued_in_its_place(comm: Communicator) -> None:
    if comm.rank == 0:
        await send_array_held_back(comm)
        return
    await give_up(comm.recv(np.empty(1000), 0, SOON))
    short = comm.recv(np.empty(3), 0, SOON)
    await release(comm)
    with pytest.raises(mpdist.MessageTruncated):
        await short
    assert (await comm.recv(src=0, tag=SOON)).data.tolist() == FIRST.tolist()
    assert (await comm.recv(src=0, tag=SOON)).count == 4


@pytest.mark.parametrize("is_turn_due", [False, True])
async def test_a_misfit_lets_nothing_overtake_its_message(comm: Communicator, is_turn_due: bool) -> None:
    if comm.rank == 0:
        for number in (1, 2):
            await comm.send(np.full(10, number), 1, SOON)
        await comm.send(np.zeros(1), 1, HERE)
        return
    await comm.recv(src=0, tag=HERE)
    if is_turn_due:
        comm._channel.engine.credit = 0
    short, long = comm.recv(np.zeros(5, int), 0, SOON), comm.recv(np.zeros(10, int), 0, SOON)
    with pytest.raises(mpdist.MessageTruncated):
        await short
    assert (await long).data[0] == 1
    assert (await comm.recv(src=0, tag=SOON)).data[0] == 2


class Receives:
    """Waits for a message when it is unpickled."""

    def __init__(self, count: int) -> None:
        self.arrays = [np.zeros(count) for _ in range(3)]

    def __setstate__(self, state: dict[str, Any]) -> None:
        mpdist.init().recv(np.zeros(3), 0, HERE).wait()


@pytest.mark.parametrize("count", [3, 100_000])
def test_whoever_waits_while_an_object_is_unpickled_is_refused(comm: Communicator, count: int) -> None:
    if comm.rank == 0:
        comm.send_object(Receives(count), 1, SOON).wait()
        return
    with pytest.raises(mpdist.CommunicationError, match="while an object was pickled or unpickled"):
        comm.recv_object(0, SOON).wait()
    assert not list(mpdist.init()._channel.inbox.box.waiting())


async def test_a_message_that_has_been_received_is_kept_by_nothing(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would look for what keeps itself alive after some hundred of them, be they of many MB."""
    monkeypatch.setattr(wire, "PIECE_BYTES", 100_000)
    x = np.ones(100_000)
    if comm.rank == 0:
        for _ in range(10):
            await comm.send_object(x, 1, SOON)
            await comm.send(x, 1, SOON)
        return
    gc.collect()
    gc.disable()
    try:
        received = []
        for _ in range(10):
            received.append(weakref.ref((await comm.recv_object(0, SOON)).data.base))
            received.append(weakref.ref((await comm.recv(None, 0, SOON)).data))
            own = comm.send(x, 1, SOON)
            received.append(weakref.ref((await comm.recv(None, 1, SOON)).data))
            await own
        assert [each() for each in received if each() is not None] == []
    finally:
        gc.enable()


async def test_a_receive_that_was_withdrawn_keeps_no_memory(comm: Communicator) -> None:
    if comm.rank == 0:
        return
    waiting = comm.recv(np.zeros(3), 0, HERE)
    arrays = [np.zeros(1000) for _ in range(10)]
    refs = [weakref.ref(each) for each in arrays]
    for array in arrays:
        assert comm.recv(array, 0, SOON).cancel()
        assert comm.recv(array.reshape(10, 100).view(), 0, SOON).cancel()
    del array, arrays
    assert [each() for each in refs if each() is not None] == []
    assert waiting.cancel()


async def test_whoever_waits_for_a_message_that_is_lost_is_told(comm: Communicator) -> None:
    if comm.rank == 0:
        frames = [memoryview(b"no pickle"), memoryview(FIRST).cast("B")]
        await send_held_back(comm, bytes(wire.pack_frames(frames, inline=False)), wire.OBJECT_IN_PIECES, FIRST)
        return
    await give_up(comm.recv_object(0, SOON))
    first = comm.recv_object(0, SOON)
    await release(comm)
    with pytest.raises(mpdist.CommunicationError, match=r"an object of .* is lost: UnpicklingError"):
        await first
    assert (await comm.recv(src=0, tag=SOON)).count == 4


async def test_a_message_that_was_probed_returns_to_its_place(comm: Communicator) -> None:
    probe = comm.probe(comm.rank, 1)
    await comm.send(FIRST, comm.rank, 1)
    probed = await probe
    await comm.send(SECOND, comm.rank, 1)
    task = asyncio.ensure_future(probed.recv())
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert (await comm.recv(src=comm.rank, tag=1)).data.tolist() == FIRST.tolist()
    assert (await comm.recv(src=comm.rank, tag=1)).count == 4


class Held:
    """A request that is complete when it is told so."""

    is_complete = False

    def Test(self) -> bool:
        return self.is_complete


async def test_a_message_of_the_latency_path_returns_to_its_place(comm: Communicator) -> None:
    x, request = FIRST.copy(), Held()
    landing = comm.recv(x, comm.rank, 1)
    assert isinstance(landing, ArrayReceive)
    comm._channel.inbox.box.sole = None
    comm._channel.inbox.box.receives = landing.order = 0
    landing._result = Message(x, comm.rank, 1, x.size, x.nbytes, landing._element)
    landing._land(cast(Any, request), comm.rank)
    await comm.send(SECOND, comm.rank, 1)
    landing._abandon()
    first = comm.recv(tag=1)
    assert not first.done()
    request.is_complete = True
    assert (await first).data.tolist() == FIRST.tolist()
    assert (await comm.recv(src=comm.rank, tag=1)).count == 4
