"""Arrays of real sizes on a real GPU: around those from which they go straight, and of more than one slot.

What the ranks have opened stays open from one test to the next.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
from comm.devices import HOMES, SPIN_TICKS, Gpu, forget, maker, opened, there

import mpdist
from mpdist.algorithms.devices import plan
from mpdist.algorithms.devices.joining import Joining
from mpdist.comm import straight
from mpdist.comm.straight import IPC_FROM
from mpdist.memory import as_buffer, slots
from mpdist.memory.exports import PRIVATE
from mpdist.progress.exporting import exports_of
from mpdist.progress.shown.showing import SHOWN_FROM

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.gpu]

Comm = mpdist.Communicator
Make = Callable[[Any], Any]

MIB = 1024 * 1024
SOME = max(MIB, 2 * SHOWN_FROM, *(2 * nbytes for nbytes in IPC_FROM.values()))
LARGE = 5 * max(plan.SLOT_BYTES, slots.SLOT_BYTES) // 4 + 4
DTYPES = ("float16", "float64", "int8", "complex64")
OPS = sorted(IPC_FROM)
JOINING = 2
"""So many collectives on a device go through host memory, at the most, before the ranks reach each other."""


def sizes(threshold: int) -> tuple[int, ...]:
    return threshold - 4, threshold, threshold + 4, MIB + 4, LARGE


@pytest.fixture(scope="module")
def gpu(world: Comm) -> Iterator[Gpu]:
    forget(world)
    with opened("cupy") as found:
        yield found
    forget(world)


@pytest.fixture(autouse=True)
def many_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes as if each rank had a GPU of its own; what comes of one GPU's is in test_device_ipc.py."""
    for name in ("LED_FROM", "ONE_GPU_FROM"):
        monkeypatch.setattr(straight, name, 0)


@pytest.fixture(autouse=True)
def all_reach_each_other(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert "cannot reach each other's memory" not in capsys.readouterr().err


def numbers(count: int, dtype: str, rank: int, turn: int) -> Any:
    """Others for each rank and turn, few enough to be exact in every type, also their sums."""
    few = (np.arange(13) + 3 * rank + turn).astype("float32" if dtype == "bfloat16" else dtype)
    return np.tile(few, -(-count // len(few)))[:count]


def check(found: Any, expected: Any, dtype: str) -> None:
    assert str(found.dtype).removeprefix("torch.") == dtype
    values = found.get() if hasattr(found, "get") else found.float().cpu().numpy()
    np.testing.assert_array_equal(values.reshape(-1), expected)


def count_of(comm: Comm, op: str, count: int) -> int:
    """As many elements, or a few less, as the operation can divide."""
    return count // comm.size * comm.size if op == "reduce_scatter" else count


async def collective(comm: Comm, op: str, x: Any, values: list[Any], root: int, out: Any = None) -> tuple[Any, Any]:
    """What it gives on this rank, and what it must give."""
    match op:
        case "all_reduce":
            return await comm.all_reduce(x, out=out), sum(values)
        case "reduce_scatter":
            return await comm.reduce_scatter(x, out=out), np.split(sum(values), comm.size)[comm.rank]
        case "all_gather":
            return await comm.all_gather(x, out=out), np.concatenate(values)
        case "broadcast":
            return await comm.broadcast(x, root), values[root]
    raise AssertionError(op)


def rounds(comm: Comm) -> int:
    """Of all that went straight."""
    joining = comm._channel.devices
    team = joining._team if isinstance(joining, Joining) else None
    return 0 if team is None else team.rounds


async def reduce_and_so_on(comm: Comm, op: str, count: int, dtype: str, make: Make) -> int:
    """Some of these, which go straight as soon as they may if they are to; in how many rounds the last one."""
    grown = 0
    for turn in range(JOINING + 2):
        values = [numbers(count, dtype, rank, turn) for rank in range(comm.size)]
        before = rounds(comm)
        x = make(values[comm.rank])
        check(*await collective(comm, op, x, values, turn % comm.size), dtype)
        grown = rounds(comm) - before
        if turn >= JOINING:
            assert (grown > 0) == (as_buffer(x).nbytes >= IPC_FROM[op])
        await comm.barrier()  # by now all have come to it
    return grown


async def exchange(comm: Comm, count: int, dtype: str, make: Make) -> None:
    """Some messages around the ring; those after the first are shown if they are to be."""
    dst, src = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for turn in range(3):
        x, room = make(numbers(count, dtype, comm.rank, turn)), make(numbers(count, dtype, 9, turn))
        message = await comm.sendrecv(x, dst, room, src)
        assert (message.data is room, message.count) == (True, count)
        check(room, numbers(count, dtype, src, turn), dtype)
        await comm.barrier()  # by now all have answered
        assert is_shown_to(comm, dst) == (as_buffer(x).nbytes >= SHOWN_FROM)


def is_shown_to(comm: Comm, dst: int) -> bool:
    showing = comm._channel.showing
    return showing is not None and showing.is_taken_by(dst)


def test_homes_differ_in_who_can_open_them(comm: Comm, gpu: Gpu) -> None:
    own, pooled, shared = (as_buffer(there(comm, gpu, np.zeros(SOME, np.uint8), home)) for home in HOMES)
    exports = exports_of(comm._channel.engine, own.device)
    assert exports.sharing.number_of(own.address) == 0
    assert exports.sharing.number_of(pooled.address) > 0
    assert [exports.place_of(each)[0] == PRIVATE for each in (own, pooled, shared)] == [True, True, False]


@pytest.mark.parametrize("home", ["pooled", "shared"])
@pytest.mark.parametrize(("op", "nbytes"), [(op, nbytes) for op in OPS for nbytes in sizes(IPC_FROM[op])])
async def test_a_collective_goes_straight_from_its_size_on(
    comm: Comm, gpu: Gpu, op: str, nbytes: int, home: str
) -> None:
    make = partial(there, comm, gpu, home=home)
    grown = await reduce_and_so_on(comm, op, count_of(comm, op, nbytes // 4), "float32", make)
    if home == "pooled":
        assert nbytes < plan.SLOT_BYTES or grown > 1


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("nbytes", sizes(SHOWN_FROM))
async def test_a_message_goes_straight_from_its_size_on(comm: Comm, gpu: Gpu, nbytes: int, home: str) -> None:
    await exchange(comm, nbytes // 4, "float32", partial(there, comm, gpu, home=home))
    if home == "pooled" and nbytes >= SHOWN_FROM:
        showing = comm._channel.showing
        assert showing is not None
        assert any(each.address is not None for each in showing.exports.openings._table.values())


@pytest.mark.parametrize("dtype", DTYPES)
async def test_every_type(comm: Comm, gpu: Gpu, dtype: str) -> None:
    make, count = partial(there, comm, gpu, home="pooled"), SOME // np.dtype(dtype).itemsize + 1
    for op in OPS:
        await reduce_and_so_on(comm, op, count_of(comm, op, count), dtype, make)
    await exchange(comm, count, dtype, make)


@pytest.mark.parametrize("has_stream", [False, True], ids=["default stream", "own stream"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
async def test_tensors_of_torch_beside_arrays_of_cupy(comm: Comm, gpu: Gpu, dtype: str, has_stream: bool) -> None:
    torch: Any = pytest.importorskip("torch")

    def tensor(values: Any) -> Any:
        """One that gets these values late, in torch's current stream."""
        values = torch.from_numpy(values).to("cuda", getattr(torch, dtype))
        late = torch.zeros_like(values)
        torch.cuda._sleep(SPIN_TICKS)
        return late.copy_(values)

    is_torch = dtype == "bfloat16" or comm.rank % 2 == 0
    make, count = tensor if is_torch else partial(there, comm, gpu, home="pooled"), SOME // 2 + 1
    with torch.cuda.stream(torch.cuda.Stream()) if has_stream else nullcontext():
        for op in OPS:
            await reduce_and_so_on(comm, op, count_of(comm, op, count), dtype, make)
        await exchange(comm, count, dtype, make)


def framed(values: Any, start: int) -> Any:
    """Between others: so many of them before."""
    return np.concatenate([np.full(start, -1), values, [-1]]).astype(values.dtype)


@pytest.mark.parametrize("home", ["pooled", "shared"])
@pytest.mark.parametrize("who", ["all", "some"])
async def test_arrays_that_begin_one_element_after_a_boundary(comm: Comm, gpu: Gpu, who: str, home: str) -> None:
    start = 1 if who == "all" else comm.rank % 2

    def inside(values: Any) -> tuple[Any, Any]:
        """An array with these values, and the one of which it is a part."""
        whole = there(comm, gpu, framed(values, start), home)
        part = whole[start : start + len(values)]
        assert as_buffer(part).address % 16 == start * values.itemsize
        return part, whole

    for op in OPS:
        for turn in range(JOINING + 2):
            count = count_of(comm, op, SOME // 4 + 5)
            values = [numbers(count, "float32", rank, turn) for rank in range(comm.size)]
            before = rounds(comm)
            x, whole = inside(values[comm.rank])
            factor = {"reduce_scatter": 1 / comm.size, "all_gather": comm.size}.get(op, 1)
            out, around = (x, whole) if op == "broadcast" else inside(np.zeros(round(count * factor), np.float32))
            found, expected = await collective(comm, op, x, values, turn % comm.size, out)
            assert found is out
            check(around, framed(expected, start), "float32")
            assert op == "broadcast" or np.array_equal(whole.get(), framed(values[comm.rank], start))
            assert turn < JOINING or rounds(comm) > before
            await comm.barrier()
    await exchange(comm, SOME // 4 + 5, "float32", lambda values: inside(values)[0])


@pytest.mark.parametrize(("home", "is_given_back"), [("pooled", False), ("pooled", True), ("shared", False)])
async def test_an_array_where_another_one_was(comm: Comm, gpu: Gpu, home: str, is_given_back: bool) -> None:
    make, count, dtype = maker(comm, gpu, home), SOME // 4 + 1, "float32"
    await reduce_and_so_on(comm, "all_reduce", count, dtype, partial(there, comm, gpu, home=home))
    await exchange(comm, count, dtype, partial(there, comm, gpu, home=home))
    gpu.give_back_all()  # then each array has a segment of its own, which serves the next
    address = 0
    for turn in range(4):
        x, others = make((count,), dtype), []
        while address and not is_given_back and as_buffer(x).address != address:
            assert len(others) < 50
            others.append(x)
            x = make((count,), dtype)
        address = as_buffer(x).address
        await again(comm, gpu, x, turn)
        del x, others
        gc.collect()
        if is_given_back:
            gpu.give_back_all()


async def again(comm: Comm, gpu: Gpu, x: Any, turn: int) -> None:
    """A collective and a message of this array, with other values each turn."""
    dst, src = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    values = [numbers(as_buffer(x).count, "float32", rank, turn) for rank in range(comm.size)]
    before = rounds(comm)
    gpu.fill(x, values[comm.rank])
    await comm.all_reduce(x)
    check(x, sum(values), "float32")
    gpu.fill(x, 2 * values[comm.rank])
    room = there(comm, gpu, -values[comm.rank])
    await comm.sendrecv(x, dst, room, src)
    check(room, 2 * values[src], "float32")
    assert rounds(comm) > before
    assert is_shown_to(comm, dst)
