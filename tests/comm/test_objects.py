"""Collectives of objects: anything that pickles, different on each rank."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import mpdist
from mpdist import Communicator

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def item_of(rank: int, size: int = 3) -> dict[str, Any]:
    """An object with arrays, whose size differs between ranks."""
    return {"rank": rank, "text": "é" * rank, "array": np.full((rank, size), rank), "rest": [np.arange(rank), None]}


def assert_equal(got: Any, wanted: Any) -> None:
    np.testing.assert_equal(got, wanted)


SIZES = (3, 5000)


async def test_broadcast_object_from_any_root(comm: Communicator) -> None:
    for size in SIZES:
        for src in range(comm.size):
            mine = item_of(comm.rank + 1, size)
            got = await comm.broadcast_object(mine if comm.rank == src else None, src)
            assert_equal(got, item_of(src + 1, size))
            assert (got is mine) == (comm.rank == src)


async def test_gather_object_to_any_root(comm: Communicator) -> None:
    for size in SIZES:
        for dst in range(comm.size):
            got = await comm.gather_object(item_of(comm.rank, size), dst)
            assert_equal(got, [item_of(rank, size) for rank in range(comm.size)] if comm.rank == dst else None)


async def test_all_gather_object(comm: Communicator) -> None:
    for size in SIZES:
        got = await comm.all_gather_object(item_of(comm.rank, size))
        assert_equal(got, [item_of(rank, size) for rank in range(comm.size)])


async def test_scatter_object_from_any_root(comm: Communicator) -> None:
    for size in SIZES:
        for src in range(comm.size):
            items = [item_of(rank + src, size) for rank in range(comm.size)]
            got = await comm.scatter_object(items if comm.rank == src else None, src)
            assert_equal(got, items[comm.rank])


async def test_all_to_all_object(comm: Communicator) -> None:
    for size in SIZES:
        got = await comm.all_to_all_object([item_of(10 * comm.rank + dst, size) for dst in range(comm.size)])
        assert_equal(got, [item_of(10 * src + comm.rank, size) for src in range(comm.size)])


async def test_received_arrays_are_writable_and_independent(comm: Communicator) -> None:
    x = np.full(100, comm.rank)
    got = await comm.all_gather_object(x)
    for each in got:
        each += 1
    assert (x == comm.rank).all()
    again = await comm.broadcast_object(x, 0)
    if comm.rank:
        again += 1
    assert (await comm.broadcast_object(x, 0) == 0).all()


async def test_a_roots_object_that_does_not_pickle_raises_on_all_ranks(comm: Communicator) -> None:
    src = comm.size - 1
    calls = [
        (lambda: comm.broadcast_object(lambda: None, src), "broadcast_object"),
        (lambda: comm.scatter_object([lambda: None] * comm.size, src), "scatter_object"),
        (lambda: comm.scatter_object([1] * (comm.size + 1), src), "scatter_object"),
        (lambda: comm.scatter_object(None, src), "scatter_object"),
    ]
    for call, op in calls:
        with pytest.raises(Exception) as caught:  # noqa: PT011  # pickle raises several
            await call()
        if comm.rank != src:
            assert type(caught.value) is mpdist.UsageError
            for word in (op, comm.name, f"rank {src} of"):
                assert word in str(caught.value)
            assert "UsageError" not in str(caught.value)  # Python writes it before the text
    assert await comm.all_gather_object(1) == [1] * comm.size


def test_pickles_own_error_says_where(comm: Communicator) -> None:
    """Nobody else hears of it: nothing was posted."""
    for call in (comm.all_gather_object, comm.gather_object, lambda item: comm.send_object(item, 0)):
        with pytest.raises(Exception) as caught:  # noqa: PT011  # pickle raises several
            call(lambda: None)
        (note,) = caught.value.__notes__
        assert note.endswith(f"_object on {comm._channel.where()}")

    @dataclass(frozen=True)
    class Refused(Exception):
        """Takes no note."""

        why: str

    class Refusing:
        def __reduce__(self) -> Any:
            raise Refused("no")

    with pytest.raises(Refused, match="no"):
        comm.all_gather_object(Refusing())
    comm.barrier().wait()


async def test_a_long_refusal_is_shortened_not_lost(comm: Communicator) -> None:
    class Talkative:
        def __reduce__(self) -> Any:
            raise ArithmeticError("because \u263a " * 1000)

    if comm.rank == 0:
        with pytest.raises(ArithmeticError):
            comm.broadcast_object(Talkative())
    else:
        with pytest.raises(mpdist.UsageError, match="ArithmeticError: because \u263a") as caught:
            await comm.broadcast_object()
        assert len(str(caught.value)) > 130
    await comm.barrier()


async def test_an_object_that_does_not_unpickle_fails_where_it_arrives(comm: Communicator) -> None:
    if comm.size == 1:
        pytest.skip("nothing arrives")
    if comm.rank == 0:
        await comm.broadcast_object(Stubborn())
    else:
        with pytest.raises(mpdist.CommunicationError, match="not today"):
            await comm.broadcast_object()
    assert await comm.all_gather_object(comm.rank) == list(range(comm.size))


def refuse() -> None:
    raise ArithmeticError("not today")


class Stubborn:
    """Raises when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return refuse, ()


async def test_objects_are_packed_when_posted(comm: Communicator) -> None:
    """Changing them afterwards changes nothing."""
    item = [comm.rank]
    work = comm.all_gather_object(item)
    item[0] = -1
    assert await work == [[rank] for rank in range(comm.size)]


async def test_several_may_be_pending(comm: Communicator) -> None:
    works = [comm.all_gather_object((number, comm.rank)) for number in range(30)]
    for number, got in enumerate(await asyncio.gather(*works)):
        assert got == [(number, rank) for rank in range(comm.size)]


def test_objects_without_a_loop(comm: Communicator) -> None:
    assert comm.broadcast_object({"a": comm.rank}).wait() == {"a": 0}
    assert comm.all_to_all_object([comm.rank] * comm.size).wait() == list(range(comm.size))
