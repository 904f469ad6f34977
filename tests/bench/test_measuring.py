"""Rounds, checks, and what is made of the times."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Collection
from itertools import pairwise, permutations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure

from mpdist.bench.case import GLOO, OURS, RAW_LATER, RAW_NOW, RESIDENT, Case, append, line_of, read, with_tuned
from mpdist.bench.contenders import Bound, as_run
from mpdist.bench.job import Bench, Task, progress_text
from mpdist.bench.machine import CAN_PIN, core_for, pin
from mpdist.bench.operations import Operation, given
from mpdist.bench.plot import BEST_RAW, _draw_times, barrier_text, places_of, points, size_ticks, tuned_text
from mpdist.bench.plot import plot as draw
from mpdist.bench.rounds import (
    FEWEST_ROUNDS,
    MAX_REPETITIONS,
    MAX_ROUNDS,
    MIN_ROUNDS,
    ROUNDS_SECONDS,
    WARM_UPS,
    WrongResult,
    check,
    measure,
    plan,
)
from mpdist.bench.table import show
from mpdist.errors import UsageError

MACHINE = {
    "mpi": "MPICH", "mpi_version": "5", "versions": {"mpdist": "0"}, "processor": "one", "usable_cores": 2,
    "local_ranks": 2, "date": "2026-01-01T00:00+00:00", "pinned_to": [0, None],
    "variables": {"A": "1"},
}  # fmt: skip


class Alone:
    """The agreement of a single rank."""

    def fence(self) -> None: ...

    def from_first(self, item):
        return item

    def of_all(self, item):
        return [item]

    def slowest(self, seconds):
        return seconds


CONTENDERS = {"ours": OURS, "resident": RESIDENT, "now": RAW_NOW, "later": RAW_LATER, "gloo": GLOO}


def case(op: str, nbytes: int, **medians: float) -> Case:
    lines = {CONTENDERS[name]: line_of(op, nbytes, 2, [median] * 3, 5) for name, median in medians.items()}
    return Case(op, nbytes, 2, 1, lines, MACHINE)


CASES = [
    *(case("all_reduce", n, ours=2e-6, resident=1e-6, now=4e-6, later=3e-6, gloo=1e-3) for n in (8, 64, 1024)),
    case("barrier", 0, ours=2e-6, now=1e-6),
]


def test_line_has_median_percentile_and_both_bandwidths() -> None:
    line = line_of("all_reduce", 3000, 4, [*[1e-6] * 19, 3e-6], 7)
    assert line.median == 1e-6
    assert 1e-6 < line.p95 < 3e-6
    assert line.algorithm_bandwidth == pytest.approx(3e9)
    assert line.bus_bandwidth == pytest.approx(4.5e9)
    assert (line.rounds, line.repetitions) == (20, 7)


def test_ping_pong_counts_one_way() -> None:
    assert line_of("ping_pong", 8, 2, [4e-6], 1).median == 2e-6


def test_plan_fills_the_time_within_its_limits() -> None:
    short = plan({"a": 1e-7, "b": 1e-3}, 1.0)
    assert short.repetitions == {"a": MAX_REPETITIONS, "b": 2}
    assert short.rounds == MAX_ROUNDS
    assert plan({"a": 1e-7}, 1e308).rounds == MAX_ROUNDS
    long = plan({"a": 0.5, "b": 1.0}, 1.0)
    assert (long.repetitions, long.rounds) == ({"a": 1, "b": 1}, MIN_ROUNDS)


async def test_contenders_alternate_after_warming_up() -> None:
    calls: list[tuple[str, int]] = []
    bounds = {name: Bound(as_run(lambda n, name=name: calls.append((name, n))), None, None) for name in "abc"}
    chosen, seconds = await measure(bounds, Alone(), 0.01)
    assert calls[: 3 * WARM_UPS] == [(name, 1) for name in "abc" for _ in range(WARM_UPS)]
    assert all(len(kept) == chosen.rounds for kept in seconds.values())
    last = calls[-6 * chosen.rounds :]
    warm_ups, timed = last[::2], last[1::2]
    assert [(name, chosen.repetitions[name]) for name, _ in warm_ups] == timed
    assert all(1 <= count <= min(WARM_UPS, chosen.repetitions[name] / 10) for name, count in warm_ups)
    names = [name for name, _ in timed]
    rounds = [names[i : i + 3] for i in range(0, len(names), 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    followed = {pair for each in rounds for pair in pairwise(each)}
    assert followed == set(permutations("abc", 2)), "some always run after the same one"


class BesideASlowRank(Alone):
    """Another rank takes longer for anything than rounds should take together."""

    def slowest(self, seconds):
        return [ROUNDS_SECONDS + 1] * len(seconds)


async def test_slow_contender_is_measured_in_few_calls() -> None:
    calls: list[int] = []
    _, seconds = await measure({"a": Bound(as_run(calls.append), None, None)}, BesideASlowRank(), 0.2)
    assert seconds == {"a": [ROUNDS_SECONDS + 1] * FEWEST_ROUNDS}
    assert calls == [1] * (1 + FEWEST_ROUNDS)


class Given(Bench):
    """A benchmark whose contenders take as long as it is told: seconds of a byte."""

    def __init__(self, sizes: list[int], **seconds: float) -> None:
        self.world = SimpleNamespace(size=2)  # type: ignore[assignment]
        self.task = Task(["reduce", "barrier"], sizes, [], 0.1)
        self.seconds = seconds

    async def case(self, op: Operation, elements: int, without: Collection[str] = ()) -> Case:
        medians = {
            name: each * max(elements * 4, 1) for name, each in self.seconds.items() if CONTENDERS[name] not in without
        }
        return case(op.name, elements * 4, **medians)


@pytest.mark.parametrize(
    ("seconds", "measured"),
    [
        ({"ours": 0.0001, "now": 0.0002}, [(8, 2), (64, 2), (256, 2), (1024, 2)]),
        ({"ours": 0.0001, "now": 0.002}, [(8, 2), (64, 2), (256, 2), (1024, 1)]),
        ({"ours": 0.01, "now": 0.0001}, [(8, 2), (64, 2)]),
    ],
)
async def test_slow_contender_takes_no_part_at_larger_sizes(
    seconds: dict[str, float], measured: list[tuple[int, int]]
) -> None:
    found = [each async for each in Given([8, 64, 256, 1024], **seconds).cases()]
    assert [(each.nbytes, len(each.lines)) for each in found if each.op == "reduce"] == measured
    assert len(found[-1].lines) == 2  # the next operation has them all again


def test_progress_names_those_that_are_left_out() -> None:
    slow = case("reduce", 4096, ours=1e-3, now=2.0)
    assert progress_text(slow) == "reduce 4 KiB: mpdist 1 ms, raw blocking 2 s; too slow for larger sizes: raw blocking"
    assert progress_text(CASES[0]).endswith("gloo 1 ms")


@pytest.mark.parametrize("is_wrong", [False, True])
async def test_single_wrong_element_is_found(is_wrong: bool) -> None:
    x, out = np.ones(20, np.float32), np.ones(20, np.float32)

    def copy(count: int) -> None:
        out[:19] = x[:19]
        if not is_wrong:
            out[19] = x[19]

    bound = Bound(as_run(copy), x, out)
    if is_wrong:
        with pytest.raises(WrongResult, match=r"copy by me gave a wrong result on ranks \[0\]"):
            await check("copy by me", bound, Alone(), 0, given(0, 20))
    else:
        await check("copy by me", bound, Alone(), 0, given(0, 20))
    assert not x.any()
    assert not out.any()


def test_json_lines_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "x"
    append(path, CASES[:1])
    append(path, CASES[1:])
    assert read(path) == CASES
    first = json.loads(path.read_text().splitlines()[0])
    assert first["lines"][OURS]["median"] == 2e-6
    assert first["machine"]["mpi"] == "MPICH"


@pytest.mark.parametrize("text", ["{}", "x", '{"lines": {"a": 1}}', "[]"])
def test_foreign_line_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(text + "\n")
    with pytest.raises(UsageError, match="not a line of"):
        read(tmp_path / "x")


def test_tuned_lines_join_and_may_be_the_best() -> None:
    tuned = case("all_reduce", 8, ours=1e-6, now=1e-6)
    joined = with_tuned(CASES, [tuned])
    assert joined[0].lines[OURS].median == 2e-6
    assert joined[0].best_raw() == "tuned raw blocking"
    assert joined[0].machine["tuned_variables"] == {"A": "1"}
    assert joined[1] == CASES[1]


@pytest.mark.parametrize(
    ("ours", "now", "ratio"),
    [
        (9e-6, 1e-6, 9),
        (20e-6, 30e-6, 2 / 3),  # ten times slower altogether, and no better
        (1e-6, 2e-6, 2 / 3),  # fast in a fast hour only
    ],
)
def test_ratio_is_of_one_job_and_the_worse_of_both(ours: float, now: float, ratio: float) -> None:
    (joined,) = with_tuned(CASES[:1], [case("all_reduce", 8, ours=ours, now=now)])
    assert joined.ratio_to_raw() == pytest.approx(ratio)
    assert joined.ratio_to_raw(RESIDENT) == pytest.approx(1 / 3)
    assert joined.ratio(OURS, GLOO) == pytest.approx(0.002)


def test_table_shows_times_and_ratios() -> None:
    stream = io.StringIO()
    show(CASES, stream)
    row = next(line for line in stream.getvalue().splitlines() if "all_reduce" in line)
    cells = " ".join(row.split()[1:])
    assert cells == "8 B 2 us 2 us 1 us 3 us 1 ms 0.667 0.333 0.002 0.004 0.004 0.003"


def test_plot_is_a_picture_of_every_contender(tmp_path: Path) -> None:
    draw(CASES, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert [line.median for _, line in points(CASES[:3], BEST_RAW)] == [3e-6] * 3
    assert "2 us" in barrier_text(CASES)
    assert tuned_text(CASES) == ""
    assert "a tuned MPI" in tuned_text(with_tuned(CASES, [case("all_reduce", 8, ours=9e-6, now=1e-6)]))


@pytest.mark.parametrize(
    ("seconds", "ticks"), [((2e-6, 9e-6), ["2 us", "5 us"]), ((1.1e-6, 1.9e-6), []), ((2e-6, 2e-2), ["1 ms"])]
)
def test_axis_of_times_has_ticks_also_within_a_decade(seconds: tuple[float, float], ticks: list[str]) -> None:
    axes = Figure().subplots()
    _draw_times(axes, "reduce", [case("reduce", 8, ours=seconds[0]), case("reduce", 64, ours=seconds[1])])
    axes.figure.draw_without_rendering()
    low, high = axes.get_ylim()
    labels = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
    shown = [label.get_text() for at, label in labels if low <= at <= high]
    assert len(shown) > 1
    assert set(ticks) <= set(shown)


@pytest.mark.parametrize(
    ("first", "last", "ticks"),
    [
        (8, 2**19, [8, 64, 2**10, 2**14, 2**19]),  # 2**18 would be written over 2**19
        (32, 2**22, [32, 2**10, 2**14, 2**18, 2**22]),
        (8, 2**26, [64, 2**10, 2**14, 2**18, 2**22, 2**26]),
        (64, 64, [64]),
    ],
)
def test_axis_of_sizes_has_ticks_that_can_be_read(first: int, last: int, ticks: list[int]) -> None:
    assert size_ticks(first, last) == ticks


@pytest.mark.parametrize("ops", [1, 2, 3, 4, 9])
def test_every_operation_has_its_own_place(ops: int) -> None:
    rows, columns, places = places_of(ops)
    taken = {place for pair in places for place in pair}
    assert len(taken) == 2 * ops
    assert all(row < rows and column < columns for row, column in taken)


@pytest.mark.skipif(not CAN_PIN, reason="threads cannot be pinned on this system")
def test_threads_that_are_there_are_pinned_too() -> None:
    cores, done = os.sched_getaffinity(0), threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    before = {int(name): os.sched_getaffinity(int(name)) for name in os.listdir("/proc/self/task")}
    try:
        pin(max(cores))
        assert os.sched_getaffinity(thread.native_id or 0) == os.sched_getaffinity(0) == {max(cores)}
    finally:
        for other, its_cores in before.items():
            os.sched_setaffinity(other, its_cores)
        done.set()
        thread.join()


def test_ranks_take_the_cores_in_turn() -> None:
    assert [core_for(rank, [2, 5]) for rank in range(4)] == [2, 5, 2, 5]
