"""Channel: what is remembered of collectives that are over."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mpdist
from mpdist import Communicator
from mpdist.runtime.answers import answer, key_of

pytestmark = pytest.mark.ranks(1, 2)

Call = Callable[[Communicator, Any], mpdist.Work[Any]]

CALLS: dict[str, Call] = {
    "all_reduce float32 x 4 sum": lambda comm, x: comm.all_reduce(x),
    "all_reduce float32 x 4 add": lambda comm, x: comm.all_reduce(x, op=np.add),
    "all_reduce float32 x 4 avg in order": lambda comm, x: comm.all_reduce(x, op="avg", deterministic=True),
    "reduce float32 x 4 max to 0": lambda comm, x: comm.reduce(x, 0, op="max"),
    "scan float32 x 4 sum": lambda comm, x: comm.scan(x),
    "reduce_scatter float32 x 4 sum": lambda comm, x: comm.reduce_scatter(x),
    "broadcast float32 x 4 from 0": lambda comm, x: comm.broadcast(x, 0),
    "gather float32 x 4 to 0": lambda comm, x: comm.gather(x, 0),
    "gather list to 0": lambda comm, x: comm.gather([x], 0),
    "all_gather float32 x 4": lambda comm, x: comm.all_gather(x),
    "all_gather [float32]": lambda comm, x: comm.all_gather([x]),
    "all_to_all float32 x 4": lambda comm, x: comm.all_to_all(x),
    "all_to_all [float32]": lambda comm, x: comm.all_to_all([x] * comm.size),
}


async def over(comm: Communicator, call: Call) -> weakref.ref[Any]:
    """An array that a collective has used, which is over; another one has followed."""
    x = np.ones(4, np.float32)
    await call(comm, x)
    await comm.barrier()
    return weakref.ref(x)


@pytest.mark.parametrize("text", CALLS)
async def test_its_text_is_known_and_its_array_is_free(comm: Communicator, text: str) -> None:
    used = await over(comm, CALLS[text])
    gc.collect()
    assert used() is None
    channel = comm._channel
    key, number = key_of(channel.name, channel.world_ranks), channel.sequence - 1
    told = answer(channel.engine, 0, {key: [number]}, is_finished=False).channels[key].calls[0]
    assert told.sequence == number
    assert f"{told.op} {told.details}" == text


@pytest.mark.parametrize("name", ["all_reduce", "reduce", "scan", "reduce_scatter", "reduce_scatter of a list"])
async def test_a_function_given_as_op_is_free(comm: Communicator, name: str) -> None:
    async def reduce() -> weakref.ref[Any]:
        op = lambda a, b: a + b  # noqa: E731  # an object of its own
        x = [np.ones(4)] * comm.size if name.endswith("list") else np.ones(4)
        await getattr(comm, name.partition(" ")[0])(x, *[0] * (name == "reduce"), op=op)
        return weakref.ref(op)

    used = await reduce()
    gc.collect()
    assert used() is None


async def test_posting_looks_at_the_last_pending_collective_only(comm: Communicator) -> None:
    """Not at all: a thousand of them would be looked at half a million times."""
    looks: list[int] = []

    class Watched(deque[Any]):
        def __iter__(self) -> Iterator[Any]:
            looks.append(threading.get_ident())
            return super().__iter__()

    await comm.all_reduce(np.ones(4))
    comm._channel.collectives = Watched()
    works = [comm.all_reduce(np.ones(4)) for _ in range(50)]
    works += [comm.broadcast(np.ones(4), 0) for _ in range(50)]
    assert threading.get_ident() not in looks
    await asyncio.gather(*works)
