"""Start-up: Open MPI looks for no network cards where all ranks are on one host, unless somebody has chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpdist.transport.start_up import TRANSPORTS, without_network_cards

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
