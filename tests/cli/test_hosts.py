"""Host files: what `mpdist run` refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpdist.cli import main
from mpdist.cli.hosts import Host, parse, require_room
from mpdist.cli.launcher import Kind
from mpdist.errors import UsageError

LINES = {
    Kind.MPICH: ["# two hosts", "node1:2", "", "node2:2 user=me"],
    Kind.OPENMPI: ["node1 slots=2  # big", "node2 max_slots=9 slots=2"],
}


def check(kind: Kind, lines: list[str], ranks: int, *extra: str, **environ: str) -> None:
    require_room("hosts", parse(lines), ranks, kind, extra, environ)


def test_a_line_has_a_name_and_perhaps_a_number() -> None:
    assert parse(["# none", "", "a:4", "b slots=2", "c", "fe80::1 slots=3"]) == [
        Host("a", "4"),
        Host("b", "2", has_slots=True),
        Host("c", None),
        Host("fe80::1", "3", has_slots=True),
    ]


@pytest.mark.parametrize("kind", LINES)
def test_more_ranks_than_room_are_refused(kind: Kind) -> None:
    check(kind, LINES[kind], 4)
    with pytest.raises(UsageError, match=r"5 ranks do not fit: .*'hosts' has room for 4 \(node1: 2, node2: 2\)"):
        check(kind, LINES[kind], 5)


@pytest.mark.parametrize("kind", LINES)
def test_a_host_without_a_number_is_left_to_the_launcher(kind: Kind) -> None:
    check(kind, [*LINES[kind], "node3"], 99)


@pytest.mark.parametrize(
    "extra", [["--oversubscribe"], ["--map-by", "slot:OVERSUBSCRIBE"], ["-ppn", "8"], ["--host", "a:9"], ["--map-by=x"]]
)
def test_who_places_ranks_otherwise_is_let_do_it(extra: list[str]) -> None:
    for kind, lines in LINES.items():
        check(kind, lines, 99, *extra)
    check(Kind.OPENMPI, LINES[Kind.MPICH], 99, PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe")


@pytest.mark.parametrize(
    ("kind", "line", "text"),
    [
        (
            Kind.MPICH,
            "node1 slots=4",
            "has 'node1 slots=4', as Open MPI reads it; this mpiexec is MPICH's: write 'node1:4'",
        ),
        (Kind.MPICH, "node1:0", "gives 'node1' '0' for a number of ranks"),
        (Kind.MPICH, "node1:", "gives 'node1' '' for a number of ranks"),
        (Kind.OPENMPI, "node1 slots=two", "gives 'node1' 'two' for a number of ranks"),
        (Kind.OPENMPI, "# node1", "names no host"),
    ],
)
def test_a_line_that_cannot_be_meant_is_refused(kind: Kind, line: str, text: str) -> None:
    with pytest.raises(UsageError) as refused:
        check(kind, [line], 1)
    assert text in str(refused.value)


def test_it_is_one_line_and_nothing_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts, script = tmp_path / "hosts", tmp_path / "x.py"
    hosts.write_text("# none yet\n")
    script.write_text("raise SystemExit(9)")
    assert main(["run", "-n", "2", "--hostfile", str(hosts), str(script)]) == 2
    assert capsys.readouterr().err == f"mpdist run: the host file {str(hosts)!r} names no host\n"
