"""The name "mpi": groups that scripts and frameworks ask for by it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mpdist
import mpdist.torch

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.limit(90)]

NAMES = ["mpi", "MPI", "cpu:mpi"]


@pytest.fixture(scope="module", params=NAMES)
def group(world: mpdist.Communicator, request: pytest.FixtureRequest) -> Iterator[dist.ProcessGroup]:
    """The default group by each of the names, one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group(request.param, timeout=timedelta(seconds=50))
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def sum_of_ones(group: Any) -> float:
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    return x[0].item()


# Before the groups that the others share: there is one default group at a time.
def test_torch_warns_of_a_rank_that_is_ignored(world: mpdist.Communicator) -> None:
    with pytest.warns(UserWarning, match="ignored since they are assigned by the MPI runtime"):
        dist.init_process_group("mpi", rank=0, world_size=9)
    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.size)
    dist.destroy_process_group()


def test_the_group_is_ours_and_has_the_name_asked_for(world: mpdist.Communicator, group: dist.ProcessGroup) -> None:
    assert type(group).__module__ == "mpdist.torch.process_group"
    assert dist.get_backend() == dist.get_backend(group)
    assert dist.get_backend() in {"mpi", "cpu:mpi"}
    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.size)
    assert (group.rank(), group.size()) == (world.rank, world.size)
    assert group.options._timeout == timedelta(seconds=50)
    assert sum_of_ones(None) == world.size


@pytest.mark.parametrize("backend", [None, "mpi", "mpdist", "gloo"])
def test_groups_beside_it(group: dist.ProcessGroup, backend: str | None) -> None:
    made = dist.new_group(backend=backend)
    assert dist.get_backend(made) == (backend or dist.get_backend())
    assert (type(made) is type(group)) == (backend != "gloo")
    assert sum_of_ones(made) == group.size()
    dist.destroy_process_group(made)


def test_a_group_of_some_ranks(group: dist.ProcessGroup) -> None:
    last = group.size() - 1
    made = dist.new_group([last], backend="mpi")
    if group.rank() == last:
        assert dist.get_backend(made) == "mpi"
        assert sum_of_ones(made) == 1
    else:
        assert made == dist.GroupMember.NON_GROUP_MEMBER
    dist.barrier()


def test_what_torch_builds_on_a_group(group: dist.ProcessGroup) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (group.size(),))
    assert sum_of_ones(mesh.get_group()) == group.size()
    torch.manual_seed(3)
    alone = nn.Linear(4, 2)
    model = DistributedDataParallel(copy.deepcopy(alone))
    batches = [torch.randn(5, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(group.size())]
    model(batches[group.rank()]).pow(2).mean().backward()
    alone(torch.cat(batches)).pow(2).mean().backward()
    torch.testing.assert_close(model.module.weight.grad, alone.weight.grad)
    everything: list[Any] = [None] * group.size()
    dist.all_gather_object(everything, {"rank": group.rank()})
    assert everything == [{"rank": rank} for rank in range(group.size())]


def test_a_checkpoint_which_torchs_own_mpi_has_no_store_for(
    group: dist.ProcessGroup, tmp_path_factory: pytest.TempPathFactory
) -> None:
    import torch.distributed.checkpoint as checkpoint

    folder = Path(mpdist.init().broadcast_object(str(tmp_path_factory.mktemp("saved")), src=0).wait())
    checkpoint.save({"w": torch.arange(4.0)}, checkpoint_id=folder)
    loaded = {"w": torch.zeros(4)}
    checkpoint.load(loaded, checkpoint_id=folder)
    assert torch.equal(loaded["w"], torch.arange(4.0))
    store = group.get_group_store()
    store.set(f"key{group.rank()}", "value")
    assert store.get(f"key{(group.rank() + 1) % group.size()}") == b"value"
    dist.barrier()


def test_another_backend_in_the_same_group_is_refused(group: dist.ProcessGroup) -> None:
    with pytest.raises(mpdist.torch.errors.WrongCall, match=r"a group of mpdist has no other backend beside it"):
        dist.new_group(backend="cpu:mpi,cuda:gloo")
