"""Communicators made of others: split, subgroup, dup, their members, and their end."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import warnings
from collections.abc import Callable
from itertools import combinations
from time import sleep

import numpy as np
import pytest

import mpdist
from mpdist import Communicator
from mpdist.comm.wildcards import Tag
from mpdist.config import Config

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


async def total(comm: Communicator) -> int:
    """The sum of the world ranks, by this communicator."""
    x = np.array([comm.ranks[comm.rank]])
    return int((await comm.all_reduce(x))[0])


async def test_split_makes_a_communicator_for_each_color(comm: Communicator) -> None:
    async with comm.split(comm.rank % 2) as part:
        members = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2]
        assert part.ranks == tuple(members)
        assert (part.rank, part.size) == (members.index(comm.rank), len(members))
        assert await total(part) == sum(members)
        names = await part.all_gather_object(part.name)
        assert len(set(names)) == 1
    everyone = await comm.all_gather_object((comm.rank % 2, part.name))
    assert len(set(everyone)) == len({color for color, _ in everyone})


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
async def test_communicator_is_neither_copied_nor_pickled(comm: Communicator, make: Callable[[object], object]) -> None:
    async with comm.dup() as own:
        with pytest.raises(TypeError, match=r"cannot be copied or pickled; dup\(\) makes another"):
            make(own)
        gc.collect()
        async with comm.dup():  # the dropped ones are closed
            assert await total(own) == sum(own.ranks)


async def test_split_orders_by_key_then_by_rank(comm: Communicator) -> None:
    async with comm.split(0, key=-comm.rank) as part:
        assert part.ranks == tuple(reversed(range(comm.size)))
        assert part.rank == comm.size - 1 - comm.rank
        got = await part.all_gather(np.array(comm.rank))
        assert got.tolist() == list(part.ranks)
    async with comm.split(7, key=comm.rank // 2 % 2) as part:
        assert part.ranks == tuple(sorted(range(comm.size), key=lambda rank: (rank // 2 % 2, rank)))


async def test_color_none_is_in_no_part(comm: Communicator) -> None:
    part = await comm.split(None if comm.rank == 0 else 3)
    if comm.rank == 0:
        assert part is None
    else:
        assert part.ranks == tuple(range(1, comm.size))
        await part.close()
    async with comm.split(None) as nothing:
        assert nothing is None


async def test_subgroup_needs_its_members_only(comm: Communicator) -> None:
    for members in combinations(range(comm.size), max(1, comm.size - 1)):
        if comm.rank not in members:
            continue
        async with comm.subgroup(members) as part:
            assert part.ranks == members
            assert await total(part) == sum(members)


async def test_subgroup_keeps_the_given_order(comm: Communicator) -> None:
    order = tuple(reversed(range(comm.size)))
    async with comm.subgroup(order) as part:
        assert part.ranks == order
        assert part.rank == comm.size - 1 - comm.rank


async def test_subgroups_of_subgroups(comm: Communicator) -> None:
    async with comm.split(0, key=-comm.rank) as part, part.subgroup(range(part.size)) as again, again.dup() as third:
        assert again.ranks == third.ranks == part.ranks
        assert await total(third) == sum(range(comm.size))


async def test_overlapping_subgroups_are_made_at_once_by_different_tasks(comm: Communicator) -> None:
    """All pairs of ranks, in another order on each rank, and each pair twice."""
    pairs = [pair for pair in combinations(range(comm.size), 2) if comm.rank in pair] * 2
    np.random.default_rng(comm.rank).shuffle(pairs)

    async def use(pair: tuple[int, int]) -> int:
        async with comm.subgroup(pair) as part:
            await part.barrier()
            return await total(part)

    got = await asyncio.gather(*(use(tuple(map(int, pair))) for pair in pairs))
    assert got == [sum(pair) for pair in pairs]


async def test_subgroups_are_made_while_receives_wait_on_their_parent(comm: Communicator) -> None:
    """They look for any message; what MPI itself sends to make a group is none of theirs."""
    waiting = comm.recv(tag=1)
    for _ in range(10):
        async with comm.subgroup(list(reversed(range(comm.size)))) as part:
            assert await total(part) == sum(comm.ranks)
    await comm.send(np.zeros(1), comm.rank, 1)
    await waiting


async def test_dup_has_messages_and_an_order_of_its_own(comm: Communicator) -> None:
    async with comm.dup() as other:
        assert other.ranks == comm.ranks
        assert other.name != comm.name
        await comm.send(np.array([1]), comm.rank)
        await other.send(np.array([2]), comm.rank)
        assert (await other.recv()).data[0] == 2
        assert (await comm.recv()).data[0] == 1
        first, second = comm.all_reduce(np.array([1])), other.all_reduce(np.array([2]))
        assert (await second)[0] == 2 * comm.size
        assert (await first)[0] == comm.size


@pytest.mark.limit(120)
async def test_communicators_can_be_made_and_closed_thousands_of_times(comm: Communicator) -> None:
    """MPICH has room for 2046 at a time."""
    if comm.size > 2:
        pytest.skip("as good as with 2 ranks, and slow where they share cores")
    for _ in range(2500):
        part = await comm.dup()
        await part.close()
    assert await total(comm) == sum(comm.ranks)


async def test_many_communicators_are_open_at_once(comm: Communicator) -> None:
    parts = [await comm.dup() for _ in range(100)]
    works = [part.all_reduce(np.array([number])) for number, part in enumerate(parts)]
    for number, work in reversed(list(enumerate(works))):
        assert (await work)[0] == number * comm.size
    await asyncio.gather(*(part.close() for part in parts))


async def test_tasks_may_make_communicators_of_different_parents_in_different_order(comm: Communicator) -> None:
    for turn in range(10):
        a, b, c = await comm.dup(), await comm.dup(), await comm.split(0, -comm.rank)

        async def make(parent: Communicator, turn: int = turn) -> int:
            kinds = [parent.dup, lambda: parent.split(0), lambda: parent.subgroup(range(parent.size))]
            async with kinds[turn % 3]() as part:
                return await total(part)

        parents = [a, b, c]
        parents = parents[comm.rank % 3 :] + parents[: comm.rank % 3]
        assert await asyncio.gather(*map(make, parents)) == [sum(range(comm.size))] * 3
        for parent in (a, b, c):
            await parent.close()


def test_groups_without_a_loop(comm: Communicator) -> None:
    part = comm.split(0, -comm.rank).wait()
    assert part.all_reduce(np.array([1])).wait()[0] == comm.size
    again = part.dup().wait()
    again.barrier().wait()
    again.close().wait()
    part.close().wait()


async def test_node_holds_the_ranks_of_this_machine(comm: Communicator) -> None:
    per_node = Config.read().ranks_per_node or comm.size
    first = comm.rank // per_node * per_node
    assert comm.local_rank == comm.rank - first
    assert comm.local_size == min(per_node, comm.size - first)
    assert comm.node.ranks == comm.ranks[first : first + per_node]
    assert comm.node is comm.node
    assert await total(comm.node) == sum(comm.node.ranks)


async def test_nodes_of_two_communicators_may_be_asked_for_in_different_order(comm: Communicator) -> None:
    """A rank that waits in one of them keeps the other from nobody, and gets none of its messages."""
    a, b = await comm.dup(), await comm.dup()
    for part in (a, b) if comm.rank % 2 else (b, a):
        assert part.node.name.startswith(f"{part.name}/node")
    for part, mark in ((a, 1), (b, 100)):
        x = np.array([mark])
        await part.node.all_reduce(x)
        assert x[0] == mark * comm.local_size
        await part.close()


async def test_nodes_of_communicators_of_different_members_may_be_asked_for_in_different_order(
    comm: Communicator,
) -> None:
    pairs = [pair for pair in combinations(range(comm.size), 2) if comm.rank in pair]
    parts = [await comm.subgroup(pair) for pair in pairs]
    turned = parts[comm.rank % max(len(parts), 1) :] + parts[: comm.rank % max(len(parts), 1)]
    for part in reversed(turned):
        assert part.node.ranks == tuple(part.ranks[rank] for rank in part._neighbours())
    for part in parts:
        assert await total(part.node) == sum(part.node.ranks)
        await part.close()


async def test_two_tasks_may_ask_for_nodes_of_their_own_communicators(comm: Communicator) -> None:
    """Which comes first depends on the rank."""

    async def use(part: Communicator, mark: int, is_second: bool) -> None:
        if is_second:
            await asyncio.sleep(0)
        x = np.array([mark])
        await part.node.all_reduce(x)
        assert x[0] == mark * comm.local_size
        await part.close()

    a, b = await comm.dup(), await comm.dup()
    is_even = comm.rank % 2 == 0
    await asyncio.gather(use(a, 1, is_even), use(b, 100, not is_even))


async def test_a_node_is_refused_by_a_closed_communicator(comm: Communicator) -> None:
    part = await comm.dup()
    await part.close()
    with pytest.raises(mpdist.ClosedError, match="node on"):
        _ = part.node


async def test_closing_a_communicator_closes_its_node(comm: Communicator) -> None:
    part = await comm.dup()
    node = part.node
    await part.close()
    with pytest.raises(mpdist.ClosedError):
        node.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del part, node
        gc.collect()


# ---------------------------------------------------------------------- the end


async def test_a_closed_communicator_refuses_everything(comm: Communicator) -> None:
    part = await comm.dup()
    await part.close()
    x = np.zeros(comm.size)
    calls = {
        "send": [
            lambda: part.send(x, 0), lambda: part.send(x, part.rank), lambda: part.send(np.zeros(10_000), 0),
            lambda: part.send(bytearray(8), 0),
        ],
        "recv": [lambda: part.recv(), lambda: part.recv(x), lambda: part.recv(bytearray(8))],
        "sendrecv": [lambda: part.sendrecv(x, 0)],
        "probe": [lambda: part.probe()],
        "send_object": [lambda: part.send_object(1, 0), lambda: part.send_object(1, part.rank)],
        "recv_object": [lambda: part.recv_object()],
        "barrier": [lambda: part.barrier()],
        "all_reduce": [lambda: part.all_reduce(x), lambda: part.all_reduce(x, lambda a, b: a)],
        "all_gather": [lambda: part.all_gather(x), lambda: part.all_gather([x])],
        "all_to_all": [lambda: part.all_to_all(x)],
        "broadcast": [lambda: part.broadcast(x, 0)],
        "broadcast_object": [lambda: part.broadcast_object(1)],
        "split": [lambda: part.split(0)],
        "dup": [lambda: part.dup()],
        "subgroup": [lambda: part.subgroup([part.rank])],
        "close": [lambda: part.close()],
    }  # fmt: skip
    for op, ways in calls.items():
        for number, call in enumerate(ways):
            with pytest.raises(mpdist.ClosedError) as caught:
                call()
            place = f"{op} on '{part.name}' (rank {part.rank} of {part.size}): "
            assert str(caught.value).startswith(place), (op, number)
    assert await total(comm) == sum(comm.ranks)


async def test_close_refuses_while_something_is_pending(comm: Communicator) -> None:
    part = await comm.dup()
    pending = part.recv(tag=5)
    with pytest.raises(mpdist.UsageError, match=r"close on .* 1 operation is pending \(recv from any rank, tag 5"):
        part.close()
    await part.send(np.arange(3), part.rank, 5)
    assert (await pending).count == 3
    several = [part.recv(tag=tag) for tag in range(6)]
    with pytest.raises(mpdist.UsageError, match=r"close on .* 6 operations are pending \(.* tag 3.*; and 2 more\)"):
        part.close()
    assert all(each.cancel() for each in several)
    assert await total(part) == sum(comm.ranks)
    work = part.all_gather([np.arange(comm.rank)]) if comm.size > 1 and comm.rank == 0 else None
    if work is not None:
        with pytest.raises(mpdist.UsageError, match="all_gather"):
            part.close()
    await comm.barrier()
    await (work or part.all_gather([np.arange(comm.rank)]))
    await part.close()


async def test_after_close_was_called_nothing_can_be_posted(comm: Communicator) -> None:
    part = await comm.dup()
    closing = part.close()
    for call in (lambda: part.barrier(), lambda: part.recv(), lambda: part.send(np.zeros(1), 0), lambda: part.close()):
        with pytest.raises(mpdist.ClosedError, match=part.name):
            call()
    await closing


async def test_close_waits_for_all_members(comm: Communicator) -> None:
    part = await comm.dup()
    last = comm.size - 1
    if comm.rank == last:
        await comm.barrier()
        await part.close()
        return
    closing = part.close()
    await asyncio.sleep(0.01)
    assert not closing.done()
    await comm.barrier()
    await closing


async def test_unclaimed_messages_are_reported(comm: Communicator, capfd: pytest.CaptureFixture[str]) -> None:
    part = await comm.dup()
    await part.send(np.zeros(3, np.float32), part.rank, 7)
    await part.send_object("x", part.rank, 8)
    await part.recv_object(tag=8)
    await part.close()
    told = capfd.readouterr().err
    for word in (part.name, f"rank {comm.rank}", "1 messages", "float32 x 3", "tag 7"):
        assert word in told, told


@pytest.mark.parametrize("how", ["close", "block"])
async def test_iterators_over_messages_end_with_the_communicator(
    comm: Communicator, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    part = await comm.dup()

    async def listen(tag: Tag) -> list[int]:
        return [message.src async for message in part.messages(tag=tag)]

    listeners = [asyncio.create_task(listen(tag)) for tag in (1, 2, mpdist.ANY_TAG)]
    await asyncio.sleep(0)  # now they listen
    await part.send(np.zeros(3), (part.rank + 1) % part.size, 1)
    await comm.barrier()
    if how == "close":
        await asyncio.wait_for(part.close(), 20)
    else:
        async with part:
            pass
    got = await asyncio.wait_for(asyncio.gather(*listeners), 20)
    assert [src for each in got for src in each] == [(part.rank - 1) % part.size]
    assert capfd.readouterr().err == ""


async def test_a_task_that_has_not_begun_gets_its_messages_before_a_block_ends(comm: Communicator) -> None:
    got = []

    async def serve(part: Communicator) -> None:
        got.extend([message.src async for message in part.messages(tag=1)])

    async with asyncio.TaskGroup() as tasks, comm.dup() as part:
        tasks.create_task(serve(part))
        for _ in range(3):
            await part.send(np.ones(1), (comm.rank + 1) % comm.size, tag=1)
        await part.barrier()
    assert got == [(comm.rank - 1) % comm.size] * 3


async def test_a_receive_that_waits_when_all_leave_is_told_and_one_that_is_met_gets_its_message(
    comm: Communicator, capfd: pytest.CaptureFixture[str]
) -> None:
    async with comm.dup() as part:
        large, never, probe = part.recv(tag=1), part.recv(np.zeros(3), 0, 2), part.probe(tag=2)
        exchange = part.sendrecv(np.zeros(3), part.rank, tag=3, src=(part.rank + 1) % part.size)
        sent = part.send(np.arange(100_000), (part.rank + 1) % part.size, 1)
    assert (await large).count == 100_000
    assert sent.done()
    for work in (never, probe) if part.size == 1 else (never, probe, exchange):
        with pytest.raises(mpdist.ClosedError, match="it was closed"):
            await work
    unclaimed = "" if part.size == 1 else "1 messages that nobody received"
    assert unclaimed in capfd.readouterr().err


async def test_leaving_by_an_exception_closes_here_and_waits_for_nobody(comm: Communicator) -> None:
    part = await comm.dup()
    if comm.rank == 0:
        with pytest.raises(ArithmeticError):
            async with part:
                raise ArithmeticError
        with pytest.raises(mpdist.ClosedError, match="ArithmeticError"):
            part.barrier()
        await comm.barrier()
        return
    await comm.barrier()
    with pytest.raises(ArithmeticError):
        async with part:
            raise ArithmeticError


async def test_leaving_by_an_exception_ends_what_waits_there(comm: Communicator) -> None:
    part = await comm.dup()

    async def listen() -> list[object]:
        return [message async for message in part.messages()]

    listener = asyncio.create_task(listen())
    receive = part.recv(tag=3)
    await asyncio.sleep(0)
    with pytest.raises(ArithmeticError):
        async with part:
            raise ArithmeticError
    with pytest.raises(mpdist.ClosedError):
        await asyncio.wait_for(receive, 5)
    assert await asyncio.wait_for(listener, 5) == []


async def test_a_communicator_closed_inside_its_block_is_left_quietly(comm: Communicator) -> None:
    async with comm.dup() as part:
        await part.close()


async def test_a_forgotten_communicator_gives_a_warning(comm: Communicator) -> None:
    part = await comm.dup()
    name = part.name
    await comm.barrier()  # a communicator remembers the last collective, here the dup
    parts = [part]
    del part
    with pytest.warns(ResourceWarning, match=name):
        parts.clear()


async def test_a_cancelled_await_leaves_the_communicator_to_be_awaited_again(comm: Communicator) -> None:
    if comm.size == 1:
        pytest.skip("nobody to wait for")
    if comm.rank == 0:
        making = comm.dup()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(making, 0.02)
        assert not making.cancelled()
        await comm.send(np.zeros(1), 1)
        part = await making
    else:
        if comm.rank == 1:
            await comm.recv()
        part = await comm.dup()
    assert await total(part) == sum(comm.ranks)
    await part.close()


@pytest.mark.ranks(2, 3)
async def test_a_block_that_was_cancelled_before_it_began_is_left_when_the_others_come(comm: Communicator) -> None:
    async def use() -> None:
        async with comm.dup():
            pytest.fail("the others have not come")

    last = comm.size - 1
    if comm.rank == last:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(use(), 0.02)
        await asyncio.gather(*(comm.send(np.zeros(1), rank) for rank in range(last)))
    else:
        await comm.recv()
        async with comm.dup() as part:
            pass
        assert part._channel.is_closed
    assert await total(comm) == sum(comm.ranks)


# ---------------------------------------------------------------------- tasks


async def test_two_tasks_with_collectives_on_one_communicator_are_refused(comm: Communicator) -> None:
    """It names both lines, and the communicator is lost: nobody knows which order the other ranks had."""
    part = await comm.dup()

    async def first() -> None:
        await part.barrier()

    async def second() -> None:
        await part.all_reduce(np.zeros(1))

    if comm.size == 1:
        await asyncio.gather(first(), second())  # the first has ended when the second comes
        await part.close()
        return
    if comm.rank == 0:
        task = asyncio.create_task(first(), name="first")
        await asyncio.sleep(0)
        with pytest.raises(mpdist.UsageError) as caught:
            await asyncio.create_task(second(), name="second")
        text = str(caught.value)
        for word in ("all_reduce", "barrier", "'first'", "'second'", "dup()", part.name):
            assert word in text, text
        assert text.count("test_groups.py:") == 2
        assert text.count("all_reduce on") == 1
        for call in (part.barrier, part.recv, lambda: part.send(np.zeros(1), 1), lambda: part.send(np.zeros(1), 0)):
            with pytest.raises(mpdist.ClosedError, match="two tasks"):
                call()
        await comm.barrier()
        await task
        await part.close()
        with pytest.raises(mpdist.ClosedError, match="was closed"):
            part.close()
        return
    await comm.barrier()
    await part.barrier()
    with pytest.raises(ArithmeticError):
        async with part:
            raise ArithmeticError


async def test_tasks_may_use_one_communicator_one_after_the_other(comm: Communicator) -> None:
    async def use() -> int:
        return await total(comm)

    for _ in range(3):
        assert await asyncio.create_task(use()) == sum(comm.ranks)


async def test_tasks_with_a_communicator_each_do_not_mix(comm: Communicator) -> None:
    async def use(part: Communicator, number: int) -> None:
        random = np.random.default_rng([comm.rank, number])
        for turn in range(30):
            if random.random() < 0.3:
                await asyncio.sleep(0)
            x = np.full(4, number * 1000 + turn)
            assert (await part.all_reduce(x) == comm.size * (number * 1000 + turn)).all()
            got = await part.all_gather_object((number, turn))
            assert got == [(number, turn)] * comm.size
        await part.close()

    parts = [await comm.dup() for _ in range(8)]
    await asyncio.gather(*(use(part, number) for number, part in enumerate(parts)))


async def test_an_mpi4py_communicator_is_taken_as_a_duplicate(comm: Communicator) -> None:
    from mpi4py import MPI

    own = MPI.COMM_WORLD.Split(0, -comm.rank)
    taken = Communicator.from_mpi4py(own, "mine")
    try:
        assert (taken.name, taken.ranks) == ("mine", tuple(reversed(range(comm.size))))
        assert await total(taken) == sum(comm.ranks)
    finally:
        await taken.close()
    assert own.allreduce(1) == comm.size
    own.Free()
    with pytest.raises((TypeError, mpdist.UsageError), match="mpi4py"):
        Communicator.from_mpi4py("nonsense")
    for nothing in (own, MPI.COMM_NULL, MPI.COMM_WORLD.Split(MPI.UNDEFINED)):
        with pytest.raises(mpdist.UsageError, match="it was freed before, or this rank is not in it"):
            Communicator.from_mpi4py(nothing)


@pytest.mark.parametrize("nbytes", [8, 16_000_000])
async def test_what_is_pending_goes_on_while_one_of_mpi4py_is_taken_over(comm: Communicator, nbytes: int) -> None:
    from mpi4py import MPI

    work = comm.all_reduce(np.ones(nbytes // 8))
    if comm.rank:
        assert (await work == comm.size).all()
    taken = Communicator.from_mpi4py(MPI.COMM_WORLD, "late")
    assert (await work == comm.size).all()
    await taken.close()


async def test_mpi4py_communicators_of_one_name_get_different_names(comm: Communicator) -> None:
    """Members meet by name: in two that are used at the same time one must not be taken for the other."""
    from mpi4py import MPI

    name = comm.name.replace("world", "taken")
    taken = [Communicator.from_mpi4py(MPI.COMM_WORLD, name) for _ in range(2)]
    try:
        assert [each.name for each in taken] == [name, f"{name}#2"]
        order = taken if comm.rank else reversed(taken)
        async with asyncio.TaskGroup() as tasks:
            for each in order:
                tasks.create_task(use(each))
    finally:
        for each in taken:
            await each.close()


async def use(comm: Communicator) -> None:
    """A small collective, then one that shares memory."""
    await comm.barrier()
    assert (await comm.all_reduce(np.ones(100_000)) == comm.size).all()


async def test_a_forked_child_does_not_warn_or_close(comm: Communicator) -> None:
    pid = os.fork()
    if pid == 0:
        status = 3
        try:
            del comm
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert status == 0
    assert await total(comm) == sum(comm.ranks)


@pytest.mark.ranks(2, 3, 4)
def test_a_duplicate_holds_nobody_who_meets_the_others_outside_of_mpdist(comm: Communicator) -> None:
    """Whoever comes last finds all there, and must not wait in MPI for those who have not looked since."""
    from mpi4py import MPI

    if comm.rank == comm.size - 1:
        sleep(0.1)
    work = comm.dup()
    MPI.COMM_WORLD.Barrier()
    work.wait().close().wait()


@pytest.mark.ranks(2, 3)
async def test_a_subgroup_given_up_leaves_all_else_usable(comm: Communicator) -> None:
    if comm.rank == 0:
        with pytest.raises(mpdist.WorkTimeout, match=r"of ranks \[0, 1\] of '.*' .*test_groups\.py"):
            await comm.subgroup([0, 1]).within(0.05)
    await comm.barrier()
    if comm.rank == 1:
        async with comm.subgroup([0, 1]) as pair:  # rank 0 has come, and has left
            assert pair.size == 2
    if comm.rank < 2:
        async with comm.subgroup([0, 1]) as pair:
            assert await total(pair) == sum(comm.ranks[:2])


async def test_colors_and_keys_have_32_bits(comm: Communicator) -> None:
    for arguments in ((2**31, 0), (0, 2**31), (0, -(2**31))):
        with pytest.raises(mpdist.UsageError, match=str(arguments[0] or arguments[1])):
            comm.split(*arguments)
    async with comm.split(2**31 - 1, -comm.rank) as part:
        assert part.rank == comm.size - 1 - comm.rank
