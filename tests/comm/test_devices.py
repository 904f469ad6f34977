"""Arrays on a device: every operation, against the same on the host; order with the program's stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from comm.arrays import numbers
from comm.devices import Gpu
from comm.reference import ops_for, reduced
from memory.simulated import Simulated, simulated

import mpdist
from mpdist.comm import staging

pytestmark = pytest.mark.ranks(1, 2, 3)

Comm = mpdist.Communicator
DTYPES = ("bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64")
COUNTS = (0, 1, 7, 5000)


@pytest.fixture(params=[None, 4096], ids=["whole", "chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(staging, "CHUNK_BYTES", request.param)


def everyone(comm: Comm, count: int, dtype: str) -> list[Any]:
    return [numbers(count, dtype, seed=rank) for rank in range(comm.size)]


def check(found: Any, expected: Any) -> None:
    assert type(found).__name__ in ("DeviceArray", "ndarray")
    assert type(found).__module__.partition(".")[0] != "numpy"
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.get(), expected)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", DTYPES)
async def test_all_reduce_in_place_and_into_out(comm: Comm, gpu: Gpu, dtype: str) -> None:
    for number, count in enumerate(COUNTS):
        values = everyone(comm, count, dtype)
        op = ops_for(dtype)[number % 2]  # that each is right is for the tests of the host to say
        expected = reduced(op, values, dtype)
        x = gpu.array(values[comm.rank])
        assert await comm.all_reduce(x, op) is x
        check(x, expected)
        x, out = gpu.array(values[comm.rank]), gpu.array(np.zeros_like(expected))
        assert await comm.all_reduce(x, op=op, out=out) is out
        check(out, expected)
        check(x, values[comm.rank])


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("count", COUNTS)
async def test_operations_with_a_root(comm: Comm, gpu: Gpu, count: int) -> None:
    values = everyone(comm, count, "float32")
    mine = values[comm.rank]
    for root in range(comm.size):
        is_root = comm.rank == root
        x = gpu.array(mine)
        assert await comm.broadcast(x, root) is x
        check(x, values[root])
        total = await comm.reduce(gpu.array(mine), dst=root, op="max")
        rows = await comm.gather(gpu.array(mine), root)
        if is_root:
            check(total, reduced("max", values, "float32"))
            check(rows, np.stack(values))
        else:
            assert total is None
            assert rows is None
        out = gpu.array(np.zeros_like(mine))
        whole = gpu.array(np.concatenate(values).reshape(comm.size * count)) if is_root else None
        assert await comm.scatter(whole, root, out=out) is out
        check(out, mine)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("count", COUNTS)
async def test_operations_without_a_root(comm: Comm, gpu: Gpu, count: int) -> None:
    values = everyone(comm, count, "int64")
    mine = values[comm.rank]
    check(await comm.all_gather(gpu.array(mine)), np.stack(values))
    check(await comm.scan(gpu.array(mine)), sum(values[: comm.rank + 1]))
    before = await comm.exscan(gpu.array(mine))
    if comm.rank:
        check(before, sum(values[: comm.rank]))
    else:
        assert before is None
    rows = everyone(comm, comm.size * count, "int64")
    block = slice(comm.rank * count, (comm.rank + 1) * count)
    check(await comm.all_to_all(gpu.array(rows[comm.rank])), np.concatenate([each[block] for each in rows]))
    check(await comm.reduce_scatter(gpu.array(rows[comm.rank])), sum(rows)[block])
    out = gpu.array(np.zeros(count, np.int64))
    assert await comm.reduce_scatter(gpu.array(rows[comm.rank]), deterministic=True, out=out) is out
    check(out, sum(rows)[block])


async def test_a_rank_that_gets_nothing_keeps_its_out(comm: Comm, gpu: Gpu) -> None:
    x = gpu.array(np.full(4, comm.rank + 1))
    total, rows, before = (gpu.array(np.full(shape, -1)) for shape in ((4,), (comm.size, 4), (4,)))
    await comm.reduce(x, 0, out=total)
    await comm.gather(x, 0, out=rows)
    await comm.exscan(x, out=before)
    every = np.arange(1, comm.size + 1)
    check(total, np.full(4, -1 if comm.rank else every.sum()))
    check(rows, np.full((comm.size, 4), -1) if comm.rank else np.repeat(every[:, None], 4, axis=1))
    check(before, np.full(4, every[: comm.rank].sum() if comm.rank else -1))


async def test_out_of_a_rank_that_gets_nothing_is_not_looked_at(comm: Comm, gpu: Gpu) -> None:
    x = gpu.array(np.full(4, comm.rank + 1))
    is_root = comm.rank == 0
    total = await comm.reduce(x, 0, out=gpu.array(np.zeros(4, int)) if is_root else np.empty(0))
    rows = await comm.gather(x, 0, out=gpu.array(np.zeros((comm.size, 4), int)) if is_root else x)
    blocks = await comm.gather([x], 0, out=[gpu.array(np.zeros(4, int)) for _ in range(comm.size)] if is_root else 3)
    if is_root:
        every = np.arange(1, comm.size + 1)
        check(total, np.full(4, every.sum()))
        check(rows, np.repeat(every[:, None], 4, axis=1))
        for rank, block in enumerate(blocks):
            check(block, np.full(4, rank + 1))
    else:
        assert (total, rows, blocks) == (None, None, None)


async def test_uneven_blocks(comm: Comm, gpu: Gpu) -> None:
    mine = np.full(comm.rank + 1, comm.rank, np.float32)
    gathered = await comm.all_gather([gpu.array(mine)])
    for rank, each in enumerate(gathered):
        check(each, np.full(rank + 1, rank, np.float32))
    blocks = [gpu.array(np.full(3 * (rank + 1), 10 * comm.rank + rank, np.int32)) for rank in range(comm.size)]
    outs = [gpu.array(np.zeros(3 * (comm.rank + 1), np.int32)) for _ in range(comm.size)]
    for rank, each in enumerate(await comm.all_to_all(blocks, out=outs)):
        assert each is outs[rank]
        check(each, np.full(3 * (comm.rank + 1), 10 * rank + comm.rank, np.int32))
    block = await comm.scatter(blocks if comm.rank == 0 else None, 0)
    expected = np.full(3 * (comm.rank + 1), comm.rank, np.int32)
    if comm.rank == 0:
        check(block, expected)
    else:
        np.testing.assert_array_equal(block, expected)


async def test_a_function_as_op_gets_numpy_arrays(comm: Comm, gpu: Gpu) -> None:
    def first(a: Any, b: Any) -> Any:
        assert type(a) is np.ndarray
        return a

    x = gpu.array(np.full(5, comm.rank))
    check(await comm.all_reduce(x, op=first), np.zeros(5, int))


async def test_several_are_in_flight_among_those_of_the_host(comm: Comm, gpu: Gpu) -> None:
    arrays = [np.full(1000, comm.rank + number, np.float32) for number in range(12)]
    arrays = [gpu.array(each) if number % 3 else each for number, each in enumerate(arrays)]  # the same on all ranks
    works = [comm.all_reduce(each) for each in arrays]
    await asyncio.gather(*works)
    for number, each in enumerate(arrays):
        expected = sum(rank + number for rank in range(comm.size))
        found = each if isinstance(each, np.ndarray) and number % 3 == 0 else each.get()
        np.testing.assert_array_equal(found, np.full(1000, expected, np.float32))


async def test_messages_keep_their_order_among_those_of_the_host(comm: Comm, gpu: Gpu) -> None:
    dst, src = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (1, 100_000):
        sent = [np.full(count, 100 * comm.rank + number, np.float64) for number in range(8)]
        works = [comm.send(each if number % 2 else gpu.array(each), dst, tag=5) for number, each in enumerate(sent)]
        works.append(comm.send_object("the end", dst, tag=5))
        for number in range(8):
            x = gpu.array(np.zeros(count)) if number % 3 else np.zeros(count)
            message = await comm.recv(x, src, tag=5)
            assert message.data is x
            assert (message.count, message.src, message.tag) == (count, src, 5)
            found = x if number % 3 == 0 else x.get()
            np.testing.assert_array_equal(found, np.full(count, 100 * src + number, np.float64))
        assert (await comm.recv_object(src, 5)).data == "the end"
        await asyncio.gather(*works)


@pytest.mark.ranks(2, 3)
async def test_what_is_still_on_its_way_at_the_end_comes_before_it(comm: Comm, fake_gpu: Simulated) -> None:
    fake_gpu.program.run(lambda: time.sleep(0.1))
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    async with comm.dup() as other:
        sent = other.send(fake_gpu.array(np.full(3000, comm.rank)), after)
        here = np.zeros(3000, np.int64)
        received = other.recv(here, src=before)
    await asyncio.gather(sent, received)
    np.testing.assert_array_equal(here, np.full(3000, before))


async def test_sendrecv_and_a_message_without_an_array(comm: Comm, gpu: Gpu) -> None:
    dst, src = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    out = gpu.array(np.zeros(9))
    message = await comm.sendrecv(gpu.array(np.full(9, comm.rank, float)), dst, out, src)
    assert message.data is out
    check(out, np.full(9, src, float))
    sent = comm.send(gpu.array(np.arange(4)), dst)
    np.testing.assert_array_equal((await comm.recv(src=src)).data, np.arange(4))
    await sent


async def test_a_receive_that_is_given_up_loses_no_message(comm: Comm, gpu: Gpu) -> None:
    dst, src = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x = gpu.array(np.zeros(3))
    receive = comm.recv(x, src)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(receive, 0.01)
    await comm.barrier()
    sent = comm.send(gpu.array(np.arange(3.0)), dst)
    check((await comm.recv(x, src)).data, np.arange(3.0))
    await sent


async def test_a_message_that_does_not_fit_stays_queued(comm: Comm, gpu: Gpu) -> None:
    dst, src = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent = comm.send(gpu.array(np.arange(3.0)), dst)
    with pytest.raises(mpdist.MessageTruncated, match="a buffer of 2 elements"):
        await comm.recv(gpu.array(np.zeros(2)), src)
    x = gpu.array(np.full(5, 7.0))
    message = await comm.recv(x, src)
    assert message.count == 3
    check(x, np.array([0, 1, 2, 7, 7.0]))
    await sent


async def test_the_loop_goes_on_while_an_array_is_computed(comm: Comm) -> None:
    comm._channel.engine.staging.clear()
    with simulated(seconds=0.1) as gpu:
        work = comm.all_reduce(gpu.array(np.ones(10)))
        turns = 0
        while not work.done():
            turns += 1
            await asyncio.sleep(0.001)
        await work
    comm._channel.engine.staging.clear()
    assert turns > 5


BAD: dict[str, tuple[Callable[[Comm, Simulated], Any], str]] = {
    "two devices": (
        lambda comm, gpu: comm.all_reduce(gpu.array(np.ones(2)), out=np.ones(2)),
        "arrays on cuda:0 and cpu; all arrays of an operation must be on the same device",
    ),
    "other size": (
        lambda comm, gpu: comm.all_reduce(gpu.array(np.ones(2)), out=gpu.array(np.ones(3))),
        "x has 2 elements, out has 3",
    ),
    "wrong op": (lambda comm, gpu: comm.all_reduce(gpu.array(np.ones(2)), "band"), "band"),
    "overlap": (lambda comm, gpu: _overlapping(comm, gpu.array(np.ones(6))), "x and out overlap"),
    "wrong root": (lambda comm, gpu: comm.broadcast(gpu.array(np.ones(2)), 9), "src is 9"),
    "wrong rank": (lambda comm, gpu: comm.send(gpu.array(np.ones(2)), 9), "dst is 9"),
}


def _overlapping(comm: Comm, x: Any) -> Any:
    return comm.all_reduce(x[:4], out=x[2:])


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_call_raises_and_the_communicator_stays_usable(comm: Comm, fake_gpu: Simulated, name: str) -> None:
    call, words = BAD[name]
    with pytest.raises(mpdist.UsageError, match=words) as caught:
        call(comm, fake_gpu)
    assert f"on '{comm.name}' (rank {comm.rank} of {comm.size})" in str(caught.value)
    x = fake_gpu.array(np.ones(2))
    await comm.all_reduce(x)
    check(x, np.full(2, float(comm.size)))


BAD_SCATTERS: dict[str, tuple[Callable[[Simulated], tuple[Any, Any]], str]] = {
    "out on the host": (lambda gpu: (gpu.array(np.ones(12)), np.ones(3)), "arrays on cuda:0 and cpu"),
    "blocks on two devices": (lambda gpu: ([gpu.array(np.ones(2)), *[np.ones(2)] * 11], None), "arrays on cuda:0 and"),
    "no array": (lambda gpu: (None, gpu.array(np.ones(2))), "got None"),
    "overlap": (lambda gpu: _halves(gpu.array(np.ones(18))), "x and out overlap"),
}


def _halves(x: Any) -> tuple[Any, Any]:
    return x[:12], x[6:]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", BAD_SCATTERS)
async def test_a_bad_scatter_fails_for_all(comm: Comm, fake_gpu: Simulated, name: str) -> None:
    make, words = BAD_SCATTERS[name]
    if comm.rank == 0:
        x, out = make(fake_gpu)
        with pytest.raises(mpdist.UsageError, match=words):
            comm.scatter(x[: comm.size] if isinstance(x, list) else x, 0, out=out)
    else:
        with pytest.raises(mpdist.UsageError, match=words):
            await comm.scatter(None, 0).within(20)
    assert (await comm.scatter(fake_gpu.array(np.ones(comm.size)), 0)).shape == (1,)


async def test_what_is_being_recorded_is_refused(comm: Comm, fake_gpu: Simulated) -> None:
    x = fake_gpu.array(np.ones(2))
    fake_gpu.is_capturing = True
    with pytest.raises(mpdist.UsageError, match="CUDA graph"):
        comm.all_reduce(x)
    with pytest.raises(mpdist.UsageError, match="CUDA graph"):
        comm.send(x, comm.rank)
    fake_gpu.is_capturing = False
    await comm.all_reduce(x)


@pytest.mark.parametrize("count", [3, 40_000])
async def test_a_probed_message_is_received_on_a_device(comm: Comm, gpu: Gpu, count: int) -> None:
    dst, src = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for turn in range(3):  # those after the first may be shown
        for from_gpu in (False, True):
            given = np.arange(count) + comm.rank + turn
            sent = comm.send(gpu.array(given) if from_gpu else given, dst, tag=turn)
            message = await comm.probe(src)
            assert (message.src, message.tag, message.count) == (src, turn, count)
            with pytest.raises(mpdist.MessageTruncated):
                await message.recv(gpu.array(np.zeros(count - 1, int)))
            x = gpu.array(np.zeros(count + 2, int))
            came = await message.recv(x)
            assert (came.data is x, came.count) == (True, count)
            np.testing.assert_array_equal(x.get(), np.append(np.arange(count) + src + turn, [0, 0]))
            with pytest.raises(mpdist.UsageError, match="was received already"):
                message.recv(x)
            await sent
        await comm.barrier()


async def test_memory_on_a_device(comm: Comm, gpu: Gpu) -> None:
    x = comm.empty((2, 3), np.float64, device="cuda")
    assert (x.shape, x.dtype) == ((2, 3), np.float64)
    await comm.broadcast(x, 0)
    with pytest.raises(mpdist.UsageError, match="device is 'gpu'; it must be 'cpu', 'cuda' or 'cuda:1'"):
        comm.empty(3, device="gpu")


async def test_host_memory_is_pinned_once_and_used_again(comm: Comm, fake_gpu: Simulated) -> None:
    x = fake_gpu.array(np.ones(1000))
    for _ in range(20):
        await comm.all_reduce(x)
    assert len(fake_gpu.pinned) == 1
    comm._channel.engine.staging[staging.Device("cuda")].close()
    assert not fake_gpu.pinned


async def test_without_pinning_it_works_and_says_so_once(comm: Comm, capsys: pytest.CaptureFixture[str]) -> None:
    comm._channel.engine.staging.clear()
    with simulated(can_pin=False) as gpu:
        for count in (10, 100_000):
            x = gpu.array(np.ones(count))
            await comm.all_reduce(x)
            check(x, np.full(count, float(comm.size)))
    comm._channel.engine.staging.clear()
    assert capsys.readouterr().err.count("cannot be pinned") == 1


@pytest.mark.ranks(2)
async def test_a_device_that_fails_fails_the_operation(comm: Comm, fake_gpu: Simulated) -> None:
    x = fake_gpu.array(np.ones(4))
    fake_gpu.fails = RuntimeError("the device is gone")
    with pytest.raises(mpdist.CommunicationError, match="the device is gone"):
        await comm.send(x, 1 - comm.rank)
    with pytest.raises(mpdist.ClosedError, match="data of a message could not be had"):
        comm.send(np.ones(2), 1 - comm.rank)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_there", [False, True])
async def test_a_device_that_takes_no_copy_fails_the_receive(
    comm: Comm, fake_gpu: Simulated, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    def refuse(*_: object) -> Any:
        raise mpdist.errors.DeviceFailed("the device is gone")

    monkeypatch.setattr(fake_gpu, "copy_in", refuse)
    src = comm.rank if is_there else 1 - comm.rank  # a message of this rank to itself has come already
    if is_there:
        await comm.send(np.ones(4), src)
        receive = comm.recv(fake_gpu.array(np.zeros(4)), src)
    else:
        receive = comm.recv(fake_gpu.array(np.zeros(4)), src)
        await comm.send(np.ones(4), src)
    with pytest.raises(mpdist.CommunicationError, match="the device is gone"):
        await receive.within(20)


async def test_a_device_that_fails_fails_the_collective(comm: Comm, fake_gpu: Simulated) -> None:
    x = fake_gpu.array(np.ones(4))
    fake_gpu.fails = RuntimeError("the device is gone")
    with pytest.raises(mpdist.CommunicationError, match="the device is gone"):
        await comm.all_reduce(x)
    with pytest.raises(mpdist.ClosedError, match="ended by a failure of this rank's device"):
        comm.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("count", [5, 40_000])
async def test_a_message_for_which_there_is_no_host_memory_stays_queued(
    comm: Comm, fake_gpu: Simulated, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    x, sent = fake_gpu.array(np.zeros(count)), comm.send(np.full(count, comm.rank + 1.0), 1 - comm.rank)
    with monkeypatch.context() as patch:
        patch.setattr(staging.pinned_of(comm._channel.engine, staging.Device("cuda")), "_allocate", _nothing_left)
        with pytest.raises(mpdist.CommunicationError, match=r"nothing is left.*the message stays queued"):
            await comm.recv(x)
    await comm.recv(x)
    check(x, np.full(count, 2.0 - comm.rank))
    await sent


@pytest.mark.ranks(2)
async def test_without_host_memory_no_later_collective_takes_the_place_of_one(
    comm: Comm, fake_gpu: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = fake_gpu.array(np.ones(4))
    if comm.rank == 0:
        with monkeypatch.context() as patch:
            patch.setattr(staging.pinned_of(comm._channel.engine, staging.Device("cuda")), "_allocate", _nothing_left)
            with pytest.raises(mpdist.CommunicationError, match="MemoryError: nothing is left"):
                await comm.all_reduce(x)
        with pytest.raises(mpdist.ClosedError, match=r"all_reduce on .* had no memory, so"):
            comm.all_reduce(x)
    else:
        with pytest.raises(mpdist.WorkTimeout):
            await comm.all_reduce(x).within(0.5)


def _nothing_left(nbytes: int) -> Any:
    raise MemoryError("nothing is left")


async def test_large_arrays_travel_in_chunks(comm: Comm, fake_gpu: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(comm._channel.engine, "has_ipc", False)
    x = fake_gpu.array(np.ones(100_000, np.float32))
    await comm.all_reduce(x)
    check(x, np.full(100_000, comm.size, np.float32))
    assert [nbytes for what, nbytes in fake_gpu.copies if what == "out"] == [65536] * 6 + [6784]
    assert [nbytes for what, nbytes in fake_gpu.copies if what == "in"] == [65536] * 6 + [6784]
