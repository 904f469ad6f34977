"""The trial in processes of their own, whatever they do; a cupy whose memory is the host's stands for the GPU."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from ranks.launch import mpiexec

from mpdist.transport.cuda_aware import probe as module
from mpdist.transport.cuda_aware.probe import Report, launcher_of, parse, probe, settings, without_launcher
from mpdist.transport.cuda_aware.table import REDUCTIONS, Answer

OPERATIONS = ("send", "recv", "broadcast", "gather", "reduce", "scan")
OK = dict.fromkeys(OPERATIONS, Answer.OK)

# The library need not be there: its launcher is looked for beside it.
LIBRARY = str(Path(mpiexec(1)[0]).parents[1] / "lib" / "libmpi.so")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A cupy that can be loaded; what goes wrong with it is said by PRETENDED_FAULTS."""
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("pretended")))
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    return monkeypatch


def found(library: str = LIBRARY, operations: tuple[str, ...] = OPERATIONS) -> tuple[dict[str, Answer], str]:
    finding = probe(library, 0, operations, threading.Event())
    return dict(finding.answers), finding.problem


# ---------------------------------------------------------------------- pure


def test_a_report_is_read() -> None:
    text = "ranks 2\nbegin send\nok send\nbegin scan\nfails scan\nend\n"
    answers = {"send": Answer.OK, "scan": Answer.FAILS}
    assert parse(text, OPERATIONS) == Report(2, answers, has_ended=True)
    assert parse("ranks 1\nbegin send\nok send\nbegin scan\n", OPERATIONS) == Report(1, {"send": Answer.OK}, "scan")
    assert parse("problem a GPU\nproblem other\n", OPERATIONS) == Report(problem="a GPU")


@pytest.mark.parametrize(
    "text",
    [
        *("", "\n\n", "ranks 3\n", "ranks\n", "ranks 2", "ok send\n", "begin nothing\nok nothing\n", "ok\n", " \x00\n"),
        "begin send\nok",
    ],
)
def test_what_is_no_word_of_the_trial_says_nothing(text: str) -> None:
    report = parse(text, OPERATIONS)
    assert (report.ranks, report.answers, report.has_ended) == (0, {}, False)


def test_an_answer_needs_its_beginning() -> None:
    assert parse("ranks 2\nbegin send\nok scan\n", OPERATIONS) == Report(2, {}, "send")


def test_variables_of_launchers_are_left_out_and_those_that_steer_mpi_stay() -> None:
    steering = {"OMPI_MCA_pml": "ucx", "UCX_TLS": "cuda", "MPIR_CVAR_ENABLE_GPU": "1", "MV2_USE_CUDA": "1"}
    others = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1"}
    launched = {
        *("PMI_RANK", "PMIX_RANK", "PMIX_NAMESPACE", "OMPI_COMM_WORLD_SIZE", "OMPI_MCA_num_procs", "PRTE_LAUNCHED"),
        *("HYDI_CONTROL_FD", "MPI_LOCALRANKID", "SLURM_PROCID", "OMPI_MCA_ess_base_jobid", "MV2_COMM_WORLD_RANK"),
    }
    environ = steering | others | dict.fromkeys(launched, "1")
    assert without_launcher(environ) == steering | others
    assert settings(environ) == steering


def test_the_launcher_is_the_librarys_own(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "sub" / "libmpi.so"
    assert launcher_of(str(library)) is None
    path = tmp_path / "bin" / "mpiexec"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    assert launcher_of(str(library)) is None
    path.chmod(0o755)
    assert launcher_of(str(library)) == str(path)


# ---------------------------------------------------------------------- with processes


@pytest.mark.usefixtures("faults")
def test_two_ranks_confirm_everything() -> None:
    assert found() == (OK, "")


@pytest.mark.usefixtures("faults")
def test_one_rank_confirms_what_is_no_reduction() -> None:
    assert found("") == ({op: Answer.OK for op in OPERATIONS if op not in REDUCTIONS}, "")


def test_a_launcher_that_does_not_work_is_done_without(faults: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number, script in enumerate(("#!/bin/sh\nexit 1\n", "no program", '#!/bin/sh\nshift; shift; exec "$@"\n')):
        path = tmp_path / str(number) / "bin" / "mpiexec"
        path.parent.mkdir(parents=True)
        path.write_text(script)
        path.chmod(0o755)
        answers, problem = found(str(tmp_path / str(number) / "lib" / "libmpi.so"), ("send", "scan"))
        assert (answers, problem) == ({"send": Answer.OK}, "")


@pytest.mark.parametrize("library", [LIBRARY, ""], ids=["two ranks", "one rank"])
def test_a_crash_leaves_the_other_answers(faults: pytest.MonkeyPatch, library: str) -> None:
    faults.setenv("PRETENDED_FAULTS", "crash ibroadcast,crash iscan")
    answers, problem = found(library)
    crashed = {op: Answer.CRASHES for op in ("broadcast", "scan") if library or op == "broadcast"}
    assert answers == {op: answer for op, answer in OK.items() if library or op not in REDUCTIONS} | crashed
    assert not problem


@pytest.mark.parametrize("what", ["wrong", "raise"])
def test_wrong_values_and_errors_are_told_apart_from_good_ones(faults: pytest.MonkeyPatch, what: str) -> None:
    faults.setenv("PRETENDED_FAULTS", f"{what} igather")
    assert found() == (OK | {"gather": Answer.FAILS}, "")


def test_what_hangs_is_ended(faults: pytest.MonkeyPatch) -> None:
    faults.setattr(module, "OPERATION_SECONDS", 4.0)
    faults.setenv("PRETENDED_FAULTS", "hang ibroadcast")
    faults.setenv("TRIAL_MARKER", "this one")
    assert found() == (OK | {"broadcast": Answer.HANGS}, "")
    until = time.monotonic() + 10  # what a launcher has left behind ends by itself
    while (left := trials()) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left


def trials() -> list[psutil.Process]:
    running = []
    for process in psutil.process_iter():
        try:
            if module.TRIAL in process.cmdline() and process.environ().get("TRIAL_MARKER") == "this one":
                running.append(process)
        except psutil.Error:
            continue
    return running


def test_garbage_is_passed_over(faults: pytest.MonkeyPatch) -> None:
    faults.setenv("PRETENDED_FAULTS", "garbage,crash igather")
    assert found() == (OK | {"gather": Answer.CRASHES}, "")


def test_without_a_gpu_nothing_is_confirmed_and_the_reason_is_told(faults: pytest.MonkeyPatch) -> None:
    faults.setenv("PRETENDED_FAULTS", "absent")
    answers, problem = found()
    assert not answers
    assert "no driver at all" in problem
    faults.setenv("PRETENDED_FAULTS", "silent")
    assert found() == ({}, "it ended before it had begun")


def test_a_start_that_hangs_is_ended(faults: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "bin" / "mpiexec"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\nexec sleep 1000\n")
    path.chmod(0o755)
    faults.setattr(module, "START_SECONDS", 2.0)
    faults.setenv("PRETENDED_FAULTS", "silent")
    started = time.monotonic()
    assert found(str(tmp_path / "lib" / "libmpi.so")) == ({}, "it ended before it had begun")
    assert time.monotonic() - started < 8


def test_it_is_broken_off_when_the_job_ends(faults: pytest.MonkeyPatch) -> None:
    faults.setenv("PRETENDED_FAULTS", "hang ibroadcast")
    is_over = threading.Event()
    threading.Timer(1.5, is_over.set).start()
    started = time.monotonic()
    finding = probe(LIBRARY, 0, OPERATIONS, is_over)
    assert time.monotonic() - started < 8
    assert finding.problem


def test_an_interpreter_that_cannot_be_started_is_told(faults: pytest.MonkeyPatch) -> None:
    faults.setattr(sys, "executable", "")
    assert found() == ({}, "this interpreter cannot be started again")
    faults.setattr(sys, "executable", os.devnull)
    assert found("")[1].startswith("PermissionError")
