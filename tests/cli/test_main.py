"""The command line itself: options, mistakes, and what is started for each rank."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cli.jobs import heed, job_environ

from mpdist.cli import PIPE_STATUS, build_parser, main
from mpdist.cli.launcher import Kind
from mpdist.cli.run import own_addresses, rank_program
from mpdist.errors import UsageError


def parse(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(["run", *arguments])


def test_options_end_at_the_program() -> None:
    options = parse(
        "-n", "3", "--mpi", "mpich", "--launcher-arg=--a", "--launcher-arg", "b", "x.py", "-n", "9", "--", "-m"
    )
    assert (options.ranks, options.mpi, options.launcher_arg) == (3, "mpich", ["--a", "b"])
    assert options.program == ["x.py", "-n", "9", "--", "-m"]
    assert not options.module


def test_usage_says_where_the_program_stands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("x.py")
    told = capsys.readouterr().err
    assert "script.py [ARGUMENT ...] | -m module [ARGUMENT ...]" in told
    assert told.endswith("error: the following arguments are required: -n/-np/--ranks\n")


@pytest.mark.parametrize("command", [["run", "-n", "2"], ["bench"], ["info"]])
def test_an_unknown_option_is_told_by_its_command(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command, "--bogus"])
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"usage: mpdist {command[0]} ")
    assert told.endswith(f"mpdist {command[0]}: error: unrecognized arguments: --bogus\n")


@pytest.mark.parametrize("option", ["-n", "-np", "--ranks"])
def test_number_of_ranks_as_launchers_spell_it(option: str) -> None:
    assert parse(option, "3", "x.py").ranks == 3


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("mpdist ")


def test_module_takes_arguments_too() -> None:
    options = parse("-n", "1", "-m", "package.module", "-m", "x")
    assert options.module
    assert options.program == ["package.module", "-m", "x"]


@pytest.mark.parametrize(
    "arguments", [["x.py"], ["-n", "0", "x.py"], ["-n", "two", "x.py"], ["-n", "1", "--mpi", "x", "y"]]
)
def test_wrong_options_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parse(*arguments)
    assert error.value.code == 2


def test_wrong_number_of_ranks_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("-n", "two", "x.py")
    assert "'two' is not a number of ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        *(["run", "-n", "2", option, "", "x.py"] for option in ("--mpiexec", "--hostfile")),
        *(
            ["bench", option, ""]
            for option in ("--ops", "--sizes", "--rivals", "--json", "--plot", "--mpiexec", "--hostfile")
        ),
    ],
)
def test_empty_word_is_not_an_option_left_out(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert re.search(r"argument --\w+: it is empty; say what it is to be", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("kind", "variables"),
    [
        (Kind.MPICH, "PMI_RANK"),
        (Kind.OPENMPI, "OMPI_COMM_WORLD_RANK"),
        (Kind.OTHER, "OMPI_COMM_WORLD_RANK,PMI_RANK"),
    ],
)
def test_launcher_starts_a_warden_that_starts_the_program(kind: Kind, variables: str, tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.touch()
    program = rank_program(parse("-n", "1", "--tag-output", str(script), "a"), kind)
    assert program[:3] == [sys.executable, "-I", "-S"]
    assert program[3].endswith("warden.py")
    assert program[4:] == [variables, "tag", sys.executable, str(script), "a"]


def test_ctrl_c_before_a_job_is_started_shows_no_traceback(tmp_path: Path) -> None:
    slow = tmp_path / "mpiexec"
    slow.write_text("#!/bin/sh\nkill -INT $PPID; exec sleep 30\n")
    slow.chmod(0o755)
    command = [sys.executable, "-m", "mpdist", "run", "-n", "1", "--mpiexec", str(slow), "-m", "platform"]
    done = subprocess.run(
        command, env=job_environ(), capture_output=True, text=True, timeout=60, check=False, preexec_fn=heed
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_missing_script_is_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match=r"no script 'no_such\.py'"):
        rank_program(parse("-n", "1", "no_such.py"), Kind.MPICH)
    with pytest.raises(UsageError, match="no program"):
        rank_program(parse("-n", "1"), Kind.MPICH)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no_such.py"], "no script 'no_such.py' here"),
        (["--hostfile", "no_such_hosts", "x.py"], "the host file 'no_such_hosts' cannot be read"),
        (["python", "x.py"], "it starts Python itself: leave 'python' out"),
        ([".venv/bin/python3.12", "x.py"], "it starts Python itself: leave '.venv/bin/python3.12' out"),
    ],
)
def test_mistake_is_one_line_and_status_2(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "1", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"mpdist run: {words}")
    assert told.count("\n") == 1


def test_mistake_outside_a_command_names_mpdist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mpdist.cli.launcher.candidates", lambda *_: [])
    assert main(["run", "-n", "1", "x.py"]) == 2
    assert capsys.readouterr().err.startswith("mpdist: no mpiexec beside ")


def test_dry_run_prints_the_command_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "x.py"
    script.write_text("raise SystemExit(9)")
    assert main(["run", "-n", "2", "--dry-run", str(script), "a b"]) == 0
    words = shlex.split(capsys.readouterr().err)
    assert words[words.index("-n") + 1] == "2"
    assert words[-2:] == [str(script), "a b"]


def test_own_addresses_are_not_the_loopback() -> None:
    assert not any(address.startswith("127.") for address in own_addresses())


def test_a_reader_that_has_had_enough_sees_no_traceback() -> None:
    info = subprocess.Popen(
        [sys.executable, "-m", "mpdist", "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert info.stdout is not None
    info.stdout.close()
    _, errors = info.communicate(timeout=60)
    assert errors == ""
    assert info.returncode == PIPE_STATUS


def test_output_without_a_place_is_one_line_and_status_1() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "mpdist", "info"]
        info = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert info.returncode == 1
    assert info.stderr == "mpdist info: its output cannot be written: No space left on device\n"
