"""Start-up: Open MPI looks for no network cards where all ranks are on one host, unless somebody has chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli.jobs import job_environ

from mpdist.errors import Unavailable
from mpdist.transport.start_up import TRANSPORTS, at_home, known_as_unavailable, without_network_cards

HERE = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "^ofi"),
        (HERE, "^ofi"),
        (HERE | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, None),
        ({"PMI_RANK": "0"}, None),
        ({"PMIX_RANK": "0", "SLURM_PROCID": "0"}, None),
        (HERE | {TRANSPORTS: "self,sm"}, "self,sm"),
    ],
)
def test_it_is_left_out_where_nobody_can_miss_it(environ: dict[str, str], expected: str | None, tmp_path: Path) -> None:
    after = dict(environ)
    with without_network_cards(environ):
        assert environ.get(TRANSPORTS) == expected
    assert environ == after


@pytest.mark.parametrize(("line", "expected"), [("btl = self,tcp", None), ("btl_tcp_if_include = lo", "^ofi")])
def test_the_users_own_file_of_parameters_comes_first(line: str, expected: str | None, tmp_path: Path) -> None:
    (tmp_path / ".openmpi").mkdir()
    (tmp_path / ".openmpi" / "mca-params.conf").write_bytes(f"# m\xfcde\n{line}\n".encode("latin-1"))
    with without_network_cards(environ := HERE | {"HOME": str(tmp_path)}):
        assert environ.get(TRANSPORTS) == expected


NO_LIBRARY = """\
cannot load MPI library
/env/lib/libmpi.so.12: cannot open shared object file: No such file or directory
libmpi.so.40: cannot open shared object file: No such file or directory"""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (NO_LIBRARY, "MPI module. mpi4py says: cannot load MPI library"),
        (f"{NO_LIBRARY}\nlibfabric.so.1: cannot open shared object file", "MPI library; libfabric.so.1: cannot open"),
    ],
)
def test_missing_library_is_told_without_the_places_where_it_is_not(said: str, told: str) -> None:
    with (
        pytest.raises(Unavailable, match=r"no MPI library: pip install 'mpdist\[mpich\]'") as caught,
        known_as_unavailable(),
    ):
        raise RuntimeError(said)
    assert told in str(caught.value)
    assert "libmpi" not in str(caught.value)


# As mpi4py does where it finds no library.
PREPARATION = f"""
import sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name == "mpi4py.MPI":
            raise RuntimeError({NO_LIBRARY!r})
sys.meta_path.insert(0, Nowhere())
"""
RANK = "import os; os.environ.update(PMI_RANK='0', PMI_SIZE='2'); "


@pytest.mark.parametrize(
    ("program", "status", "first"),
    [
        ("import mpdist; mpdist.init()", 1, "mpdist.errors.Unavailable: no MPI library"),
        (f"{RANK}from mpdist.cli import main; sys.exit(main(['bench']))", 2, "mpdist: no MPI library"),
    ],
)
def test_program_without_a_library_ends_with_advice(program: str, status: int, first: str) -> None:
    command = [sys.executable, "-c", PREPARATION + program]
    done = subprocess.run(command, env=job_environ(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status
    assert done.stderr.splitlines()[-1].startswith(first)
    assert "During handling" not in done.stderr
    assert "direct cause" not in done.stderr


@pytest.mark.parametrize("known", [True, False])
def test_open_mpi_has_a_home_where_it_starts(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: "/homes/me" if known else path)
    environ: dict[str, str] = {}
    with at_home(environ):
        assert environ == {"HOME": "/homes/me" if known else "/"}
    assert environ == {}


def test_a_home_that_is_set_stays() -> None:
    environ = {"HOME": "/homes/me"}
    with at_home(environ):
        assert environ == {"HOME": "/homes/me"}
    assert environ == {"HOME": "/homes/me"}


def test_mpdist_starts_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    program = "import os, mpdist; print(mpdist.init().size, 'HOME' in os.environ)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=job_environ(), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "1 False\n"), done.stderr
