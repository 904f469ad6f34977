"""Messages whose receiver takes the data from the sender's device: as all others, and which way they take."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from comm.devices import Gpu
from memory.simulated import Simulated

import mpdist
from mpdist.comm import straight
from mpdist.memory import slots
from mpdist.memory.slots import PROOF_BYTES
from mpdist.progress.shown import showing, taking

pytestmark = pytest.mark.ranks(2, 3, 4)

Comm = mpdist.Communicator

SLOT_BYTES = 4096


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is large."""
    monkeypatch.setattr(slots, "SLOT_BYTES", SLOT_BYTES)
    monkeypatch.setattr(taking, "HOST_BYTES", 3000)
    monkeypatch.setattr(showing, "SHOWN_FROM", 0)
    for op in straight.IPC_FROM:
        monkeypatch.setitem(straight.IPC_FROM, op, 0)


@pytest.fixture(params=["own", "shared"])
def home(request: pytest.FixtureRequest) -> str:
    """Whose memory arrays are in: the program's own, or the communicator's, which others reach."""
    return str(request.param)


def there(comm: Comm, gpu: Gpu, values: Any, home: str = "own") -> Any:
    """An array on the GPU that gets these values late."""
    if home == "own":
        return gpu.array(values)
    array = comm.empty(values.shape, values.dtype, device="cuda")
    gpu.fill(array, values)
    return array


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
        home = ("own", "shared")[number % 2]
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
        works.append(comm.send(values if number % 3 == 0 else there(comm, gpu, values, ("own", "shared")[number % 2]), dst))
    works.append(comm.send_object("the end", dst))
    for number in range(12):
        x = gpu.array(np.zeros(2000, int))
        message = await comm.recv(x, src)
        assert message.count == 1 + number * 100
        check(x[: message.count], np.full(message.count, number))
    assert (await comm.recv_object(src)).data == "the end"
    await asyncio.gather(*works)
