"""The shared memory of Open MPI's ranks: in a folder of the job's own, and gone with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli.jobs import job, run_mpdist

from mpdist.cli.launcher import Kind, find_launcher
from mpdist.cli.segments import SHARED_MEMORY, VARIABLE, own_segments

PROGRAM = f"""
import os, signal, sys
import mpdist

async def main(comm):
    await comm.barrier()
    folder = os.environ[{VARIABLE!r}]
    if comm.rank == 0:
        print(folder, len([name for name in os.listdir(folder) if name.startswith("sm_segment")]), flush=True)
    await comm.barrier()
    print("is ready", flush=True)
    if "wait" in sys.argv:
        await comm.recv(src=1)
    if comm.rank == 1 and "kill" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    await comm.barrier()

mpdist.run(main)
"""

needs_folder = pytest.mark.skipif(not os.access(SHARED_MEMORY, os.W_OK), reason=f"there is no {SHARED_MEMORY} here")


@needs_folder
def test_each_job_of_open_mpi_gets_a_folder() -> None:
    with (
        own_segments(Kind.OPENMPI, {}, is_local=True) as one,
        own_segments(Kind.OPENMPI, {}, is_local=True) as other,
    ):
        folders = [Path(one[VARIABLE]), Path(other[VARIABLE])]
        assert folders[0] != folders[1]
        (folders[0] / "left").write_bytes(b"by a killed rank")
        assert all(folder.is_dir() for folder in folders)
    assert not any(folder.exists() for folder in folders)


@pytest.mark.parametrize(
    ("kind", "environ", "is_local"),
    [
        (Kind.MPICH, {}, True),
        (Kind.OPENMPI, {}, False),
        (Kind.OPENMPI, {VARIABLE: "/elsewhere"}, True),
    ],
    ids=["another MPI", "several hosts", "chosen by the user"],
)
def test_none_where_it_is_not_for_us_to_say(kind: Kind, environ: dict[str, str], is_local: bool) -> None:
    with own_segments(kind, environ, is_local=is_local) as variables:
        assert variables == {}


@needs_folder
@pytest.mark.job
@pytest.mark.parametrize("how", ["ends", "kill"])
def test_a_job_leaves_no_segment_however_it_ends(how: str, tmp_path: Path) -> None:
    if find_launcher(None).kind is not Kind.OPENMPI:
        pytest.skip("the MPI here is not Open MPI")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    ended = run_mpdist("run", "-n", "2", str(script), how)
    assert ended.returncode == (0 if how == "ends" else 137), ended.stderr
    folder, segments = ended.stdout.replace("is ready", "").split()
    assert int(segments) == 2
    assert not Path(folder).exists()


@needs_folder
@pytest.mark.job
def test_a_job_whose_mpdist_run_is_killed_leaves_no_segment(tmp_path: Path) -> None:
    if find_launcher(None).kind is not Kind.OPENMPI:
        pytest.skip("the MPI here is not Open MPI")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with job("-n", "2", str(script), "wait") as running:
        running.wait_ready(2)
        running.process.kill()
        assert running.left_over() == []
    folder, _ = running.out.replace("is ready", "").split()
    assert not Path(folder).exists()
