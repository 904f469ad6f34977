"""Whole jobs whose ranks get out of step: they end soon, and say who waits for whom."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest
from cli.jobs import run_mpdist

pytestmark = [pytest.mark.job, pytest.mark.either_mpi, pytest.mark.limit(90)]

LATE_RANK = str(Path(__file__).with_name("late_rank.py"))


def run_job(how: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    return run_mpdist("run", "-n", str(ranks), LATE_RANK, how)


def test_misspelt_variable_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPDIST_TIMOUT", "5")
    script = tmp_path / "program.py"
    script.write_text("import mpdist; mpdist.init()")
    done = run_mpdist("run", "-n", "3", str(script))
    assert done.returncode == 0
    assert done.stderr.count("MPDIST_TIMOUT is not known and does nothing: did you mean MPDIST_TIMEOUT?") == 1


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (
            "leaves_before_a_collective",
            r"rank 0 waits in all_reduce float32 x 4 sum #1 on 'world' \(.*late_rank.py:\d+\) "
            r"for rank 1, which has finished",
        ),
        (
            "leaves_a_communicator_that_it_never_had",
            r"rank 0 waits in all_reduce float32 x 4 sum #1 on 'of 0' .* for rank 1, which has finished",
        ),
        (
            "leaves_a_collective_that_a_handler_has_interrupted",
            r"rank 0 waits in dup #1 on 'world' .* for rank 1, which has finished",
        ),
        (
            "leaves_before_a_send",
            r"rank 0 waits in recv from 1, tag 3 on 'world' \(.*late_rank.py:\d+ in leaves_before_a_send: "
            r"await world.recv\(src=1, tag=3\)\) for rank 1, which has finished",
        ),
        ("leaves_before_a_receive", r"rank 0 waits in send to 1, tag 0 on 'world' .* for rank 1, which has finished"),
        ("leaves_a_collective_behind", r"rank 1 waits in barrier #1 on 'world' .* for rank 0, which has finished"),
        ("waits_without_a_loop", r"rank 0 waits in barrier #1 on 'world' .* for rank 1, which has finished"),
    ],
)
def test_a_wait_for_a_finished_rank_ends_the_job(how: str, reason: str) -> None:
    start = time.monotonic()
    ended = run_job(how)
    assert ended.returncode != 0
    assert re.search(reason, ended.stderr), ended.stderr
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_need_no_more_of_a_finished_one_go_on(ranks: int) -> None:
    ended = run_job("leaves_a_pair_at_work", ranks)
    assert ended.returncode == 0, ended.stderr
    assert "mpdist:" not in ended.stderr


def test_a_wait_that_another_task_may_end_is_told_of_and_goes_on() -> None:
    ended = run_job("leaves_a_wait_that_a_task_ends")
    assert ended.returncode == 0, ended.stderr
    assert re.search(
        r"mpdist: rank 0 waits in recv from 1, tag 3 on 'world' .*, which has finished; it goes on only if",
        ended.stderr,
    )
    assert ended.stderr.count("mpdist: ") == 1


def test_a_timeout_ends_the_job_and_names_the_late_ranks_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPDIST_TIMEOUT", "1")
    ended = run_job("loads_for_long")
    assert ended.returncode != 0
    assert re.search(
        r"all_reduce float32 x 4 sum #2 on 'world' .* is not done after 1 s, waiting for rank 1", ended.stderr
    )
    assert re.search(
        r"not arrived: rank 1: last collective barrier #1 \(.*late_rank.py:\d+\), now at .*late_rank.py:\d+ in "
        r"load_batch: time.sleep\(20\)",
        ended.stderr,
    )


def test_a_rank_that_holds_the_gil_is_reported_and_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPDIST_REPORT_AFTER", "1")
    ended = run_job("holds_the_gil")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("all is well") == 2
    assert "no answer (dead, stopped, or cut off): rank 1" in ended.stderr


def test_debug_mode_names_each_ranks_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPDIST_DEBUG", "1")
    ended = run_job("calls_another")
    assert ended.returncode != 0
    assert "CollectiveMismatch: call 1 on 'world' differs between ranks:" in ended.stderr
    assert re.search(r"rank 0: all_reduce float32 x 4 sum +\(.*late_rank.py:\d+\)", ended.stderr)
    assert re.search(r"rank 1: broadcast +float32 x 4 from 0 +\(.*late_rank.py:\d+\)", ended.stderr)
