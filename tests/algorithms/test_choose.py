"""Choose: which algorithm a collective takes, by the tables; pure."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mpdist.algorithms.choose import (
    BUSY_BYTES,
    HIERARCHICAL_FROM,
    OPERATIONS,
    SHARED_FROM,
    SPREAD_FROM,
    Algorithm,
    Layout,
    Thresholds,
    choose,
    default_path,
    read_thresholds,
    starts,
)
from mpdist.errors import UsageError

NODE = Layout(4, 1, True)
NODES = Layout(4, 2, True)
UNEVEN = Layout.of([0, 0, 0, 3], True)
SPREAD = Layout(4, 4, True)
APART = Layout(4, 1, False)
SINGLE = Layout(1, 1, True)

TABLE = Thresholds({"all_reduce": 1000, "barrier": 0}, {"all_reduce": 5000})


def test_a_layout_counts_ranks_and_nodes() -> None:
    assert Layout.of([0, 0, 2, 2], True) == NODES
    assert Layout.of([7], False) == Layout(1, 1, False)
    assert Layout(4, 2, True) == UNEVEN


@pytest.mark.parametrize(
    ("layout", "nbytes", "algorithm"),
    [
        (NODE, 999, Algorithm.NATIVE),
        (NODE, 1000, Algorithm.SHARED),
        (NODES, 4999, Algorithm.NATIVE),
        (NODES, 5000, Algorithm.HIERARCHICAL),
        (UNEVEN, 5000, Algorithm.HIERARCHICAL),
        (SPREAD, 256 * 1024 - 1, Algorithm.NATIVE),
        (SPREAD, 256 * 1024, Algorithm.HIERARCHICAL),
        (APART, 10**9, Algorithm.NATIVE),
        (SINGLE, 10**9, Algorithm.NATIVE),
    ],
)
def test_size_and_layout_choose(layout: Layout, nbytes: int, algorithm: Algorithm) -> None:
    assert choose("all_reduce", nbytes, layout, TABLE) is algorithm


def test_operations_without_a_threshold_take_mpis_call() -> None:
    assert starts("broadcast", NODE, TABLE) is None
    assert starts("scan", NODE, TABLE) is None
    assert starts("barrier", NODE, TABLE) == (0, Algorithm.SHARED)
    assert starts("barrier", NODES, TABLE) is None


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("forced", [Algorithm.SHARED, Algorithm.HIERARCHICAL])
def test_forced_means_from_the_first_byte_wherever_it_can_be(op: str, forced: Algorithm) -> None:
    thresholds = Thresholds(TABLE.shared, TABLE.hierarchical, forced)
    assert starts(op, NODE, thresholds) == (0, Algorithm.SHARED)
    between = (0, Algorithm.HIERARCHICAL) if op in HIERARCHICAL_FROM else None
    assert starts(op, NODES, thresholds) == between
    is_spread = op in SPREAD_FROM and forced is Algorithm.HIERARCHICAL
    assert starts(op, SPREAD, thresholds) == ((0, Algorithm.HIERARCHICAL) if is_spread else None)
    for layout in (APART, SINGLE):
        assert starts(op, layout, thresholds) is None


def test_with_one_rank_on_each_node_some_operations_take_mpis_call_on_few_nodes_or_on_all() -> None:
    thresholds = Thresholds({}, HIERARCHICAL_FROM)
    pair = Layout(2, 2, True)
    assert starts("broadcast", pair, thresholds) is None
    assert starts("broadcast", Layout(3, 3, True), thresholds) == (512 * 1024, Algorithm.HIERARCHICAL)
    assert starts("all_reduce", pair, thresholds) == (256 * 1024, Algorithm.HIERARCHICAL)
    assert starts("barrier", SPREAD, thresholds) is None
    later = Thresholds({}, {"all_reduce": 2**30})
    assert starts("all_reduce", SPREAD, later) == (2**30, Algorithm.HIERARCHICAL)


@pytest.mark.parametrize("op", OPERATIONS)
def test_with_one_rank_on_each_node_an_mpi_that_takes_the_memory_of_gpus_does_all(op: str) -> None:
    thresholds = Thresholds({}, HIERARCHICAL_FROM, is_given_devices=True)
    assert starts(op, SPREAD, thresholds) is None
    assert (starts(op, NODES, thresholds) is None) == (op not in HIERARCHICAL_FROM)


@pytest.mark.parametrize("op", OPERATIONS)
def test_native_can_be_forced_everywhere(op: str) -> None:
    for layout in (NODE, NODES, UNEVEN, SPREAD):
        assert choose(op, 10**9, layout, Thresholds(TABLE.shared, TABLE.hierarchical, Algorithm.NATIVE)) is (
            Algorithm.NATIVE
        )


# ---------------------------------------------------------------------- tables


def write(path: Path, *tables: dict[str, Any]) -> str:
    path.write_text(json.dumps({"version": 1, "tables": list(tables)}))
    return str(path)


def table(mpi: str, ranks: int, cores: int, **thresholds: dict[str, int]) -> dict[str, Any]:
    return {"mpi": mpi, "ranks": ranks, "cores": cores, "thresholds": thresholds}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_without_a_file_the_built_in_table_holds(mpi: str) -> None:
    found = read_thresholds("auto", "", mpi, 2, 2)
    assert found == Thresholds(SHARED_FROM[mpi], HIERARCHICAL_FROM)
    assert set(found.shared) == set(OPERATIONS)


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_where_ranks_share_cores_reductions_take_shared_memory_from_the_first_byte_on(mpi: str, tmp_path: Path) -> None:
    found = read_thresholds("auto", "", mpi, 3, 2).shared
    assert found == SHARED_FROM[mpi] | {"all_reduce": 0, "reduce_scatter": 0}
    path = write(tmp_path / "tuning.json", table(mpi, 3, 2, all_reduce={"shared_from": 512}))
    assert read_thresholds("auto", path, mpi, 3, 2).shared["all_reduce"] == 512  # what was measured holds


def test_an_unknown_mpi_gets_a_table_too() -> None:
    assert read_thresholds("auto", "", "intel", 2, 2).shared == SHARED_FROM["mpich"]


@pytest.mark.parametrize(
    ("name", "forced"), [("auto", None), *((each.value, each) for each in Algorithm)], ids=lambda value: str(value)
)
def test_an_algorithm_is_forced_by_its_name(name: str, forced: Algorithm | None) -> None:
    assert read_thresholds(name, "", "mpich", 2, 2).forced is forced


def test_a_measured_table_replaces_what_it_has(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.json",
        table("openmpi", 2, 2, all_reduce={"shared_from": 1}),
        table("mpich", 4, 2, all_reduce={"shared_from": 2}),
        table("mpich", 2, 2, all_reduce={"shared_from": 77, "hierarchical_from": 88}, gather={"shared_from": 99}),
    )
    found = read_thresholds("auto", path, "mpich", 2, 2)
    assert found.shared == SHARED_FROM["mpich"] | {"all_reduce": 77, "gather": 99}
    assert found.hierarchical == HIERARCHICAL_FROM | {"all_reduce": 88}


@pytest.mark.parametrize("op", OPERATIONS)
def test_no_measured_table_lets_mpi_hold_the_event_loop_for_long(tmp_path: Path, op: str) -> None:
    path = write(tmp_path / "t.json", table("mpich", 2, 2, **{op: {"shared_from": 2**62, "hierarchical_from": 2**62}}))
    found = read_thresholds("auto", path, "mpich", 2, 2)
    assert choose(op, BUSY_BYTES, NODE, found) is Algorithm.SHARED
    assert choose(op, BUSY_BYTES - 1, NODE, found) is Algorithm.NATIVE
    assert choose(op, BUSY_BYTES, NODES, found) is Algorithm.NATIVE


def test_a_size_that_does_not_hold_is_told(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.json",
        table("mpich", 2, 2, gather={"shared_from": BUSY_BYTES + 1}, reduce={"shared_from": BUSY_BYTES}),
    )
    found = read_thresholds("auto", path, "mpich", 2, 2)
    assert found.cut == {"gather": BUSY_BYTES + 1}
    assert found.note.startswith(
        "the table of thresholds (`mpdist info` names its file) leaves gather of 32 MiB and more to MPI's own call"
    )
    assert read_thresholds("native", path, "mpich", 2, 2).note == ""
    assert read_thresholds("auto", "", "mpich", 2, 2).note == ""


def test_a_table_of_another_machine_does_not_count(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", table("mpich", 2, 64, all_reduce={"shared_from": 1}))
    assert read_thresholds("auto", path, "mpich", 2, 2).shared == SHARED_FROM["mpich"]


def test_the_users_own_file_is_read_where_none_is_named() -> None:
    path = default_path()
    path.parent.mkdir(parents=True)
    write(path, table("mpich", 2, 2, reduce={"shared_from": 5}))
    assert read_thresholds("auto", "", "mpich", 2, 2).shared["reduce"] == 5


@pytest.mark.parametrize("has_home", [True, False])
def test_a_home_where_nothing_can_be_found_has_no_table(monkeypatch: pytest.MonkeyPatch, has_home: bool) -> None:
    if has_home:
        monkeypatch.setenv("XDG_CONFIG_HOME", "/" + "x" * 5000)  # the system refuses to look
    else:
        for name in ("XDG_CONFIG_HOME", "HOME"):
            monkeypatch.delenv(name)
        monkeypatch.setattr(os, "getuid", lambda: 2**31 - 9)  # who has no entry in /etc/passwd
    assert read_thresholds("auto", "", "mpich", 2, 2).shared == SHARED_FROM["mpich"]


def file_of(thresholds: str) -> str:
    return f'{{"version": 1, "tables": [{{"mpi": "mpich", "ranks": 2, "cores": 2, "thresholds": {thresholds}}}]}}'


@pytest.mark.parametrize(
    "text",
    ["", "no json", "[]", "{}", '{"version": 99, "tables": []}',
     *(f'{{"version": 1, "tables": {tables}' for tables in ("3}", "[{}]}", "[3]}", "[" * 100_000)),
     *(file_of(f'{{"reduce": {{"shared_from": {value}}}}}') for value in ('"many"', "1e999", "-1")), file_of("[1]")],
)  # fmt: skip
@pytest.mark.parametrize("is_named", [True, False])
def test_a_broken_file_is_refused_with_its_path(tmp_path: Path, text: str, is_named: bool) -> None:
    path = tmp_path / "broken.json" if is_named else default_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    with pytest.raises(UsageError, match=f"{path} cannot be read .*; remove it; after that .*mpdist bench --tune"):
        read_thresholds("auto", str(path) if is_named else "", "mpich", 2, 2)


def test_a_named_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone\.json cannot be read \(FileNotFoundError.*; unset MPDIST_TUNING"):
        read_thresholds("auto", str(tmp_path / "gone.json"), "mpich", 2, 2)


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_is_no_file_is_refused_and_never_read(tmp_path: Path, is_folder: bool) -> None:
    path = tmp_path / "named"
    path.mkdir() if is_folder else os.mkfifo(path)
    with pytest.raises(UsageError, match=f"MPDIST_TUNING is {path}, which is no regular file"):
        read_thresholds("auto", str(path), "mpich", 2, 2)


def test_what_is_no_file_in_the_users_settings_is_passed_over() -> None:
    default_path().parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(default_path())
    assert read_thresholds("auto", "", "mpich", 2, 2).forced is None
