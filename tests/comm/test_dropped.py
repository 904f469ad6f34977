"""Communicators that went without close(): all members make another one, and those that all have dropped are closed."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpdist import Communicator

pytestmark = [
    pytest.mark.ranks(1, 2, 3, 4),
    pytest.mark.filterwarnings("ignore:communicator .* was never closed:ResourceWarning"),
]

MAKINGS: dict[str, Callable[[Communicator], Any]] = {
    "dup": lambda comm: comm.dup(),
    "split": lambda comm: comm.split(0, comm.rank),
    "subgroup": lambda comm: comm.subgroup(range(comm.size)),
}
making = pytest.mark.parametrize("making", MAKINGS)


async def settle(comm: Communicator) -> None:
    """Close what earlier tests have left, so that each begins with nothing dropped."""
    gc.collect()
    await comm.barrier()
    async with comm.dup():
        assert not comm._channel.engine.dropped


async def open_names(comm: Communicator, how: str = "dup") -> set[str]:
    """Names of all open communicators, after another one was made."""
    async with MAKINGS[how](comm) as another:
        return {channel.name for channel in comm._channel.engine.channels} - {another.name}


@making
async def test_what_all_have_dropped_is_given_back(comm: Communicator, making: str) -> None:
    await settle(comm)
    before = await open_names(comm)
    transports = []
    for how in MAKINGS:
        for number in range(3):
            part = await MAKINGS[how](comm)
            if number:
                await part.all_reduce(np.ones(300_000))
            transports.append(part._channel.transport)
            del part
    assert await open_names(comm, making) == before
    assert not comm._channel.engine.dropped
    assert {bool(transport.comm) for transport in transports} == {False}  # MPI's null communicator


async def test_its_node_goes_with_it(comm: Communicator) -> None:
    await settle(comm)
    before = await open_names(comm)
    part = await comm.dup()
    await part.node.barrier()
    del part
    assert await open_names(comm) == before


async def test_its_node_stays_while_it_is_used(comm: Communicator) -> None:
    await settle(comm)
    before = await open_names(comm)
    node = (await comm.dup()).node
    assert await open_names(comm) == before | {node.name}
    assert (await node.all_reduce(np.ones(3))).tolist() == [node.size] * 3
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        del node
        gc.collect()
    assert not told  # nobody has to close a node
    assert await open_names(comm) == before


@pytest.mark.ranks(2, 3, 4)
@making
async def test_it_works_as_long_as_one_rank_still_has_it(comm: Communicator, making: str) -> None:
    await settle(comm)
    before = await open_names(comm)
    part = await comm.dup()
    name, last = part.name, comm.size - 1
    if comm.rank == 0:
        await part.send(np.arange(3), last)
        del part
    assert name in await open_names(comm, making)
    if comm.rank == last:
        assert (await part.recv(src=0)).data.tolist() == [0, 1, 2]
    if comm.rank:
        del part
    assert await open_names(comm, making) == before


@pytest.mark.ranks(2, 3, 4)
async def test_it_stays_while_something_is_pending_on_it(comm: Communicator) -> None:
    await settle(comm)
    before = await open_names(comm)
    part = await comm.dup()
    name, work = part.name, part.recv()
    del part
    assert name in await open_names(comm)
    work.cancel()
    del work
    assert await open_names(comm) == before


@pytest.mark.ranks(2, 3, 4)
async def test_messages_that_nobody_received_are_told_and_never_meet_another(
    comm: Communicator, capfd: pytest.CaptureFixture[str]
) -> None:
    await settle(comm)
    after = (comm.rank + 1) % comm.size
    for turn in range(4):
        part = await comm.dup()
        await part.send(np.full(2, turn), after)
        del part
    async with comm.dup() as part:
        await part.send(np.full(3, -1), after)
        assert (await part.recv()).data.tolist() == [-1] * 3
    assert capfd.readouterr().err.count("is closed with 1 messages that nobody received") == 4


async def test_each_is_closed_once_where_several_are_made_at_once(comm: Communicator) -> None:
    await settle(comm)
    before = await open_names(comm)
    for _ in range(3):
        await comm.dup()
    makings = [MAKINGS[how](comm) for how in ("subgroup", "dup", "subgroup")]
    for part in await asyncio.gather(*makings):
        await part.close()
    del makings, part
    assert await open_names(comm) == before


@pytest.mark.ranks(3, 4)
async def test_parts_are_closed_by_those_that_make_another_with_all_their_members(comm: Communicator) -> None:
    await settle(comm)
    before = await open_names(comm)
    pair = await comm.subgroup([0, 1]) if comm.rank < 2 else None
    part = await comm.split(0)
    names = {each.name for each in (pair, part) if each is not None}
    del pair, part
    alone = await comm.subgroup([comm.rank])
    assert names <= await open_names(alone)
    await alone.close()
    assert await open_names(comm) == before


@pytest.mark.ranks(2, 3)
async def test_those_out_of_step_are_left_as_they_are(comm: Communicator) -> None:
    await settle(comm)
    before = await open_names(comm)
    part = await comm.dup()
    name = part.name
    part._channel.give_up("a collective timed out")
    del part
    assert await open_names(comm) == before | {name}
    assert not comm._channel.engine.dropped
    [channel] = [channel for channel in comm._channel.engine.channels if channel.name == name]
    channel.close("the test is over")


async def test_those_over_communicators_of_mpi4py_are_given_back_too(comm: Communicator) -> None:
    from mpi4py import MPI

    await settle(comm)
    before = await open_names(comm)
    transports = []
    for _ in range(4):
        part = Communicator.from_mpi4py(MPI.COMM_WORLD, "library")
        await part.barrier()
        transports.append(part._channel.transport)
        del part
    assert [bool(transport.comm) for transport in transports] == [False, False, False, True]
    assert await open_names(comm) == before
