"""The kit around training: clipping, metrics, checkpoints, and the check before it."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_parallel.pairs import assert_equal, inputs, mlp, train, wrapped
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpdist.torch
from mpdist import CollectiveMismatch, CommunicationError, Communicator, UsageError

pytestmark = pytest.mark.ranks(1, 2, 3)

# ---------------------------------------------------------------------- clipping


def rank_parameters(comm: Communicator, rank: int) -> list[nn.Parameter]:
    """What a rank holds: as many tensors as its number."""
    made = [nn.Parameter(torch.zeros(3 + number)) for number in range(rank)]
    for number, parameter in enumerate(made):
        parameter.grad = torch.arange(3 + number, dtype=torch.float32) * (rank + number)
    return made


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_norm_is_that_of_all_ranks(comm: Communicator, norm_type: float, max_norm: float) -> None:
    mine = rank_parameters(comm, comm.rank)
    everyone = [parameter for rank in range(comm.size) for parameter in rank_parameters(comm, rank)]
    got = mpdist.torch.clip_grad_norm(mine, max_norm, comm, norm_type=norm_type)
    expected = torch.nn.utils.clip_grad_norm_(everyone, max_norm, norm_type) if everyone else torch.tensor(0.0)
    torch.testing.assert_close(got.float(), expected)
    start = sum(range(comm.rank))
    for parameter, other in zip(mine, everyone[start : start + comm.rank], strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_norm_that_is_not_finite_is_an_error_on_all_ranks(comm: Communicator, norm_type: float) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), float("nan") if comm.rank == comm.size - 1 else 1.0)
    with pytest.raises(RuntimeError, match=r"the norm of all gradients .* is nan"):
        mpdist.torch.clip_grad_norm(parameter, 1.0, comm, norm_type=norm_type, error_if_nonfinite=True)


# ---------------------------------------------------------------------- metrics


def test_means_are_over_the_samples_of_all_ranks(comm: Communicator) -> None:
    metrics = mpdist.torch.Metrics(comm, "loss", "accuracy")
    for number in range(comm.rank + 1):
        metrics.add(comm.rank + 1, loss=torch.tensor(float(comm.rank)), accuracy=number)
    weights = [(rank + 1) ** 2 for rank in range(comm.size)]
    loss = sum(weight * rank for rank, weight in enumerate(weights)) / sum(weights)
    accuracy = sum((rank + 1) * sum(range(rank + 1)) for rank in range(comm.size)) / sum(weights)
    assert metrics.means() == pytest.approx({"loss": loss, "accuracy": accuracy})
    assert all(value != value for value in metrics.means().values())  # nothing since


def test_metrics_have_names(comm: Communicator) -> None:
    with pytest.raises(UsageError, match=r"got \['los'\]; these metrics are \['loss'\]"):
        mpdist.torch.Metrics(comm, "loss").add(los=1)


def test_a_metric_is_one_number(comm: Communicator) -> None:
    metrics = mpdist.torch.Metrics(comm, "accuracy", "loss")
    metrics.add(accuracy=1.0, loss=torch.full((1, 1), 2.0))
    with pytest.raises(UsageError, match=r"loss is a tensor of shape \(2,\), one number is needed: loss.mean\(\)"):
        metrics.add(accuracy=9.0, loss=torch.ones(2))
    assert metrics.means() == {"accuracy": 1.0, "loss": 2.0}


@pytest.mark.ranks(2, 3)
def test_names_may_come_in_any_order_and_are_the_same_on_all_ranks(comm: Communicator) -> None:
    names = ["loss", "accuracy", "f1"]
    mine = names[comm.rank :] + names[: comm.rank]
    metrics = mpdist.torch.Metrics(comm, *mine)
    metrics.add(2, f1=3.0, loss=1.0, accuracy=2.0)
    means = metrics.means()
    assert means == {"loss": 1.0, "accuracy": 2.0, "f1": 3.0}
    assert list(means) == mine
    other = mpdist.torch.Metrics(comm, "loss" if comm.rank else "los")
    text = r"\(rank 0\) are \['los'\], and on rank 1 \['loss'\]" if comm.rank == 0 else r"and on rank 0 \['los'\]: give"
    for _ in range(2):
        with pytest.raises(UsageError, match=text):
            other.means()


# ---------------------------------------------------------------------- checkpoints


@pytest.fixture
def folder(comm: Communicator, tmp_path: Path) -> Path:
    """One folder for all ranks; only rank 0 uses it."""
    return tmp_path if comm.rank == 0 else Path("/nowhere")


def test_checkpoint_comes_back_on_all_ranks(comm: Communicator, folder: Path) -> None:
    net = mlp(6, 5, 3, normed=True)
    with wrapped(net, comm) as model:
        optimizer = torch.optim.Adam(model.parameters())
        train(comm, model, optimizer=lambda _: optimizer)
        mpdist.torch.save_checkpoint(folder / "a.pt", comm, model=model, optimizer=optimizer, epoch=3)
        if comm.rank == 0:
            assert [path.name for path in folder.iterdir()] == ["a.pt"]
            assert set(torch.load(folder / "a.pt")["model"]) == set(net.state_dict())
        other = mlp(6, 5, 3, normed=True)
        again = torch.optim.Adam(other.parameters())
        rest = mpdist.torch.load_checkpoint(folder / "a.pt", comm, model=other, optimizer=again)
        assert rest == {"epoch": 3}
        expected = {name: comm.broadcast(tensor, src=0).wait() for name, tensor in net.state_dict().items()}
        assert_equal([*other.state_dict().values()], [*expected.values()])
        assert again.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
        mpdist.torch.load_checkpoint(folder / "a.pt", comm, model=model)


@pytest.mark.parametrize("is_outside", [False, True])
def test_checkpoint_of_a_compiled_module_is_that_of_the_module(
    comm: Communicator, folder: Path, is_outside: bool
) -> None:
    net = mlp(6, 5, 3)
    inner: Any = net if is_outside else torch.compile(net, backend="eager")
    with wrapped(inner, comm) as model:
        saved: Any = torch.compile(model, backend="eager") if is_outside else model
        mpdist.torch.save_checkpoint(folder / "a.pt", comm, model=saved)
        other = mlp(6, 5, 3)
        mpdist.torch.load_checkpoint(folder / "a.pt", comm, model=other)
        expected = [comm.broadcast(tensor.detach().clone(), src=0).wait() for tensor in net.parameters()]
        assert_equal([*other.parameters()], expected)
        mpdist.torch.load_checkpoint(folder / "a.pt", comm, model=saved)


def test_checkpoint_on_one_rank_of_its_own(world: Communicator, comm: Communicator, folder: Path) -> None:
    net = nn.Linear(2, 2)
    mpdist.torch.save_checkpoint(folder / "a.pt", comm, model=net)
    alone = comm.split(color=comm.rank).wait()
    if comm.rank == 0:
        other = nn.Linear(2, 2)
        assert mpdist.torch.load_checkpoint(folder / "a.pt", alone, model=other) == {}
        assert_equal([*other.parameters()], [*net.parameters()])
    alone.close().wait()


def test_what_rank_0_cannot_do_is_an_error_on_all_ranks(comm: Communicator, folder: Path) -> None:
    with pytest.raises(CommunicationError, match=r"rank 0 says: .*No such file"):
        mpdist.torch.load_checkpoint(folder / "missing.pt", comm)
    with pytest.raises(CommunicationError, match=r"save_checkpoint.*rank 0 says: .*does not exist"):
        mpdist.torch.save_checkpoint(folder / "missing" / "a.pt", comm, epoch=1)
    mpdist.torch.save_checkpoint(folder / "a.pt", comm, epoch=1)
    mpdist.torch.save_checkpoint(folder / "b.pt", comm, model=nn.Linear(1, 1))
    with pytest.raises(UsageError, match="and no model"):
        mpdist.torch.load_checkpoint(folder / "a.pt", comm, model=nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"load_checkpoint\(.*: model does not take what was saved under its name: "):
        mpdist.torch.load_checkpoint(folder / "b.pt", comm, model=nn.Linear(1, 2))
    with pytest.raises(UsageError, match=r"epoch is the Python int 0, which has no load_state_dict\(\); leave it out"):
        mpdist.torch.load_checkpoint(folder / "a.pt", comm, epoch=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["save_checkpoint", "load_checkpoint"])
def test_a_checkpoint_that_one_rank_calls_meets_no_other_collective(
    comm: Communicator, folder: Path, name: str
) -> None:
    mpdist.torch.save_checkpoint(folder / "a.pt", comm)

    def checkpoint() -> None:
        getattr(mpdist.torch, name)(folder / "a.pt", comm)

    def decide() -> None:
        comm.broadcast(np.array([1]), src=0).wait()

    mine, other = (checkpoint, decide) if comm.rank == 0 else (decide, checkpoint)
    is_refused = np.zeros(1)
    try:
        mine()
    except CollectiveMismatch as error:
        is_refused[0] = 1
        assert name in str(error)  # noqa: PT017  # on the rank that comes second
        other()
    assert comm.all_reduce(is_refused).wait() == 1


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        (lambda: 0, "extra is a builtins.function"),
        (np.float64(1.5), "extra is a numpy.float64"),
        ({"ages": [1, range(3)]}, r"extra\['ages'\]\[1\] is a builtins.range"),
        ({1: Path("/")}, r"extra\[1\] is a pathlib"),
    ],
    ids=["function", "numpy", "range", "path"],
)
def test_what_could_not_be_loaded_is_not_saved(comm: Communicator, folder: Path, entry: object, named: str) -> None:
    net = nn.Linear(2, 2)
    mpdist.torch.save_checkpoint(folder / "a.pt", comm, model=net, epoch=1)
    with pytest.raises(CommunicationError, match=f"rank 0 says: UsageError: {named}.*weights_only"):
        mpdist.torch.save_checkpoint(folder / "a.pt", comm, model=net, extra=entry)
    assert mpdist.torch.load_checkpoint(folder / "a.pt", comm, model=net) == {"epoch": 1}
    if comm.rank == 0:
        assert [path.name for path in folder.iterdir()] == ["a.pt"]


def test_a_state_that_cannot_be_had_is_an_error_on_all_ranks(comm: Communicator, folder: Path) -> None:
    class Broken:
        def state_dict(self) -> object:
            raise LookupError

    with pytest.raises(CommunicationError, match="rank 0 says: LookupError"):
        mpdist.torch.save_checkpoint(folder / "a.pt", comm, broken=Broken())


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda whole: b"", "the file is empty"),
        (lambda whole: whole[: len(whole) // 2], "no whole checkpoint, but cut off"),
        (lambda whole: whole.replace(b"epoch", b"\xff\xff\xff\xff\xff"), "bytes are damaged"),
    ],
    ids=["empty", "torn", "damaged"],
)
def test_a_file_that_is_no_checkpoint_is_named(comm: Communicator, folder: Path, damage: Any, told: str) -> None:
    mpdist.torch.save_checkpoint(folder / "a.pt", comm, epoch=1)
    if comm.rank == 0:
        (folder / "a.pt").write_bytes(damage((folder / "a.pt").read_bytes()))
    with pytest.raises(UsageError, match=rf"load_checkpoint\('.*a\.pt'\) .*rank {comm.rank}.*{told}"):
        mpdist.torch.load_checkpoint(folder / "a.pt", comm)


def test_a_link_and_a_mode_stay_as_they_are(comm: Communicator, folder: Path) -> None:
    real, link = folder / "of" / "real.pt", folder / "latest.pt"
    for epoch, mode in ((1, None), (2, 0o640), (3, 0o400)):
        if comm.rank == 0:
            real.parent.mkdir(exist_ok=True)
            if mode is None:
                link.symlink_to(Path("of", "real.pt"))  # which is not there yet
            else:
                real.chmod(mode)
        mpdist.torch.save_checkpoint(link, comm, epoch=epoch)
        assert mpdist.torch.load_checkpoint(link, comm) == {"epoch": epoch}
        if comm.rank == 0:
            assert link.is_symlink()
            assert [path.name for path in real.parent.iterdir()] == ["real.pt"]
            assert mode is None or stat.S_IMODE(real.stat().st_mode) == mode


def test_every_plain_value_comes_back(comm: Communicator, folder: Path) -> None:
    values: dict[str, Any] = {"a": [1, 2.5, "x", None, True], "b": (torch.float32, torch.Size([2]))}
    if torch.__version__ >= "2.6":  # older ones read none of these
        values |= {"c": {1, 2}, "d": b"x", "e": 1j}
    mpdist.torch.save_checkpoint(folder / "a.pt", comm, values=values)
    assert mpdist.torch.load_checkpoint(folder / "a.pt", comm) == {"values": values}
    eighths = torch.quantize_per_tensor(torch.ones(3), 0.125, 0, torch.quint8)
    mpdist.torch.save_checkpoint(folder / "b.pt", comm, x=eighths)
    assert mpdist.torch.load_checkpoint(folder / "b.pt", comm)["x"].dequantize().tolist() == [1.0] * 3


# ---------------------------------------------------------------------- check


def fine(comm: Communicator, **given: Any) -> mpdist.torch.checking.Findings:
    torch.manual_seed(0)
    return mpdist.torch.check(mlp(6, 3), comm=comm, **given)


def test_nothing_is_found_where_nothing_is_wrong(comm: Communicator) -> None:
    data = TensorDataset(torch.arange(12.0).reshape(12, 1))
    sampler = DistributedSampler(data, comm.size, comm.rank)
    sampler.set_epoch(1)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    found = fine(comm, batch=[inputs(comm, 0, (4, 6), torch.float64)], loader=loader)
    assert not found
    assert str(found) == "nothing found"
    found.raise_problems()


@pytest.mark.ranks(2, 3)
def test_other_values_are_named(comm: Communicator) -> None:
    torch.manual_seed(0)
    net = mlp(6, 4, 3, normed=True)
    with torch.no_grad():
        net[3].bias += comm.rank == 1
        net[2].running_var += comm.rank
    first, second = mpdist.torch.check(net, comm=comm).problems
    assert "1 of 8 parameters begin with other values on rank 1 than on rank 0 (3.bias)" in first
    assert "(2.running_var)" in second


@pytest.mark.ranks(2, 3)
def test_other_shapes_are_named(comm: Communicator) -> None:
    found = mpdist.torch.check(nn.Linear(6, 4 if comm.rank == 1 else 3), comm=comm)
    assert len(found.problems) == 1
    assert "weight float32 (4, 6) on rank 1" in str(found)
    with pytest.raises(UsageError, match="weight float32"):
        found.raise_problems()


def test_several_devices_are_named(comm: Communicator) -> None:
    net = nn.ModuleList([nn.Linear(2, 2, device="meta"), nn.Linear(2, 2)])
    torch.nn.init.zeros_(net[1].weight)
    torch.nn.init.zeros_(net[1].bias)
    problems = mpdist.torch.check(net, comm=comm).problems
    assert [text.startswith(f"on rank {rank} the module's parameters are on 2") for rank, text in enumerate(problems)]
    assert len(problems) == comm.size


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, mpdist.torch.SyncBatchNorm])
def test_small_batches_under_batch_norm_are_named(comm: Communicator, norm: Any) -> None:
    net = nn.Sequential(nn.Flatten(), norm(6))
    batch = {"x": torch.randn(4, 6) + comm.rank}
    problems = mpdist.torch.check(net, batch, comm=comm).problems
    assert len(problems) == (norm is nn.BatchNorm1d)
    assert not problems or "1: plain batch norm sees 4 samples" in problems[0]


@pytest.mark.ranks(2, 3)
def test_other_numbers_of_batches_are_named(comm: Communicator) -> None:
    (problem,) = fine(comm, loader=range(3 + comm.rank)).problems
    assert "3 on rank 0, 4 on rank 1" in problem


@pytest.mark.ranks(2, 3)
def test_same_data_is_a_hint(comm: Communicator) -> None:
    found = fine(comm, batch=(torch.ones(32, 6), [torch.zeros(3)]))
    assert not found.problems
    assert "have the same first batch" in found.hints[0]


def test_sampler_without_epoch_is_a_hint(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the program that runs sets none, as far as its files can be read; this one does."""
    data = TensorDataset(torch.arange(12.0).reshape(12, 1))
    loader = DataLoader(data, sampler=DistributedSampler(data, comm.size, comm.rank))
    assert not fine(comm, loader=loader).hints
    monkeypatch.setattr("mpdist.torch.checking.getlines", lambda file: [])
    (hint,) = fine(comm, loader=loader).hints
    assert "set_epoch" in hint


def test_a_sampler_for_another_number_of_ranks_is_a_hint(comm: Communicator) -> None:
    data = TensorDataset(torch.arange(12.0).reshape(12, 1))
    sampler = DistributedSampler(data, comm.size + 2, comm.rank, shuffle=False)
    (hint,) = fine(comm, loader=DataLoader(data, sampler=sampler)).hints
    assert hint.startswith(f"the DistributedSampler deals the data to {comm.size + 2} ranks, and here are {comm.size}:")
