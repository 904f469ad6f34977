"""Messages whose receiver takes the data from the sender's device: as all others, and which way they take."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from comm.devices import HOMES, Gpu, there
from memory.simulated import Simulated

import mpdist
from mpdist.comm import straight
from mpdist.memory import openings, slots
from mpdist.memory.segments import ENTRIES
from mpdist.memory.slots import PROOF_BYTES
from mpdist.progress.shown import show, showing, taking

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.any_mpi]

Comm = mpdist.Communicator

SLOT_BYTES = 4096


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is large."""
    monkeypatch.setattr(slots, "SLOT_BYTES", SLOT_BYTES)
    monkeypatch.setattr(taking, "HOST_BYTES", 3000)
    monkeypatch.setattr(showing, "SHOWN_FROM", 0)
    monkeypatch.setattr(show, "REFRESH_SECONDS", 0.0)
    for op in straight.IPC_FROM:
        monkeypatch.setitem(straight.IPC_FROM, op, 0)


@pytest.fixture(params=HOMES)
def home(request: pytest.FixtureRequest) -> str:
    """Each of them."""
    return str(request.param)


def check(found: Any, expected: Any) -> None:
    found = found if isinstance(found, np.ndarray) else found.get()
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def around(comm: Comm) -> tuple[int, int]:
    """To whom this rank sends, and from whom it receives."""
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


async def meet(comm: Comm, gpu: Gpu) -> None:
    """After this messages between any two ranks are shown."""
    for step in range(1, comm.size):
        dst, src = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        x = gpu.array(np.zeros(3))
        await comm.sendrecv(gpu.array(np.full(3, comm.rank, float)), dst, x, src)
        check(x, np.full(3, src, float))
    await comm.barrier()


def copies(gpu: Simulated) -> dict[str, int]:
    """Bytes that were copied in each way since the last call, but to find out what works."""
    found: dict[str, int] = {}
    for kind, nbytes in gpu.copies:
        if nbytes != PROOF_BYTES:
            found[kind] = found.get(kind, 0) + nbytes
    gpu.copies.clear()
    return found


@pytest.mark.parametrize("count", [1, 512, 5000])
async def test_the_array_comes(comm: Comm, gpu: Gpu, home: str, count: int) -> None:
    dst, src = around(comm)
    for turn in range(4):
        x = there(comm, gpu, np.full(count + turn, -1.0), home)
        sent = comm.send(there(comm, gpu, np.arange(count) + 100.0 * comm.rank + turn, home), dst, tag=7)
        message = await comm.recv(x, src, tag=7)
        assert (message.data is x, message.count, message.nbytes) == (True, count, 8 * count)
        assert (message.src, message.tag, message.dtype) == (src, 7, np.float64)
        check(x, np.append(np.arange(count) + 100.0 * src + turn, np.full(turn, -1.0)))
        await sent


async def test_after_the_first_message_nothing_goes_through_the_host(comm: Comm, fake_gpu: Simulated) -> None:
    dst, src = around(comm)
    for turn in range(3):
        x = fake_gpu.array(np.zeros(1000))
        await comm.sendrecv(fake_gpu.array(np.full(1000, turn + src * 0.5)), dst, x, src)
        await comm.barrier()  # by now all have answered
        assert copies(fake_gpu) == ({"between": 16000} if turn else {"out": 8000, "in": 8000})


async def test_memory_of_the_communicator_is_copied_once(comm: Comm, fake_gpu: Simulated) -> None:
    await meet(comm, fake_gpu)
    copies(fake_gpu)
    dst, src = around(comm)
    opened = fake_gpu.shared.log.count("open")
    sent = there(comm, fake_gpu, np.full(1000, comm.rank), "shared")
    x = fake_gpu.array(np.zeros(1000, int))
    for _ in range(3):
        await comm.sendrecv(sent, dst, x, src)
        check(x, np.full(1000, src))
    assert copies(fake_gpu) == {"between": 3 * 8000}
    assert fake_gpu.shared.log.count("open") == opened + 1


async def test_memory_of_the_programs_library_is_opened_once_and_copied_once(comm: Comm, fake_gpu: Simulated) -> None:
    await meet(comm, fake_gpu)
    copies(fake_gpu)
    dst, src = around(comm)
    log = fake_gpu.shared.log
    opened = log.count("open")
    x = fake_gpu.array(np.zeros(500, int))
    for turn in range(6):  # other arrays, in the same segment
        await comm.sendrecv(there(comm, fake_gpu, np.full(500, comm.rank + turn), "pooled"), dst, x, src)
        check(x, np.full(500, src + turn))
    assert copies(fake_gpu) == {"between": 6 * 4000}
    assert log.count("open") == opened + 1
    assert "close" not in log


async def test_memory_that_the_programs_library_gives_back_is_closed(comm: Comm, fake_gpu: Simulated) -> None:
    await meet(comm, fake_gpu)
    dst, src = around(comm)
    log, opened = fake_gpu.shared.log, len(fake_gpu.shared.opened)
    for turn in range(4):
        for _ in range(2):
            x = fake_gpu.array(np.zeros(700, int))
            await comm.sendrecv(there(comm, fake_gpu, np.full(700, comm.rank + turn), "pooled"), dst, x, src)
            check(x, np.full(700, src + turn))
        await comm.barrier()
        assert len(fake_gpu.shared.opened) == opened + 1
        assert log.count("close") == turn
        assert fake_gpu.shared.give_back_all() == 1


async def test_of_many_segments_some_are_open(comm: Comm, fake_gpu: Simulated) -> None:
    await meet(comm, fake_gpu)
    dst, src = around(comm)
    opened = len(fake_gpu.shared.opened)
    sent = [there(comm, fake_gpu, np.full(8192, number + comm.rank), "pooled") for number in range(ENTRIES + 4)]
    for _ in range(2):
        works = [comm.send(each, dst) for each in sent]
        for number in range(len(sent)):
            x = fake_gpu.array(np.zeros(8192, int))
            await comm.recv(x, src)
            check(x, np.full(8192, number + src))
        await asyncio.gather(*works)
        assert len(fake_gpu.shared.segments) == len(sent)
        assert len(fake_gpu.shared.opened) <= opened + ENTRIES


async def test_between_a_device_and_the_host(comm: Comm, gpu: Gpu, home: str) -> None:
    await meet(comm, gpu)
    dst, src = around(comm)
    for count in (1, 1500):
        for is_sent_from_host in (False, True):
            values = np.full(count, 10 * comm.rank + count, np.int32)
            sent = comm.send(values if is_sent_from_host else there(comm, gpu, values, home), dst)
            x: Any = there(comm, gpu, np.zeros(count, np.int32), home) if is_sent_from_host else values * 0
            assert (await comm.recv(x, src)).data is x
            check(x, np.full(count, 10 * src + count, np.int32))
            await sent


async def test_without_an_array_it_comes_into_a_new_one(comm: Comm, gpu: Gpu, home: str) -> None:
    await meet(comm, gpu)
    dst, src = around(comm)
    sent = comm.send(there(comm, gpu, np.arange(2000) + comm.rank, home), dst)
    message = await comm.recv()
    assert (message.src, message.count, message.dtype) == (src, 2000, np.int64)
    check(message.data, np.arange(2000) + src)
    await sent


async def test_probe_and_wildcards(comm: Comm, gpu: Gpu, home: str) -> None:
    await meet(comm, gpu)
    dst, src = around(comm)
    works = [comm.send(there(comm, gpu, np.full(900, tag), home), dst, tag) for tag in (3, 4, 5)]
    probed = await comm.probe(tag=4)
    assert (probed.src, probed.tag, probed.count, probed.dtype) == (src, 4, 900, np.int64)
    x = gpu.array(np.zeros(900, int))
    assert (await comm.recv(x)).tag == 3
    check(x, np.full(900, 3))
    check((await probed.recv()).data, np.full(900, 4))
    message = await comm.recv(x, tag=mpdist.ANY_TAG)
    assert (message.src, message.tag) == (src, 5)
    check(x, np.full(900, 5))
    await asyncio.gather(*works)


async def test_both_directions_at_once_and_many_at_a_time(comm: Comm, gpu: Gpu) -> None:
    await meet(comm, gpu)
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    works, arrays = [], []
    for number in range(6):
        home = HOMES[number % 3]
        for rank in others:
            values = np.full(1500 + number, 100 * comm.rank + number, np.float32)
            works.append(comm.send(there(comm, gpu, values, home), rank, tag=1))
    for number in range(6):
        for rank in others:
            arrays.append((rank, number, gpu.array(np.zeros(1500 + number, np.float32))))
            works.append(comm.recv(arrays[-1][2], rank, tag=1))
    await asyncio.gather(*works)
    for rank, number, each in arrays:
        check(each, np.full(1500 + number, 100 * rank + number, np.float32))


async def test_order_is_kept_among_messages_of_all_kinds(comm: Comm, gpu: Gpu) -> None:
    await meet(comm, gpu)
    dst, src = around(comm)
    works = []
    for number in range(12):
        values = np.full(1 + number * 100, number)
        works.append(comm.send(values if number % 3 == 0 else there(comm, gpu, values, HOMES[number % 3]), dst))
    works.append(comm.send_object("the end", dst))
    for number in range(12):
        x = gpu.array(np.zeros(2000, int))
        message = await comm.recv(x, src)
        assert message.count == 1 + number * 100
        check(x[: message.count], np.full(message.count, number))
    assert (await comm.recv_object(src)).data == "the end"
    await asyncio.gather(*works)


def test_the_same_where_no_event_loop_runs(comm: Comm, gpu: Gpu, home: str) -> None:
    dst, src = around(comm)
    for turn in range(4):
        x = gpu.array(np.zeros(3000))
        sent = comm.send(there(comm, gpu, np.full(3000, comm.rank + turn * 0.5), home), dst)
        comm.recv(x, src).wait()
        check(x, np.full(3000, src + turn * 0.5))
        sent.wait()


async def test_what_a_message_does_not_fit_leaves_it_queued(comm: Comm, gpu: Gpu, home: str) -> None:
    await meet(comm, gpu)
    dst, src = around(comm)
    sent = comm.send(there(comm, gpu, np.arange(800.0) + comm.rank, home), dst)
    with pytest.raises(mpdist.MessageTruncated, match="a buffer of 799 elements"):
        await comm.recv(gpu.array(np.zeros(799)), src)
    with pytest.raises(mpdist.UnsupportedBuffer, match="a buffer of float32"):
        await comm.recv(gpu.array(np.zeros(800, np.float32)), src)
    with pytest.raises(mpdist.MessageTruncated, match="a buffer of 3 elements"):
        await comm.recv(np.zeros(3), src)
    with pytest.raises(mpdist.UnsupportedBuffer, match="a receive of an object"):
        await comm.recv_object(src)
    x = gpu.array(np.zeros(801))
    assert (await comm.recv(x, src)).count == 800
    check(x, np.append(np.arange(800.0) + src, 0))
    await sent


async def test_a_receive_that_is_given_up_on_the_way_leaves_the_message_to_the_next(
    comm: Comm, gpu: Gpu, home: str
) -> None:
    await meet(comm, gpu)
    dst, src = around(comm)
    for turns in range(6):
        sent = comm.send(there(comm, gpu, np.full(4000, comm.rank + turns), home), dst)
        task = asyncio.ensure_future(comm.recv(gpu.array(np.zeros(4000, int)), src))
        for _ in range(turns):
            await asyncio.sleep(0.0005)
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            x: Any = gpu.array(np.zeros(4000, int)) if turns % 2 else np.zeros(4000, int)
            assert (await comm.recv(x, src)).count == 4000
            check(x, np.full(4000, src + turns))
        await sent
        assert comm._channel.inbox.unclaimed() == []


async def test_a_message_that_was_taken_and_given_back_is_not_dropped_for_another(
    comm: Comm, fake_gpu: Simulated, home: str
) -> None:
    await meet(comm, fake_gpu)
    dst, src = around(comm)
    sent = comm.send(there(comm, fake_gpu, np.full(800, comm.rank), home), dst, tag=1)
    receive = comm.recv(fake_gpu.array(np.zeros(800, int)), src, tag=1)
    await asyncio.wait([sent, receive])  # type: ignore[type-var]  # it takes Works
    task = asyncio.ensure_future(receive)
    task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    (back,) = comm._channel.inbox.box.unclaimed()
    await comm.barrier()
    second = comm.send(there(comm, fake_gpu, np.full(800, -comm.rank), home), dst, tag=2)  # with the same ticket
    await comm.probe(src, tag=2)
    assert back.shown is not None
    back.shown.drop()
    await comm.barrier()
    for _ in range(20):
        await asyncio.sleep(0.0005)
    assert not second.done()
    await comm.barrier()
    x = fake_gpu.array(np.zeros(800, int))
    await comm.recv(x, src, tag=1)
    check(x, np.full(800, src))
    list(comm._channel.inbox.take_unclaimed())
    await second


async def test_a_send_whose_await_is_cancelled_goes_on_and_keeps_its_array(
    comm: Comm, fake_gpu: Simulated, home: str
) -> None:
    await meet(comm, fake_gpu)
    dst, src = around(comm)
    x = there(comm, fake_gpu, np.full(3000, comm.rank), home)
    sent = comm.send(x, dst)
    task = asyncio.ensure_future(_awaited(sent))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert not sent.cancel()
    assert not sent.done()
    assert f"send to {dst}, tag 0" in repr(sent)
    del x
    others = [there(comm, fake_gpu, np.full(3000, -1), home) for _ in range(3)]  # not in that memory
    await comm.barrier()
    room = fake_gpu.array(np.zeros(3000, int))
    await comm.recv(room, src)
    check(room, np.full(3000, src))
    await sent
    del others


async def _awaited(work: mpdist.Work[Any]) -> Any:
    return await work


async def test_a_message_that_nobody_receives_is_reported_and_holds_nobody_up(
    comm: Comm, fake_gpu: Simulated, home: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dst, src = around(comm)
    async with comm.dup() as other:
        await meet(other, fake_gpu)
        works = [other.send(there(comm, fake_gpu, np.full(2000, tag), home), dst, tag) for tag in (1, 2)]
        assert (await other.probe(src, tag=1)).count == 2000
    await asyncio.gather(*works)
    assert "closed with 2 messages that nobody received: " in capsys.readouterr().err
    async with comm.dup() as other:  # in the same memory
        await meet(other, fake_gpu)


async def test_a_communicator_that_is_left_by_an_error_waits_for_nobody(comm: Comm, fake_gpu: Simulated) -> None:
    with suppress(ZeroDivisionError):
        async with comm.dup() as other:
            await meet(other, fake_gpu)
            raise ZeroDivisionError
    async with comm.dup() as other:
        await meet(other, fake_gpu)


async def test_a_message_to_itself_goes_through_the_host(comm: Comm, gpu: Gpu) -> None:
    for _ in range(2):
        sent = comm.send(gpu.array(np.arange(600)), comm.rank)
        x = gpu.array(np.zeros(600, int))
        await comm.recv(x, comm.rank)
        check(x, np.arange(600))
        await sent


async def test_a_send_that_waits_says_for_whom(comm: Comm, fake_gpu: Simulated, home: str) -> None:
    await meet(comm, fake_gpu)
    dst, src = around(comm)
    sent = comm.send(there(comm, fake_gpu, np.full(2000, comm.rank), home), dst)
    with pytest.raises(mpdist.WorkTimeout, match="send to"):
        await sent.within(0.1)
    await comm.barrier()  # nobody receives before
    x = fake_gpu.array(np.zeros(2000, int))
    await comm.recv(x, src)
    check(x, np.full(2000, src))
    await comm.barrier()


async def test_arrays_that_are_sent_one_after_the_other_take_no_more_memory(comm: Comm, fake_gpu: Simulated) -> None:
    for _ in range(2):
        await meet(comm, fake_gpu)
    assert comm._channel.engine.shared is not None
    used = comm._channel.engine.shared.arena.used_bytes
    exported = fake_gpu.shared.log.count("export")
    dst, src = around(comm)
    x = fake_gpu.array(np.zeros(3000))
    for _ in range(10):
        await comm.sendrecv(fake_gpu.array(np.ones(3000)), dst, x, src)
    assert fake_gpu.shared.log.count("export") == exported
    assert comm._channel.engine.shared.arena.used_bytes <= used  # earlier tests may leave garbage


async def test_memory_that_cannot_be_opened_comes_through_slots(comm: Comm, fake_gpu: Simulated) -> None:
    await meet(comm, fake_gpu)
    dst, src = around(comm)
    sent = there(comm, fake_gpu, np.full(3000, comm.rank), "shared")
    fake_gpu.shared.can_open = False
    x = fake_gpu.array(np.zeros(3000, int))
    await comm.sendrecv(sent, dst, x, src)
    check(x, np.full(3000, src))


async def test_where_memory_cannot_be_shared_it_is_said_once(
    comm: Comm, fake_gpu: Simulated, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_gpu.shared.can_share = comm.rank != 0
    for _ in range(2):
        async with comm.dup() as other:
            for _ in range(3):
                copies(fake_gpu)
                await meet(other, fake_gpu)
            assert ("out" in copies(fake_gpu)) == (comm.rank == 0)
    said = capsys.readouterr().err
    assert said.count("cannot reach each other's memory on cuda:0") == (comm.rank == 0)


async def test_memory_that_is_not_the_owners_is_noticed(
    comm: Comm, fake_gpu: Simulated, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_gpu.shared.is_garbled = comm.rank == 1
    for _ in range(3):
        await meet(comm, fake_gpu)
    assert capsys.readouterr().err.count("holds other values") == (comm.rank == 1)


async def test_where_no_shared_memory_is_left_it_goes_through_the_host(
    comm: Comm, fake_gpu: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    await meet(comm, fake_gpu)
    copies(fake_gpu)
    assert comm._channel.engine.shared is not None
    monkeypatch.setattr(comm._channel.engine.shared.arena, "allocate", lambda *_, **__: None)
    await meet(comm, fake_gpu)
    assert copies(fake_gpu).keys() == {"out", "in"}


@pytest.mark.parametrize("how", ["switched off", "compared", "small"])
async def test_what_stays_with_the_host(
    comm: Comm, fake_gpu: Simulated, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "switched off":
        monkeypatch.setattr(comm._channel.engine, "has_ipc", False)
    elif how == "compared":
        comm._channel.check = lambda _channel, _op, _details, steps, _arguments: steps
    else:
        monkeypatch.setattr(showing, "SHOWN_FROM", 1000)
    for _ in range(3):
        await meet(comm, fake_gpu)
    assert copies(fake_gpu).keys() == {"out", "in"}
    assert fake_gpu.shared.log == []


async def test_a_device_that_fails_under_the_sender_fails_both_sides(
    comm: Comm, fake_gpu: Simulated, home: str
) -> None:
    await meet(comm, fake_gpu)
    x = there(comm, fake_gpu, np.ones(3000), home)
    if comm.rank == 0:
        fake_gpu.fails = RuntimeError("the device is gone")
        with pytest.raises(mpdist.CommunicationError, match="the device is gone"):
            await comm.send(x, 1)
        fake_gpu.fails = None
        await comm.send(x, 1)
    if comm.rank == 1:
        with pytest.raises(mpdist.CommunicationError, match="the sender's device has failed"):
            await comm.recv(x, 0)
        await comm.recv(x, 0)


async def test_a_communicator_whose_device_has_failed_is_closed(
    comm: Comm, fake_gpu: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: int) -> int:
        raise mpdist.errors.DeviceFailed("the device is gone")

    dst, src = around(comm)
    x, out = (there(comm, fake_gpu, np.full(1000, comm.rank), "pooled") for _ in range(2))
    async with comm.dup() as other:
        await meet(other, fake_gpu)
        await other.sendrecv(x, dst, out, src)
        segments = other._channel.showing.exports.segments  # type: ignore[union-attr]  # it has sent
        assert segments is not None
        monkeypatch.setattr(fake_gpu.shared, "number_of", refuse)
    assert other._channel.is_closed
    with pytest.raises(mpdist.ClosedError):
        other.send(np.ones(1), dst)


async def test_a_device_that_fails_under_the_receiver_fails_it_alone(
    comm: Comm, fake_gpu: Simulated, home: str
) -> None:
    await meet(comm, fake_gpu)
    x = there(comm, fake_gpu, np.ones(3000), home)
    if comm.rank == 0:
        await comm.send(x, 1)
        await comm.send(np.ones(1), 1)
    if comm.rank == 1:
        receive = comm.recv(x, 0)  # what its array waits for is well
        fake_gpu.fails = RuntimeError("the device is gone")
        with pytest.raises(mpdist.CommunicationError, match="the device is gone"):
            await receive
        fake_gpu.fails = None
        assert (await comm.recv(src=0)).count == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("who", ["receiver", "sender"])
def test_an_interruption_at_the_end_of_a_message_loses_nobody(
    comm: Comm, fake_gpu: Simulated, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """A signal's handler may run in any call; the other side must not wait for what that has left undone."""
    home = "pooled" if who == "receiver" else "own"
    for _ in range(2):  # these meet, and those that follow are shown
        _exchange(comm, fake_gpu, home)
    left = openings.Openings if who == "receiver" else slots.Slots
    leave = left.leave
    interruptions = [KeyboardInterrupt("on purpose")] if comm.rank == (who == "receiver") else []

    def interrupted(self: Any, what: Any) -> None:
        if interruptions:
            raise interruptions.pop()
        leave(self, what)

    monkeypatch.setattr(left, "leave", interrupted)
    (receive, send), x = _post(comm, fake_gpu, home)
    # What is interrupted is waited for first: a receive that waits meanwhile would be withdrawn.
    for work in (receive, send) if who == "receiver" else (send, receive):
        try:
            work.wait()
        except KeyboardInterrupt:
            with suppress(mpdist.CommunicationError):  # a receive that was interrupted has failed
                work.wait()
    assert not interruptions
    if comm.rank == 0 or who == "sender":
        check(x, np.full(3000, 1.0 - comm.rank))
    for _ in range(2):
        _exchange(comm, fake_gpu, home)


def _post(comm: Comm, gpu: Gpu, home: str) -> tuple[list[mpdist.Work[Any]], Any]:
    dst, src = around(comm)
    x = gpu.array(np.zeros(3000))
    return [comm.recv(x, src), comm.send(there(comm, gpu, np.full(3000, float(comm.rank)), home), dst)], x


def _exchange(comm: Comm, gpu: Gpu, home: str) -> None:
    works, x = _post(comm, gpu, home)
    for work in works:
        work.wait()
    check(x, np.full(3000, float(around(comm)[1])))
