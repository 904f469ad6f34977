"""Thresholds from times, and the file that `choose` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpdist.algorithms.choose import BUSY_BYTES, Algorithm, Layout, built_in, choose, read_thresholds
from mpdist.algorithms.choose import Thresholds as Tables
from mpdist.bench.case import OURS, Case, Line
from mpdist.bench.tuning import ANCHOR, compare, cut, held, load, replaced, save, thresholds, tuning_path
from mpdist.errors import UsageError

ROWS_OF_NUMBERS = json.dumps(
    {"version": 1, "tables": [{"mpi": "mpich", "ranks": 2, "cores": 2, "thresholds": {"reduce": 8}}]}
)

KNOWN = built_in("mpich", 2, 2)


def case(op: str, nbytes: int, ours: float, anchor: float) -> Case:
    def line(seconds: float) -> Line:
        return Line(seconds, seconds, 0, 0, 7, 1)

    return Case(op, nbytes, 2, 1, {OURS: line(ours), ANCHOR: line(anchor)}, {})


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([2, 2, 0.5, 0.5], 64),
        ([2, 0.9, 2, 0.1], 256),  # one lucky size must not decide
        ([2, 0.5, 1.2, 0.5], 16),  # nor one unlucky
    ],
)
@pytest.mark.parametrize("known", [0, 100, 1000])
def test_cut_is_where_all_times_together_are_smallest(ratios: list[float], expected: int, known: int) -> None:
    assert cut([8, 16, 64, 256], ratios, known) == expected


@pytest.mark.parametrize(
    ("ratios", "known", "expected"),
    [
        ([2, 2, 2, 1.1], 100, 257),
        ([1, 1, 1, 1], 1000, 1000),
        ([0.9, 0.5, 0.5, 0.5], 100, 8),
        ([0.9, 0.5, 0.5, 0.5], 0, 0),
    ],
)
def test_what_was_known_holds_outside_of_the_measured_sizes(ratios: list[float], known: int, expected: int) -> None:
    assert cut([8, 16, 64, 256], ratios, known) == expected


@pytest.mark.parametrize(("ratio", "expected"), [(0.5, Algorithm.SHARED), (2, Algorithm.NATIVE)])
def test_operation_without_a_size_is_chosen_always_or_never(ratio: float, expected: Algorithm) -> None:
    found = Tables({"barrier": cut([0], [ratio], 0)})
    assert choose("barrier", 0, Layout(2, 1, True), found) is expected


def test_jobs_are_compared_through_the_anchor() -> None:
    native = [case("all_reduce", 8, 4, 2), case("all_reduce", 64, 8, 4)]
    # the machine is three times slower in this job, but the algorithm twice as fast at 64 bytes
    shared = [case("all_reduce", 64, 12, 12), case("all_reduce", 8, 24, 6), case("all_gather", 8, 1, 1)]
    assert thresholds(native, {"shared": shared}, KNOWN) == {"all_reduce": {"shared_from": 64}}


def test_sizes_at_which_the_anchor_was_too_slow_are_passed_over() -> None:
    without = Case("reduce", 64, 2, 1, {OURS: Line(1, 1, 0, 0, 3, 1)}, {})
    with_all = [case("reduce", 8, 1, 1), case("reduce", 64, 1, 1)]
    for native, shared in ((with_all, [with_all[0], without]), ([with_all[0], without], with_all)):
        assert compare(native, shared) == {"reduce": ([8], [1])}


def test_threshold_counts_one_ranks_input() -> None:
    native = [case("all_gather", 8, 1, 1), case("all_gather", 64, 1, 1)]
    shared = [case("all_gather", 8, 2, 1), case("all_gather", 64, 0.5, 1)]
    assert thresholds(native, {"shared": shared}, KNOWN) == {"all_gather": {"shared_from": 32}}


def test_sizes_from_which_on_mpi_would_hold_the_event_loop_are_not_written() -> None:
    found = {"reduce": {"shared_from": BUSY_BYTES + 1, "hierarchical_from": 2**30}, "gather": {"shared_from": 8}}
    reduce = {"shared_from": BUSY_BYTES, "hierarchical_from": 2**30}
    assert held(found) == {"reduce": reduce, "gather": {"shared_from": 8}}


def test_more_ranks_than_cores_have_a_table_of_their_own() -> None:
    faster = [case("all_reduce", 64, 0.5, 1)]
    found = thresholds([case("all_reduce", 64, 1, 1)], {"shared": faster}, built_in("mpich", 4, 2))
    assert found == {"all_reduce": {"shared_from": 0}}


def test_operation_that_has_no_other_algorithm_gets_no_threshold() -> None:
    cases = [case("gather", 8, 1, 1)]
    assert thresholds(cases, {"hierarchical": cases}, KNOWN) == {}


def test_new_table_takes_the_place_of_its_kind_and_keeps_other_operations() -> None:
    old = {"mpi": "mpich", "ranks": 2, "cores": 2, "thresholds": {"barrier": {"shared_from": 0}, "reduce": {}}}
    other = {**old, "ranks": 4}
    new = {**old, "thresholds": {"reduce": {"shared_from": 8}}}
    merged = {**old, "thresholds": {"barrier": {"shared_from": 0}, "reduce": {"shared_from": 8}}}
    assert replaced([old, other], new) == [other, merged]
    assert replaced([], new) == [new]


def test_several_nodes_and_one_are_tuned_beside_each_other() -> None:
    kind = {"mpi": "mpich", "ranks": 2, "cores": 2}
    one = {**kind, "thresholds": {"reduce": {"shared_from": 8}, "gather": {"shared_from": 4}}}
    several = {**kind, "thresholds": {"reduce": {"hierarchical_from": 64}}}
    both = {**kind, "thresholds": {"reduce": {"shared_from": 8, "hierarchical_from": 64}, "gather": {"shared_from": 4}}}
    assert replaced([one], several) == [both]
    assert replaced([several], one) == [both]


def test_choose_follows_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tuning.json"
    found = {"all_reduce": {"shared_from": 512}, "broadcast": {"shared_from": 2**20}, "barrier": {"shared_from": 0}}
    save(path, [{"mpi": "mpich", "ranks": 2, "cores": 2, "thresholds": found}])
    read = read_thresholds("auto", str(path), "mpich", 2, 2)
    node = Layout.of([0, 0], True)
    assert choose("all_reduce", 511, node, read) is Algorithm.NATIVE
    assert choose("all_reduce", 512, node, read) is Algorithm.SHARED
    assert choose("broadcast", 2**20 - 1, node, read) is Algorithm.NATIVE
    assert choose("barrier", 0, node, read) is Algorithm.SHARED


def test_file_is_where_the_variables_say(tmp_path: Path) -> None:
    assert tuning_path({"MPDIST_TUNING": str(tmp_path / "x")}) == tmp_path / "x"
    assert tuning_path({}).parts[-2:] == ("mpdist", "tuning.json")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": 2, "tables": []}', '{"version": 1, "tables": [{}]}', ROWS_OF_NUMBERS]
)
def test_foreign_file_is_not_overwritten(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="no tuning file"):
        load(path)
    assert load(tmp_path / "none") == []
