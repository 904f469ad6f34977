"""Groups, the key-value store, and how a program starts."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpdist
import mpdist.torch.store as stores
from mpdist.torch import MpiStore, setup_env
from mpdist.torch.creation import check_backends

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.limit(90)]

MINUTE = timedelta(seconds=60)


@pytest.fixture
def nothing(world: mpdist.Communicator) -> Any:
    """No group before, and none afterwards."""
    torch.set_num_threads(1)
    yield world
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_process_with_a_group_keeps_the_memory_that_it_frees(
    nothing: mpdist.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    monkeypatch.setattr("mpdist.torch.creation.keep_freed", kept.append)
    dist.init_process_group("mpdist")
    assert kept == [1024 * 1024**2]


def check_default_group(world: mpdist.Communicator, backend: str = "mpdist") -> None:
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (world.rank, world.size, backend)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [world.size] * 2


def clear_environment(patch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        patch.delenv(name, raising=False)


def test_starts_without_variables_and_again(nothing: mpdist.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    clear_environment(monkeypatch)
    for _ in range(3):
        dist.init_process_group("mpdist")
        check_default_group(nothing)
        part = dist.new_group([0])
        dist.destroy_process_group()
        del part
    assert int(os.environ["RANK"]) == nothing.rank
    assert int(os.environ["LOCAL_WORLD_SIZE"]) == nothing.size


def test_default_groups_that_come_and_go_keep_no_store(nothing: mpdist.Communicator) -> None:
    alive = []
    for _ in range(3):
        dist.init_process_group("mpdist")
        alive.append(len(stores._alive))
        dist.destroy_process_group()
    assert alive[2] == alive[0]


def test_groups_that_come_and_go_keep_no_shared_memory(nothing: mpdist.Communicator) -> None:
    shared = nothing._channel.engine.shared
    if shared is None:
        pytest.skip("one rank shares nothing")

    def one() -> int:
        part = dist.new_group()
        dist.all_reduce(torch.ones(200_000), group=part)
        dist.destroy_process_group(part)
        return shared.arena.used_bytes

    for _ in range(2):
        dist.init_process_group("mpdist")
        dist.all_reduce(torch.ones(200_000))
        used = [one() for _ in range(6)]
        assert used[-1] == used[1]
        dist.destroy_process_group()


def test_every_rendezvous(
    nothing: mpdist.Communicator, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    world = nothing
    clear_environment(monkeypatch)
    setup_env()
    path = world.broadcast_object(str(tmp_path_factory.mktemp("store") / "file"), src=0).wait()
    place = {"rank": world.rank, "world_size": world.size}
    tcp = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
    for arguments in (
        {"init_method": "mpi://"},
        {"init_method": "mpi://", **place},
        {"init_method": "env://"},
        {"init_method": f"file://{path}", **place},
        {"init_method": tcp, **place},
        {"store": MpiStore("own"), **place},
        {"store": dist.FileStore(f"{path}2", world.size), **place},
    ):
        dist.init_process_group("mpdist", timeout=MINUTE, **arguments)
        check_default_group(world)
        dist.destroy_process_group()


def test_another_rank_than_mpis_is_refused(nothing: mpdist.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, size = nothing.rank, nothing.size
    for arguments in (
        {"init_method": "mpi://", "rank": rank, "world_size": size + 1},
        {"store": dist.HashStore(), "rank": (rank + 1) % (size + 1), "world_size": size + 1},
    ):
        with pytest.raises(ValueError, match=f"of {size + 1}.*rank {rank} of {size}"):
            dist.init_process_group("mpdist", **arguments)
    setup_env()
    monkeypatch.setenv("WORLD_SIZE", str(size + 1))
    with pytest.raises(ValueError, match=f"WORLD_SIZE.*of {size + 1}.*rank {rank} of {size}"):
        dist.init_process_group("mpdist")
    monkeypatch.undo()
    dist.init_process_group("mpdist")
    check_default_group(nothing)


def test_several_backends_in_one_group_are_refused(nothing: mpdist.Communicator) -> None:
    with pytest.raises(RuntimeError, match=r'"cpu:mpdist,cuda:gloo": a group .*new_group\(backend="gloo"\)'):
        dist.init_process_group("cpu:mpdist,cuda:gloo")
    with pytest.raises(RuntimeError, match='"cpu:gloo,cuda:mpdist": a group'):
        check_backends({"cpu": "gloo", "cuda": "mpdist"})  # in a job gloo would be made first, and taken apart
    dist.init_process_group("cpu:mpdist,cuda:mpdist")
    check_default_group(nothing, "cpu:mpdist,cuda:mpdist")
    with pytest.raises(ValueError, match="has no other backend beside it"):
        dist.new_group(backend="cpu:mpdist,cuda:gloo")
    own = dist.new_group(backend="cpu:mpdist")
    dist.barrier(own)


def test_gloo_starts_under_mpi_without_variables(nothing: mpdist.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    clear_environment(monkeypatch)
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (nothing.rank, nothing.size)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [nothing.size] * 2


def test_ranks_that_another_backend_numbers_otherwise_are_refused(nothing: mpdist.Communicator) -> None:
    rank, size = nothing.rank, nothing.size
    if size == 1:
        pytest.skip("one rank has one number")
    dist.init_process_group("gloo", store=MpiStore("gloo"), rank=(rank + 1) % size, world_size=size)
    with pytest.raises(ValueError, match=rf"rank \d of {size} of .* of gloo, is rank \d of {size} of MPI"):
        dist.new_group(backend="mpdist")
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=MpiStore("gloo again"), rank=rank, world_size=size)
    ranks = list(range(1, size))
    part = dist.new_group(ranks, backend="mpdist")
    if rank in ranks:
        x = torch.full((1,), float(rank))
        dist.broadcast(x, 1, group=part)
        assert x.item() == 1
    dist.barrier()  # gloo still connects on other ranks


def test_starts_inside_a_running_event_loop(nothing: mpdist.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    clear_environment(monkeypatch)

    async def main() -> None:
        setup_env()
        for _ in range(2):
            dist.init_process_group("mpdist")
            check_default_group(nothing)
            own = dist.new_group(list(range(nothing.size)))
            x = torch.ones(2)
            await dist.all_reduce(x, group=own, async_op=True)
            assert x.tolist() == [nothing.size] * 2
            dist.destroy_process_group()

    asyncio.run(main())


def test_gloo_beside_it(group: dist.ProcessGroup) -> None:
    own = dist.new_group(backend="gloo", timeout=MINUTE)
    assert dist.get_backend(own) == "gloo"
    x = torch.ones(2)
    dist.all_reduce(x, group=own)
    dist.all_reduce(x)
    assert x.tolist() == [group.size() ** 2] * 2
    dist.monitored_barrier(own)
    dist.destroy_process_group(own)


def test_members_only(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    for first in range(size):
        members = list(range(first, size))
        if rank in members:
            own: Any = dist.new_group(members, use_local_synchronization=True)
            x = torch.tensor([float(rank)])
            dist.all_reduce(x, group=own)
            assert x.item() == sum(members)
            assert dist.get_process_group_ranks(own) == members
            dist.destroy_process_group(own)


def test_what_torch_reads_of_a_group(group: dist.ProcessGroup) -> None:
    assert group.name() == "mpdist"
    assert dist.get_group_rank(group, group.rank()) == group.rank()
    types = {device.type for device in group._device_types}
    assert types == ({"cpu", "cuda"} if torch.version.cuda else {"cpu"})
    numbers: list[Any] = [None] * group.size()
    dist.all_gather_object(numbers, group._get_sequence_number_for_group())
    assert len(set(numbers)) == 1
    before = group._get_sequence_number_for_group()
    dist.barrier()
    assert group._get_sequence_number_for_group() == before + 1
    group.set_timeout(timedelta(seconds=77))
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)


def test_a_mesh(group: dist.ProcessGroup) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    size, rank = group.size(), group.rank()
    shape = (2, size // 2) if size % 2 == 0 else (1, size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("rows", "columns"))
    for name, own in (("rows", mesh["rows"]), ("columns", mesh["columns"])):
        members = own.mesh.tolist()
        assert rank in members
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=mesh.get_group(name))
        assert x.item() == sum(members)


# ---------------------------------------------------------------------- the store


def test_the_store_keeps_what_it_is_told(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    for store in (MpiStore("test1"), dist.PrefixStore("deeper", MpiStore("test2").clone())):
        store.set(f"key{rank}", f"value{rank}")
        assert [store.get(f"key{each}") for each in range(size)] == [b"value%d" % each for each in range(size)]
        store.set("bytes", bytes(range(256)))
        assert store.get("bytes") == bytes(range(256))
        store.add("count", rank + 1)
        store.wait([f"key{each}" for each in range(size)], MINUTE)
        assert store.check(["key0"])
        assert not store.check(["key0", "nothing"])
        dist.barrier()
        assert store.add("count", 0) == size * (size + 1) // 2
        assert store.compare_set(f"own{rank}", "", "first") == b"first"
        assert store.compare_set(f"own{rank}", "other", "second") == b"first"
        assert store.compare_set(f"own{rank}", "first", "second") == b"second"
        assert store.compare_set(f"none{rank}", "x", "y") == b"x"
        assert store.delete_key(f"own{rank}")
        assert not store.delete_key(f"own{rank}")
        store.append(f"list{rank}", "a")
        store.append(f"list{rank}", "b")
        assert store.get(f"list{rank}") == b"ab"
        store.multi_set([f"m{rank}", f"n{rank}"], ["1", "2"])
        assert store.multi_get([f"n{rank}", f"m{rank}"]) == [b"2", b"1"]
        dist.barrier()
        assert store.num_keys() == 2 + 4 * size
        dist.barrier()


def test_the_store_gives_up_after_its_timeout(group: dist.ProcessGroup) -> None:
    store = MpiStore("test3")
    with pytest.raises(RuntimeError, match=r"wait timeout after 200ms, keys: missing"):
        store.wait(["missing"], timedelta(milliseconds=200))
    store.set_timeout(timedelta(milliseconds=100))
    with pytest.raises(RuntimeError, match="wait timeout after 100ms, keys: p/absent"):
        dist.PrefixStore("p", store).get("absent")
    outer = dist.PrefixStore("q", dist.PrefixStore("p", store))
    outer.set_timeout(timedelta(milliseconds=50))
    assert (outer.timeout, store.timeout) == (timedelta(milliseconds=50),) * 2
    with pytest.raises(RuntimeError, match="wait timeout after 50ms, keys: p/q/absent"):
        outer.get("absent")
    store.set_timeout(timedelta.max)
    assert store.clone().timeout == store.timeout > timedelta(days=365)
    dist.barrier()
    store.set("missing", "here")  # whoever gave up is not answered any more
    assert store.get("missing") == b"here"


def test_the_store_refuses_what_cannot_be_done_and_goes_on(group: dist.ProcessGroup) -> None:
    store = MpiStore("test6", MINUTE)
    mine = f"key{group.rank()}"
    store.set(mine, "abc")
    with pytest.raises(dist.DistStoreError, match=rf"cannot carry out 'add'.*test6/{mine}' holds b'abc'"):
        store.add(mine, 1)
    with pytest.raises(ValueError, match="got 2 keys and 1 values"):
        store.multi_set(["a", "b"], ["x"])
    assert not store.check(["a"])
    wrong: Any = store
    for refused in (
        lambda: wrong.set(mine, 3),
        lambda: wrong.append(mine, None),
        lambda: wrong.compare_set(mine, "abc", 3),
        lambda: wrong.multi_set([mine], [3]),
        lambda: wrong.multi_set("a", ["x"]),
        lambda: wrong.check(mine),
        lambda: wrong.wait("a"),
        lambda: wrong.multi_get("a"),
        lambda: wrong.set(b"a", "x"),
        lambda: wrong.add(f"count{group.rank()}", 1.5),
    ):
        with pytest.raises(TypeError):
            refused()
    store.set(f"{mine}/view", memoryview(bytearray(b"xy")))
    assert store.get(f"{mine}/view") == b"xy"
    store.wait([mine], timedelta.max)
    assert store.get(mine) == b"abc"
    assert store.add(f"count{group.rank()}", 1) == 1
    dist.barrier()


def test_the_store_answers_while_rank_0_computes(group: dist.ProcessGroup) -> None:
    store = MpiStore("test4", timedelta(seconds=20))
    dist.barrier()
    if group.rank() == 0:
        x = torch.randn(700, 700)
        for _ in range(30):
            x = torch.tanh(x @ x)
    else:
        for step in range(10):
            store.set(f"{group.rank()}/{step}", "x")
    dist.barrier()
    assert all(store.check([f"{rank}/9"]) for rank in range(1, group.size()))


def test_no_port_is_opened(group: dist.ProcessGroup) -> None:
    import psutil

    MpiStore("test5").set("key", "value")
    mine = [each for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    python = [each for each in mine if each.laddr.port == int(os.environ.get("MASTER_PORT", 0))]
    assert not python


def test_a_barrier_that_names_who_is_missing(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=MINUTE, wait_all_ranks=True)
    if size < 3:
        return
    if rank == 0:
        with pytest.raises(RuntimeError, match=f"Ranks {', '.join(map(str, range(1, size - 1)))} failed to pass"):
            dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)
    elif rank == size - 1:
        with pytest.raises(RuntimeError, match=f"Rank {rank} successfully reached monitoredBarrier"):
            dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)
    dist.barrier()


def barrier_fails() -> None:
    with pytest.raises(RuntimeError, match="monitoredBarrier"):
        dist.monitored_barrier(timeout=timedelta(milliseconds=50), wait_all_ranks=True)


def test_what_comes_late_for_a_barrier_does_not_count_in_the_next(group: dist.ProcessGroup) -> None:
    rank, others = group.rank(), range(1, group.size())
    if not others:
        return
    store = MpiStore("test7", MINUTE)
    if rank == 0:
        barrier_fails()
        store.set("rank 0 has gone", "")
        store.wait([f"rank {each} was late" for each in others])
        barrier_fails()  # the others have not come to this one
    else:
        store.wait(["rank 0 has gone"])
        barrier_fails()
        store.set(f"rank {rank} was late", "")
    dist.barrier()
    if rank == 0:
        store.wait([f"rank {each} has gone" for each in others])
        dist.monitored_barrier(timeout=MINUTE)  # all have been there
    else:
        barrier_fails()
        store.set(f"rank {rank} has gone", "")
    dist.barrier()
    if rank != 0:
        barrier_fails()  # rank 0 has not come to this one
    dist.barrier()
    dist.monitored_barrier(timeout=MINUTE)
