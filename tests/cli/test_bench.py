"""`mpdist bench`, as a user starts it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from cli.jobs import heed, job_environ

from mpdist.algorithms.choose import OPERATIONS as CHOSEN_OPERATIONS
from mpdist.bench.case import OURS, RAW_LATER, RAW_NOW, RESIDENT, Case, Line, read
from mpdist.bench.operations import OPERATIONS, PING_PONG
from mpdist.cli import build_parser, main
from mpdist.cli.bench import (
    TUNED_OPERATIONS,
    JobFailed,
    contenders_of,
    launch_words,
    limit_text,
    names,
    ops_of,
    threshold_text,
)
from mpdist.errors import UsageError

SECONDS = 200.0
"""A benchmark is several jobs, and its contenders spin: slow where others use the cores."""


def run_mpdist(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command `mpdist` to its end."""
    command = [sys.executable, "-m", "mpdist", *arguments]
    return subprocess.run(command, env=job_environ(), capture_output=True, text=True, timeout=SECONDS, check=False)


def test_process_that_starts_the_jobs_leaves_mpi_alone() -> None:
    program = "import sys, mpdist.cli.bench; sys.exit('mpi4py.MPI' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", program], env=job_environ(), timeout=60, check=True)


def test_names_are_checked() -> None:
    assert names("all-reduce, barrier", list(OPERATIONS), "--ops") == ["all_reduce", "barrier"]
    with pytest.raises(UsageError, match=r"--ops 'x': 'x' is none; choose from all_reduce"):
        names("x", list(OPERATIONS), "--ops")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--ops", "x"],
        ["--sizes", "x"],
        ["--sizes", "9999999999G"],
        ["--rivals", "raw,"],
        ["--json", "/gone/x.jsonl"],
        ["--plot", "/gone/x.png"],
        ["--plot", "x.png", "--ops", "barrier"],
        ["--tune", "--ops", "ping_pong"],
        ["--tune", "--json", "x.jsonl"],
        ["--tune", "--plot", "x.png"],
        ["--tune", "--rivals", "raw"],
        ["--tune", "-n", "1"],
        ["-n", "1", "--ops", "barrier,ping-pong"],
    ],
)
def test_mistake_is_one_line_and_starts_nothing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tune"],
        ["-n", "2"],
        ["--mpi", "mpich"],
        ["--mpiexec", "x"],
        ["--hostfile", "x"],
        ["--launcher-arg=x"],
        ["--rivals", "raw,tuned"],
    ],
)
def test_rank_of_a_job_starts_no_other(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"PMI_RANK": "0", "PMI_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", *arguments]) == 2
    assert "is for jobs that it starts by itself" in capsys.readouterr().err


@pytest.mark.parametrize("is_rank", [False, True])
def test_gloo_without_torch_is_told(
    is_rank: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mpdist.bench.gloo.is_installed", lambda: False)
    for name, value in {"PMI_RANK": "0", "PMI_SIZE": "2"}.items() if is_rank else ():
        monkeypatch.setenv(name, value)
    assert main(["bench", "--rivals", "gloo"]) == 2
    assert "torch is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "environ",
    [
        {"MPDIST_TUNING": "/proc/gone/tuning.json"},
        {"MPDIST_TUNING": "/dev/null"},
        {"MPDIST_TUNING": "/tmp"},
        {"MPDIST_TUNING": "", "XDG_CONFIG_HOME": "", "HOME": "/proc/gone"},
        {"MPDIST_TUNING": "", "XDG_CONFIG_HOME": "/proc/gone"},
    ],
)
def test_thresholds_that_can_not_be_written_are_not_measured(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "--tune"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "MPDIST_TUNING" in told


@pytest.mark.parametrize(
    ("option", "value"),
    [*(("--seconds", value) for value in ("nan", "inf", "0", "-1", "x")), *(("--factor", n) for n in ("0", "1", "x"))],
)
def test_times_and_steps_that_can_not_be_are_refused(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", f"{option}={value}"])
    assert ended.value.code == 2
    assert f"argument {option}: {value!r} is not a number" in capsys.readouterr().err


def test_every_operation_that_has_a_choice_is_tuned() -> None:
    assert set(TUNED_OPERATIONS) == set(CHOSEN_OPERATIONS)


def test_one_rank_plays_no_ping_pong_unasked() -> None:
    options = build_parser().parse_args(["bench"])
    assert set(OPERATIONS) - set(ops_of(options, 1)) == {PING_PONG}
    assert ops_of(options, 2) == list(OPERATIONS)


def test_tuned_mpi_takes_part_in_a_job_of_its_own() -> None:
    assert contenders_of(["raw", "tuned"]) == [OURS, RESIDENT, RAW_NOW, RAW_LATER]


def test_job_is_started_as_mpdist_run_would() -> None:
    options = build_parser().parse_args(["bench", "-n", "3", "--mpi", "mpich", "--launcher-arg=-x"])
    words = launch_words(options)
    assert build_parser().parse_args(["run", *words, "x.py"]).ranks == 3
    assert words[-1] == "--launcher-arg=-x"


def test_threshold_is_told_in_words() -> None:
    assert [threshold_text("barrier", n) for n in (0, 1)] == ["always", "never"]
    assert threshold_text("reduce", 4096) == "from 4 KiB on"
    assert threshold_text("reduce", 65537) == "above 64 KiB"
    assert limit_text("reduce", 4096, 4096) == "from 4 KiB on"
    assert limit_text("reduce", 2**26 + 1, 2**25).startswith("from 32 MiB on (measured: above 64 MiB; ")


@pytest.mark.job
@pytest.mark.limit(SECONDS)
def test_bench_measures_checks_and_writes(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    done = run_mpdist(
        *("bench", "--ops", "all_reduce,scatter,ping_pong,barrier", "--sizes", "8,64K"),
        *("--rivals", "raw", "--seconds", "0.01", "--json", str(file)),
    )
    assert done.returncode == 0, done.stderr
    cases = read(file)
    assert [(case.op, case.nbytes) for case in cases] == [
        *((op, n) for op in ("all_reduce", "scatter", "ping_pong") for n in (8, 65536)),
        ("barrier", 0),
    ]
    assert all(case.ranks == 2 and set(case.lines) == {OURS, RESIDENT, RAW_NOW, RAW_LATER} for case in cases)
    assert all(line.median > 0 for case in cases for line in case.lines.values())
    assert "all_reduce" in done.stdout


def test_second_job_that_fails_loses_nothing_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(1e-6, 1e-6, 0, 0, 7, 1)
    machine = {
        "mpi": "MPICH", "mpi_version": "5", "versions": {"mpdist": "0"}, "processor": "one", "usable_cores": 2,
        "date": "2026", "pinned_to": [0, 1],
    }  # fmt: skip
    first = Case("barrier", 0, 2, 1, {OURS: line, RAW_NOW: line}, machine)
    unknown = replace(first, machine={**machine, "mpi": "other"})

    def run_job_of(options: object, results: Path, *_: object) -> list[Case]:
        if results.name == "tuned":
            raise JobFailed(7)
        return [first]

    monkeypatch.setattr("mpdist.cli.bench.run_job_of", run_job_of)
    file = str(tmp_path / "x.jsonl")
    assert main(["bench", "--ops", "barrier", "--rivals", "raw,tuned", "--json", file]) == 7
    assert read(file) == [first]
    first = unknown  # nothing is known about it, so there is no second job
    assert main(["bench", "--ops", "barrier", "--rivals", "raw,tuned"]) == 0


@pytest.mark.job
@pytest.mark.limit(SECONDS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_to_the_benchmark_ends_its_job_first(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mpdist", "bench", "--rivals", "raw", "--seconds", "1"]
    environ = job_environ() | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True, preexec_fn=heed) as process:
        assert process.stderr
        assert "all_reduce" in process.stderr.readline()
        process.send_signal(number)
        process.stderr.read()
    assert process.returncode == 128 + number
    assert not list(tmp_path.glob("tmp*"))
    left = [other.info["cmdline"] for other in psutil.process_iter(["cmdline"])]
    assert not [words for words in left if any(str(tmp_path) in word for word in words or ())]


@pytest.mark.job
@pytest.mark.limit(SECONDS)
def test_bench_runs_under_another_launcher() -> None:
    words = ("bench", "--ops", "all_gather", "--sizes", "8", "--rivals", "raw", "--seconds", "0.01")
    done = run_mpdist("run", "-n", "3", "-m", "mpdist", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all_gather") == 1
    assert "3 ranks" in done.stdout


@pytest.mark.any_mpi
@pytest.mark.job
def test_mistake_of_one_rank_ends_all_before_anything_is_measured() -> None:
    done = run_mpdist("run", "-n", "2", "-m", "mpdist", "bench", "--json", "/gone/x.jsonl")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith("mpdist bench --json /gone/x.jsonl can't be written")


@pytest.mark.any_mpi
@pytest.mark.job
@pytest.mark.limit(SECONDS)
def test_tune_writes_what_was_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuning.json"
    monkeypatch.setenv("MPDIST_TUNING", str(path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    broken = tmp_path / "mpdist" / "tuning.json"  # that another file is bad must not keep this one from being written
    broken.parent.mkdir()
    broken.write_text("no table")
    done = run_mpdist("bench", "--tune", "--ops", "barrier,all_reduce", "--sizes", "8,64K", "--seconds", "0.01")
    assert done.returncode == 0, done.stderr
    (table,) = json.loads(path.read_text())["tables"]
    assert (table["ranks"], sorted(table["thresholds"])) == (2, ["all_reduce", "barrier"])
    assert table["mpi"] in ("mpich", "openmpi")
    assert all(set(limits) == {"shared_from"} for limits in table["thresholds"].values())
    again = run_mpdist("bench", "--ops", "barrier", "--rivals", "raw", "--seconds", "0.01")
    assert again.returncode == 0, again.stderr  # and the next start reads it
