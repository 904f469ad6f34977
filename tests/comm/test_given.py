"""Arrays on a device that MPI gets as they are: nothing is copied, and nothing is read before it has been computed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.jobs import run_mpdist
from comm.test_devices import check
from memory.simulated import DeviceArray, Simulated

import mpdist
from mpdist.algorithms.choose import SHARED_FROM, Thresholds
from mpdist.comm import staging
from mpdist.config import DEVICE_OPERATIONS
from mpdist.errors import DeviceFailed
from mpdist.memory.pinned import Pinned
from mpdist.progress import sending, wire
from mpdist.progress.marks import Attended
from mpdist.transport.cuda_aware import Awareness

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

Comm = mpdist.Communicator
ALL = ",".join(DEVICE_OPERATIONS)


@pytest.fixture(autouse=True)
def _small_ones_are_mpis(world: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where cores are scarce; before `comm` is made, which then goes by it."""
    monkeypatch.setattr(world._channel.engine, "thresholds", Thresholds(SHARED_FROM["mpich"]))


@pytest.fixture
def given(comm: Comm, fake_gpu: Simulated) -> Iterator[Simulated]:
    """A GPU all of whose arrays MPI takes."""
    with aware(comm, fake_gpu, ALL):
        yield fake_gpu


@contextmanager
def aware(comm: Comm, gpu: Simulated, word: str) -> Iterator[Simulated]:
    engine = comm._channel.engine
    before, engine.awareness = engine.awareness, Awareness(word)
    try:
        yield gpu
    finally:
        engine.awareness = before
        engine.given.clear()


def rows(comm: Comm) -> Any:
    return np.arange(6 * comm.size, dtype=np.float64) + 100 * comm.rank


def all_rows(comm: Comm) -> list[Any]:
    return [np.arange(6 * comm.size, dtype=np.float64) + 100 * rank for rank in range(comm.size)]


def block(comm: Comm, values: Any) -> Any:
    return np.split(values, comm.size)[comm.rank]


async def _broadcast(comm: Comm, gpu: Simulated) -> None:
    x = gpu.array(rows(comm))
    assert await comm.broadcast(x, comm.size - 1) is x
    check(x, all_rows(comm)[-1])


async def _reduce(comm: Comm, gpu: Simulated) -> None:
    total = await comm.reduce(gpu.array(rows(comm)), 0)
    if comm.rank == 0:
        check(total, sum(all_rows(comm)))
    else:
        assert total is None


async def _all_reduce(comm: Comm, gpu: Simulated) -> None:
    x, out = gpu.array(rows(comm)), gpu.array(rows(comm) * 0)
    assert await comm.all_reduce(x, out=out) is out
    check(out, sum(all_rows(comm)))
    check(x, rows(comm))
    assert await comm.all_reduce(x) is x
    check(x, sum(all_rows(comm)))


async def _scan(comm: Comm, gpu: Simulated) -> None:
    check(await comm.scan(gpu.array(rows(comm))), sum(all_rows(comm)[: comm.rank + 1]))


async def _exscan(comm: Comm, gpu: Simulated) -> None:
    out = gpu.array(np.full(6 * comm.size, -1.0))
    before = await comm.exscan(gpu.array(rows(comm)), out=out)
    assert before is (out if comm.rank else None)
    check(out, sum(all_rows(comm)[: comm.rank]) if comm.rank else np.full(6 * comm.size, -1.0))


async def _reduce_scatter(comm: Comm, gpu: Simulated) -> None:
    check(await comm.reduce_scatter(gpu.array(rows(comm))), block(comm, sum(all_rows(comm))))


async def _gather(comm: Comm, gpu: Simulated) -> None:
    found = await comm.gather(gpu.array(rows(comm)), 0)
    if comm.rank == 0:
        check(found, np.stack(all_rows(comm)))


async def _scatter(comm: Comm, gpu: Simulated) -> None:
    x, out = gpu.array(rows(comm)), gpu.array(np.zeros(6))
    assert await comm.scatter(x if comm.rank == 0 else None, 0, out=out) is out
    check(out, block(comm, all_rows(comm)[0]))


async def _all_gather(comm: Comm, gpu: Simulated) -> None:
    check(await comm.all_gather(gpu.array(rows(comm))), np.stack(all_rows(comm)))


async def _all_to_all(comm: Comm, gpu: Simulated) -> None:
    found = await comm.all_to_all(gpu.array(rows(comm)))
    check(found, np.concatenate([block(comm, each) for each in all_rows(comm)]))


async def _messages(comm: Comm, gpu: Simulated) -> None:
    dst, src = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (0, 3, 100_000):
        out = gpu.array(np.zeros(count + 2))
        sent = comm.send(gpu.array(np.full(count, comm.rank + 1.0)), dst, tag=7)
        message = await comm.recv(out, src, tag=7)
        assert (message.data, message.count, message.src, message.tag) == (out, count, src, 7)
        check(out, np.append(np.full(count, src + 1.0), [0, 0]))
        await sent


CASES: dict[str, tuple[str, Callable[[Comm, Simulated], Any]]] = {
    "broadcast": ("broadcast", _broadcast),
    "reduce": ("reduce", _reduce),
    "all_reduce": ("all_reduce", _all_reduce),
    "scan": ("scan", _scan),
    "exscan": ("exscan", _exscan),
    "reduce_scatter": ("reduce_scatter", _reduce_scatter),
    "gather": ("gather", _gather),
    "scatter": ("scatter", _scatter),
    "all_gather": ("all_gather", _all_gather),
    "all_to_all": ("all_to_all", _all_to_all),
    "messages": ("send,recv", _messages),
}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", CASES)
async def test_nothing_is_copied(comm: Comm, fake_gpu: Simulated, name: str) -> None:
    words, case = CASES[name]
    with aware(comm, fake_gpu, words):
        await case(comm, fake_gpu)
        assert not fake_gpu.copies
        assert threading.current_thread() in fake_gpu.threads


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", CASES)
async def test_what_mpi_does_not_take_is_copied(comm: Comm, fake_gpu: Simulated, name: str) -> None:
    words, case = CASES[name]
    with aware(comm, fake_gpu, ",".join({*DEVICE_OPERATIONS} - {*words.split(",")})):
        await case(comm, fake_gpu)
        assert fake_gpu.copies
        assert not fake_gpu.threads


@pytest.mark.parametrize("name", CASES)
async def test_ranks_choose_for_themselves(comm: Comm, fake_gpu: Simulated, name: str) -> None:
    for odd in (False, True):
        with aware(comm, fake_gpu, ALL if comm.rank % 2 == odd else "no"):
            await CASES[name][1](comm, fake_gpu)


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "scan", "exscan", "reduce"])
async def test_ranks_choose_for_themselves_in_chunks(
    comm: Comm, fake_gpu: Simulated, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "CHUNK_BYTES", 8)
    await test_ranks_choose_for_themselves(comm, fake_gpu, name)


@pytest.mark.ranks(2, 4)
async def test_what_is_not_one_call_of_mpi_is_staged(comm: Comm, given: Simulated) -> None:
    large = 1 << 20  # shared memory takes it, on all ranks
    values = np.ones(large, np.float32)
    x = given.array(values)
    await comm.all_reduce(x)
    check(x, values * comm.size)
    mean = given.array(np.full(6, comm.rank, np.float32))
    await comm.all_reduce(mean, "avg")
    check(mean, np.full(6, (comm.size - 1) / 2, np.float32))
    check(await comm.all_reduce(given.array(np.arange(4)), op=lambda a, b: b), np.arange(4))
    in_order = given.array(np.full(6, comm.rank, np.float64))
    await comm.all_reduce(in_order, deterministic=True)
    check(in_order, np.full(6, sum(range(comm.size)), np.float64))
    found = await comm.all_gather([given.array(np.full(comm.rank + 1, comm.rank))])
    for rank, each in enumerate(found):
        check(each, np.full(rank + 1, rank))
    out = await comm.scatter(given.array(np.arange(comm.size)) if comm.rank == 0 else None, 0)
    assert (out.get() if isinstance(out, DeviceArray) else out).tolist() == [comm.rank]
    copied = {nbytes for _, nbytes in given.copies}
    assert {large * 4, 24, 32, 48, 8 * (comm.rank + 1)} <= copied


@pytest.mark.ranks(2, 4)
async def test_a_large_array_is_given_where_all_algorithms_are_mpis(
    comm: Comm, given: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm._channel.engine, "thresholds", Thresholds())
    monkeypatch.setattr(comm._channel.engine, "has_ipc", False)  # else ranks of a node try that way, too
    async with comm.dup() as native:
        values = np.ones(3 << 20, np.float32)
        x = given.array(values)
        await native.all_reduce(x)
        check(x, values * comm.size)
    assert not given.copies


@pytest.mark.ranks(2, 3, 4)
async def test_the_loop_goes_on_while_an_array_is_computed(comm: Comm, given: Simulated) -> None:
    given.program._seconds = 0.2
    dst, src = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    out = given.array(np.zeros(4))
    works = [comm.all_reduce(given.array(np.ones(10))), comm.send(given.array(np.ones(4)), dst), comm.recv(out, src)]
    turns = 0
    while not all(work.done() for work in works):
        turns += 1
        await asyncio.sleep(0.001)
    await asyncio.gather(*works)
    check(out, np.ones(4))
    assert turns > 5


async def test_an_array_is_not_written_before_the_program_has_used_it(comm: Comm, given: Simulated) -> None:
    """The stream reads it after recv was called: MPI must not have written it by then."""
    dst, src = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (3, 100_000):
        used: list[Any] = []
        x = given.array(np.full(count, 5.0))
        given.program.run(lambda x=x, used=used: used.append(x.get()))
        sent = comm.send(np.full(count, float(comm.rank)), dst)
        await comm.recv(x, src)
        await sent
        check(x, np.full(count, float(src)))
        assert used[0].tolist() == [5.0] * count
        used.clear()
        out = given.array(np.full(count, 5.0))
        given.program.run(lambda out=out, used=used: used.append(out.get()))
        await comm.all_reduce(given.array(np.ones(count)), out=out)
        assert used[0].tolist() == [5.0] * count


async def test_messages_keep_their_order_among_those_of_the_host(comm: Comm, given: Simulated) -> None:
    dst, src = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (1, 100_000):
        sent = [np.full(count, 100.0 * comm.rank + number) for number in range(8)]
        works = [comm.send(each if number % 2 else given.array(each), dst, tag=5) for number, each in enumerate(sent)]
        for number in range(8):
            x = given.array(np.zeros(count)) if number % 3 else np.zeros(count)
            await comm.recv(x, src, tag=5)
            np.testing.assert_array_equal(x if number % 3 == 0 else x.get(), np.full(count, 100.0 * src + number))
        await asyncio.gather(*works)


@pytest.mark.ranks(2)
async def test_a_message_in_pieces_goes_through_the_host(
    comm: Comm, given: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (wire, sending.wire):
        monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    other = 1 - comm.rank
    values = np.arange(1000.0)
    out = given.array(np.zeros(1000))
    sent = comm.send(given.array(values), other)
    # Its size is that of a message that is not in pieces: the sender decides about them.
    monkeypatch.setattr(wire, "PIECE_BYTES", 1 << 30)
    receive = comm.recv(out, other)
    monkeypatch.setattr(wire, "PIECE_BYTES", 1000)
    assert (await receive).data is out
    check(out, values)
    await sent
    assert ("in", 8000) in given.copies


@pytest.mark.ranks(2)
async def test_a_message_in_pieces_for_which_the_host_has_no_memory_stays_queued(
    comm: Comm, given: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("nothing is left")

    other, values, out = 1 - comm.rank, np.arange(1000.0), given.array(np.zeros(1000))
    monkeypatch.setattr(wire, "PIECE_BYTES", 1000)
    sent = comm.send(values, other)
    with monkeypatch.context() as changed:
        changed.setattr(wire, "PIECE_BYTES", 1 << 30)
        receive = comm.recv(out, other)
    with monkeypatch.context() as changed:
        changed.setattr(Pinned, "lend", fail)
        with pytest.raises(mpdist.CommunicationError, match="nothing is left; the message stays queued"):
            await receive
    assert (await comm.recv(out, other)).data is out
    check(out, values)
    await sent


async def test_a_message_to_this_rank_goes_through_the_host(comm: Comm, given: Simulated) -> None:
    out = given.array(np.zeros(5))
    await comm.send(given.array(np.arange(5.0)), comm.rank)
    assert (await comm.recv(out, comm.rank)).data is out
    check(out, np.arange(5.0))


async def test_a_message_that_does_not_fit_stays_queued(comm: Comm, given: Simulated) -> None:
    dst, src = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent = comm.send(given.array(np.arange(3.0)), dst)
    with pytest.raises(mpdist.MessageTruncated, match="a buffer of 2 elements"):
        await comm.recv(given.array(np.zeros(2)), src)
    with pytest.raises(mpdist.UnsupportedBuffer, match="a buffer of int64"):
        await comm.recv(given.array(np.zeros(3, np.int64)), src)
    x = given.array(np.full(5, 7.0))
    assert (await comm.recv(x, src)).count == 3
    check(x, np.array([0, 1, 2, 7, 7.0]))
    await sent


async def test_a_receive_that_is_given_up_loses_no_message(comm: Comm, given: Simulated) -> None:
    dst, src = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x = given.array(np.zeros(3))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(comm.recv(x, src), 0.01)
    await comm.barrier()
    sent = comm.send(given.array(np.arange(3.0)), dst)
    check((await comm.recv(x, src)).data, np.arange(3.0))
    await sent


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("count", [3, 100_000])
async def test_the_message_of_a_receive_that_is_given_up_late_goes_to_the_next(
    comm: Comm, given: Simulated, count: int
) -> None:
    dst, src = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent = comm.send(np.arange(float(count)), dst)
    is_given_up = threading.Event()
    given.program.run(is_given_up.wait)
    x = given.array(np.zeros(count))
    receive = comm.recv(x, src)
    for _ in range(1000):
        await asyncio.sleep(0)
        if receive.order <= 0:  # it has met the message, for which the stream is not ready
            break
    assert not receive.done()
    receive._abandon()
    is_given_up.set()
    out = given.array(np.zeros(count))
    assert (await comm.recv(out, src)).data is out
    check(out, np.arange(float(count)))
    await sent


@pytest.mark.ranks(2)
async def test_a_device_that_fails_fails_the_send(comm: Comm, given: Simulated) -> None:
    x = given.array(np.ones(4))
    given.fails = RuntimeError("the device is gone")
    with pytest.raises(mpdist.CommunicationError, match="the device is gone"):
        await comm.send(x, 1 - comm.rank)
    with pytest.raises(mpdist.ClosedError, match="data of a message could not be had"):
        comm.send(np.ones(2), 1 - comm.rank)


@pytest.mark.ranks(2, 3)
async def test_a_device_that_fails_fails_the_receive_and_keeps_the_message(comm: Comm, given: Simulated) -> None:
    dst, src = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent = comm.send(np.arange(5.0), dst)
    x = given.array(np.zeros(5))
    given.fails = RuntimeError("the device is gone")
    with pytest.raises(mpdist.CommunicationError, match=r"the device is gone.*; the message stays queued"):
        await comm.recv(x, src)
    np.testing.assert_array_equal((await comm.recv(src=src)).data, np.arange(5.0))
    await sent


async def test_a_device_that_fails_fails_the_collective(comm: Comm, given: Simulated) -> None:
    x = given.array(np.ones(4))
    given.fails = RuntimeError("the device is gone")
    with pytest.raises(mpdist.CommunicationError, match="the device is gone"):
        await comm.all_reduce(x)
    with pytest.raises(mpdist.ClosedError, match="ended by a failure of this rank's device"):
        comm.barrier()


async def test_what_is_being_recorded_is_refused(comm: Comm, given: Simulated) -> None:
    x = given.array(np.ones(2))
    given.is_capturing = True
    for call in (lambda: comm.all_reduce(x), lambda: comm.send(x, 0), lambda: comm.recv(x)):
        with pytest.raises(mpdist.UsageError, match="CUDA graph"):
            call()
    given.is_capturing = False
    await comm.all_reduce(x)


PRINT_WORD = """
import mpdist

async def main(world):
    print(await world.gather_object(world._channel.engine.awareness._word, 0))

mpdist.run(main)
"""


@pytest.mark.job
@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, "auto"), ({"MPDIST_CUDA_AWARE": "1"}, "yes"), ({"MPDIST_CUDA_AWARE": "1", "MPDIST_DEBUG": "1"}, "no")],
)
def test_what_mpi_gets_is_what_rank_0_was_told_and_nothing_in_debug_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(PRINT_WORD)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    done = run_mpdist("run", "-n", "2", str(script))
    assert str([expected] * 2) in done.stdout, done.stderr


def test_other_threads_that_call_mpi_attend_to_the_device(comm: Comm, given: Simulated) -> None:
    engine = comm._channel.engine
    engine.start_thread()
    comm.all_reduce(given.array(np.ones(100))).wait()
    comm.barrier().wait()
    while "mpdist-progress" not in {thread.name for thread in list(given.threads)}:
        time.sleep(0.001)
    engine.stop_thread()


class Pending:
    """A request that is over at the second look."""

    looks = 0

    def Test(self) -> bool:
        self.looks += 1
        return self.looks > 1


def test_requests_are_tested_and_threads_go_on_though_a_device_has_failed(
    comm: Comm, given: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()

    def attend() -> None:
        tried.set()
        raise DeviceFailed("the device is gone")

    monkeypatch.setattr(given, "attend", attend)
    request = Attended(Pending(), given)
    assert [request.Test(), request.Test()] == [False, True]
    engine = comm._channel.engine
    engine.given.append(given)
    tried.clear()
    engine.start_thread()
    assert tried.wait(20)
    x = np.ones(2)
    comm.all_reduce(x).wait()
    assert any(thread.name == "mpdist-progress" for thread in threading.enumerate())
    engine.stop_thread()
