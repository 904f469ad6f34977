"""Debug mode on ranks: every difference raises on all of them, and nothing else does."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest

import mpdist
from mpdist.debug import install_debug

pytestmark = pytest.mark.ranks(2, 3)

Call = Callable[[mpdist.Communicator], Awaitable[object]]


@pytest.fixture
async def checked(comm: mpdist.Communicator) -> AsyncIterator[mpdist.Communicator]:
    """A communicator in debug mode."""
    engine = comm._channel.engine
    install_debug(engine)
    try:
        async with await comm.dup() as checked:
            yield checked
    finally:
        engine.on_channel = None


def f(count: int = 6, dtype: str = "float32") -> np.ndarray:
    return np.ones(count, dtype)


MISMATCHES: dict[str, tuple[Call, Call]] = {
    "operation": (lambda c: c.all_reduce(f()), lambda c: c.broadcast(f(), 0)),
    "barrier or not": (lambda c: c.barrier(), lambda c: c.all_reduce(f())),
    "count": (lambda c: c.all_reduce(f()), lambda c: c.all_reduce(f(12))),
    "element": (lambda c: c.all_reduce(f()), lambda c: c.all_reduce(f(dtype="int32"))),
    "op": (lambda c: c.all_reduce(f(), "sum"), lambda c: c.all_reduce(f(), "max")),
    "root of broadcast": (lambda c: c.broadcast(f(), 0), lambda c: c.broadcast(f(), 1)),
    "root of reduce": (lambda c: c.reduce(f(), 0), lambda c: c.reduce(f(), 1)),
    "root of scatter": (lambda c: c.scatter([f()] * c.size, 0), lambda c: c.scatter([f()] * c.size, 1)),
    "count of broadcast": (lambda c: c.broadcast(f(), 0), lambda c: c.broadcast(f(12), 0)),
    "form of all_gather": (lambda c: c.all_gather(f()), lambda c: c.all_gather([f()])),
    "objects or arrays": (lambda c: c.all_gather_object(1), lambda c: c.all_gather(f())),
    "root of objects": (lambda c: c.broadcast_object(1, 0), lambda c: c.broadcast_object(1, 1)),
    "split or dup": (lambda c: c.split(0), lambda c: c.dup()),
}


@pytest.mark.parametrize("what", MISMATCHES)
async def test_a_mismatch_raises_on_all_ranks_within_a_second(checked: mpdist.Communicator, what: str) -> None:
    ours, theirs = MISMATCHES[what]
    odd = checked.size - 1
    await checked.barrier()
    start = time.monotonic()
    with pytest.raises(mpdist.CollectiveMismatch) as caught:
        await (theirs if checked.rank == odd else ours)(checked)
    assert time.monotonic() - start < 1
    assert sorted(caught.value.calls) == list(range(checked.size))
    assert re.match(r"call \d+ on 'world/.*' differs between ranks:\n    rank", str(caught.value))
    assert str(caught.value).count("test_check.py:") >= 1
    assert all("test_check.py:" in call for call in caught.value.calls.values())
    x = np.ones(3)
    assert (await checked.all_reduce(x)).tolist() == [checked.size] * 3


async def test_what_may_differ_between_ranks_is_no_mismatch(checked: mpdist.Communicator) -> None:
    c, rank, size = checked, checked.rank, checked.size
    assert (await c.scatter(np.arange(2 * size) if rank == 0 else None, 0)).tolist() == [2 * rank, 2 * rank + 1]
    blocks = [np.full(r + 1, r) for r in range(size)] if rank == 1 else None
    assert (await c.scatter(blocks, 1)).tolist() == [rank] * (rank + 1)
    assert [len(part) for part in await c.all_gather([f(rank + 1)])] == [r + 1 for r in range(size)]
    gathered = await c.gather([f(rank + 1)], 0)
    assert gathered is None or len(gathered) == size
    assert [len(part) for part in await c.all_to_all([f(rank + 1)] * size)] == [r + 1 for r in range(size)]
    assert await c.all_gather_object("x" * rank) == ["x" * r for r in range(size)]
    assert await c.broadcast_object({"a": 1} if rank == 0 else None) == {"a": 1}
    assert await c.scatter_object(list(range(size)) if rank == 0 else None) == rank
    assert (await c.all_reduce(f(), lambda a, b: a + b)).tolist() == [size] * 6
    assert (await c.all_reduce(f(), out=f() if rank else None)).tolist() == [size] * 6
    part = await c.split(rank % 2, key=-rank)
    assert await part.all_gather_object(rank) == sorted(range(rank % 2, size, 2), reverse=True)
    await part.close()
    async with c.subgroup([rank]) as alone:
        assert (await alone.all_reduce(f())).tolist() == [1] * 6


async def test_collectives_in_flight_together_are_compared_in_order(checked: mpdist.Communicator) -> None:
    arrays = [np.full(4, float(number)) for number in range(10)]
    for work in [checked.all_reduce(x) for x in arrays]:
        await work
    assert [x[0] for x in arrays] == [checked.size * number for number in range(10)]


async def test_a_bad_argument_of_the_root_reaches_all_ranks(checked: mpdist.Communicator) -> None:
    with pytest.raises(mpdist.UsageError, match="axis 0 must be a multiple"):
        await checked.scatter(np.ones(checked.size + 1), 0)
    await checked.barrier()


@pytest.mark.parametrize("steps", [0, 1])
async def test_an_averager_goes_on_after_a_mismatch(checked: mpdist.Communicator, steps: int) -> None:
    """Also where the ranks had not agreed on the order before."""
    x = np.empty(3)
    averager = mpdist.GradientAverager(checked, [x], op="sum")
    for step in range(steps + 3):
        x[:] = checked.rank + step
        if step != steps:
            averager.ready(0)
            await averager
            assert x.tolist() == [checked.size * ((checked.size - 1) / 2 + step)] * 3
            continue
        if checked.rank == checked.size - 1:
            with pytest.raises(mpdist.CollectiveMismatch):
                await checked.barrier()
            continue
        averager.ready(0)
        with pytest.raises(mpdist.CollectiveMismatch):
            await averager
