"""What `mpdist run` gives to scripts that were written for torchrun."""

from __future__ import annotations

import tempfile

import pytest
from cli.jobs import run_mpdist

from mpdist.cli.torch_variables import common_variables, first_host
from mpdist.cli.warden import LOCAL_VARIABLES, rank_variables


def test_a_local_job_meets_on_the_loopback() -> None:
    found = common_variables(4, [], {}, is_local=True)
    assert found["WORLD_SIZE"] == "4"
    assert found["MASTER_ADDR"] == "127.0.0.1"
    assert 1024 <= int(found["MASTER_PORT"]) < 65536


def test_a_given_master_stays() -> None:
    given = {"MASTER_ADDR": "head", "MASTER_PORT": "1234", "WORLD_SIZE": "99"}
    assert common_variables(2, [], given, is_local=False) == {**given, "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("lines", "host"),
    [
        (["# comment", "", "node1:4", "node2"], "node1"),
        (["node1 slots=4  # big"], "node1"),
        (["  node3"], "node3"),
        ([], ""),
    ],
)
def test_the_first_host_of_a_host_file(lines: list[str], host: str) -> None:
    assert first_host(lines) == host
    assert common_variables(2, lines, {}, is_local=False).get("MASTER_ADDR", "") == host


@pytest.mark.parametrize("prefix", LOCAL_VARIABLES)
def test_a_rank_knows_its_place_on_its_host(prefix: tuple[str, str]) -> None:
    environ = {prefix[0]: "1", prefix[1]: "2"}
    assert rank_variables("5", environ) == {"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert rank_variables("5", {}) == {"RANK": "5"}


def test_a_job_finds_them_all_before_it_starts() -> None:
    program = (
        "import os; print(*(f'{n}={os.environ[n]}' for n in "
        "('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')))"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(program)
        script.flush()
        done = run_mpdist("run", "-n", "2", script.name)
    assert done.returncode == 0, done.stderr
    first, second = sorted(done.stdout.splitlines())
    assert first.startswith("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=")
    assert second.startswith("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=")
    assert first.split()[-1] == second.split()[-1]
