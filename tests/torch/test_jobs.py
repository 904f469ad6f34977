"""The backend in whole jobs: the examples, the end of a program, and failures."""

from __future__ import annotations

import ast
import doctest
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from ranks.launch import mpiexec

pytestmark = [pytest.mark.job, pytest.mark.either_mpi, pytest.mark.limit(120)]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
JOB_SECONDS = 90.0


def run(ranks: int, *command: str) -> subprocess.CompletedProcess[str]:
    launcher = mpiexec(ranks) if ranks > 1 else []
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [*launcher, sys.executable, *command],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=JOB_SECONDS,
        check=False,
    )


def run_program(ranks: int, folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Run a program that has the default group."""
    head = """
        import sys, time, torch, torch.distributed as dist, mpdist.torch
        from datetime import timedelta
        dist.init_process_group("mpdist", timeout=timedelta(seconds=20))
        rank, size = dist.get_rank(), dist.get_world_size()
    """
    script = folder / "program.py"
    script.write_text(textwrap.dedent(head) + textwrap.dedent(body))
    return run(ranks, str(script))


@pytest.mark.parametrize("name", ["torch_backend.py", "torch_tutorial.py"])
def test_example_prints_what_its_docstring_says(name: str) -> None:
    text = ast.get_docstring(ast.parse((EXAMPLES / name).read_text())) or ""
    promised = text.split(name + "\n", 1)[1]
    done = run(2, str(EXAMPLES / name))
    assert done.returncode == 0, done.stderr
    assert doctest.OutputChecker().check_output(promised.rstrip() + "\n", done.stdout, doctest.ELLIPSIS), done.stdout
    assert "mpdist:" not in done.stderr
    if name == "torch_backend.py":
        (accuracy,) = re.findall(r"test accuracy (\d+\.\d) %", done.stdout)
        assert float(accuracy) >= 95


@pytest.mark.parametrize("ranks", [1, 3])
def test_tutorial_runs_on_any_number_of_ranks(ranks: int) -> None:
    done = run(ranks, str(EXAMPLES / "torch_tutorial.py"))
    assert done.returncode == 0, done.stderr
    assert f"a ring of {ranks}: {float(ranks)} on each" in done.stdout


@pytest.mark.parametrize(
    "ending",
    [
        "dist.destroy_process_group()",
        "pass",  # nothing is destroyed
        "work = dist.all_reduce(torch.ones(500_000), async_op=True)",  # pending, not waited for
        "dist.all_reduce(torch.ones(500_000), async_op=True).get_future().then(lambda f: f.value()[0].sum())",
        "dist.isend(torch.ones(3), (rank + 1) % size); x = torch.ones(3); dist.recv(x, (rank - 1) % size)",
        "dist.new_group([0]); dist.new_group(backend='gloo'); time.sleep(0.1 * rank)",
    ],
)
def test_a_program_may_end_in_any_way(tmp_path: Path, ending: str) -> None:
    done = run_program(2, tmp_path, f"dist.all_reduce(torch.ones(1))\n{ending}\nsys.stdout.write(f' end of {{rank}} ')")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(["end", "of", "0", "end", "of", "1"])
    assert "Traceback" not in done.stderr
    assert "mpdist:" not in done.stderr


def test_an_exception_of_one_rank_ends_the_job(tmp_path: Path) -> None:
    body = """
        dist.barrier()
        if rank == 1:
            raise ValueError("this one fails")
        dist.all_reduce(torch.ones(1))
    """
    done = run_program(2, tmp_path, body)
    assert done.returncode != 0
    assert "ValueError: this one fails" in done.stderr
    assert "Traceback" in done.stderr
    assert re.search(r"mpdist: rank 1 of 2 .*ValueError", done.stderr)


@pytest.mark.any_mpi
def test_an_exception_under_gloo_shows_its_traceback(tmp_path: Path) -> None:
    """init_process_group leads sys.stderr into a string when an exception is shown."""
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(f"""
        import mpdist, torch.distributed as dist
        world = mpdist.init()
        store = dist.FileStore({str(tmp_path / "store")!r}, world.size)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
        world.barrier().wait()
        if world.rank == 1:
            raise ValueError("this one fails")
        world.barrier().wait()
        """)
    )
    done = run(2, str(script))
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert re.search(r"mpdist: rank 1 of 2 .*ValueError: this one fails", done.stderr)


def test_a_failure_in_a_hook_of_backward_ends_the_job(tmp_path: Path) -> None:
    body = """
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        if rank == 1:
            model.module.weight.register_hook(lambda g: 1 / 0)
        model(torch.ones(1, 2)).sum().backward()
        dist.barrier()
    """
    done = run_program(2, tmp_path, body)
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stderr


MODEL = "model = mpdist.torch.DistributedDataParallel(torch.nn.Linear(2, 2))"
STOCK = "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))"  # which waits in C++
METRICS = "metrics = mpdist.torch.Metrics(mpdist.init(), 'loss')"


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("make", "line", "advice"),
    [
        (MODEL, "model(torch.ones(1, 2)).sum().backward()", r"; unequal numbers of batches\? model.join\(\)"),
        (STOCK, "model(torch.ones(1, 2)).sum().backward()", ""),
        (METRICS, "metrics.means()", ""),
    ],
)
def test_more_batches_on_one_rank_are_told_with_the_programs_line(
    tmp_path: Path, make: str, line: str, advice: str
) -> None:
    done = run_program(2, tmp_path, f"{make}\nfor _ in range(3 + rank):\n    {line}")
    assert done.returncode != 0
    words = (
        "" if make == STOCK else f" in <module>: {re.escape(line)}"
    )  # torch's call of all_reduce has a line of its own
    wait = rf"rank 1 waits in all_reduce .* \(.*program.py:\d+{words}\) for rank 0"
    assert re.search(f"{wait}, which has finished.*{advice}", done.stderr), done.stderr


def test_a_program_goes_on_after_a_timeout(tmp_path: Path) -> None:
    body = """
        brief = dist.new_group(timeout=timedelta(seconds=1))
        if rank == 0:
            try:
                dist.all_reduce(torch.ones(1), group=brief)
            except RuntimeError as error:
                print("not done" in str(error), flush=True)
        dist.barrier()
        dist.destroy_process_group()
    """
    done = run_program(2, tmp_path, body)
    assert done.stdout == b"True\\n".decode("unicode_escape"), done.stderr


@pytest.mark.any_mpi
def test_without_a_timeout_the_variable_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPDIST_TIMEOUT", "1.5")
    body = """
        groups = [dist.new_group(), dist.new_group(timeout=timedelta(seconds=7))]
        if rank == 0:
            try:
                dist.barrier(group=groups[0])
            except RuntimeError as error:
                print("is not done after 1.5 s" in str(error), flush=True)
            print([group.options._timeout.total_seconds() for group in groups])
        dist.barrier()
    """
    done = run_program(2, tmp_path, body)
    assert done.stdout.splitlines() == ["True", "[1.5, 7.0]"], done.stderr


@pytest.mark.any_mpi
@pytest.mark.parametrize("name", ["mpdist", "mpi", "cpu:mpi"])
def test_torchrun_is_told_to_be_mpirun(tmp_path: Path, name: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(f"import torch.distributed as dist, mpdist.torch\ndist.init_process_group({name!r})\n")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "x",
            "MASTER_PORT": "1",
        },
        capture_output=True,
        text=True,
        timeout=JOB_SECONDS,
        check=False,
    )
    assert done.returncode != 0
    assert "rank 1 of 2, but MPI has started this process as rank 0 of 1" in done.stderr
    assert "mpirun" in done.stderr


@pytest.mark.any_mpi
def test_the_entry_point_registers_and_does_nothing_else() -> None:
    program = """
        import sys, time, os
        before = dict(os.environ)
        import torch, torch.distributed as dist
        start = time.perf_counter()
        from mpdist.torch.registration import autoload
        autoload()
        autoload()
        seconds = time.perf_counter() - start
        assert "MPDIST" in dist.Backend._plugins
        assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
        assert not any(name.startswith("mpi4py") for name in sys.modules), "it loads MPI"
        assert "mpdist.torch.process_group" not in sys.modules
        assert dict(os.environ) == before
        print(seconds)
    """
    seconds = []
    for _ in range(3):
        done = run(1, "-c", textwrap.dedent(program))
        assert done.returncode == 0, done.stderr
        seconds.append(float(done.stdout))
    assert min(seconds) < 0.015  # the target is 5 ms on an idle machine


def test_installed_no_import_is_needed(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {name: entry for name, entry in project["entry-points"].items() if name.startswith("torch.")}
    assert set(groups) == {"torch.backends", "torch.distributed.backends"}
    record = tmp_path / "mpdist-0.dist-info"  # what an installation leaves
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: mpdist\nVersion: 0\n")
    lines = [
        f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in each.items()) for name, each in groups.items()
    ]
    (record / "entry_points.txt").write_text("".join(lines))
    program = "import torch.distributed as d; d.init_process_group('mpdist'); d.barrier(); print(d.get_backend())"
    script = tmp_path / "program.py"
    script.write_text(program)
    done = run(2, "-c", f"import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); runpy.run_path({str(script)!r})")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() in (["mpdist"] * 2, ["mpdistmpdist"])  # two ranks may write at once


@pytest.mark.any_mpi
def test_a_torch_with_mpi_of_its_own_keeps_the_name() -> None:
    program = """
        import os
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        from torch.distributed import distributed_c10d
        distributed_c10d._MPI_AVAILABLE = True
        stock = distributed_c10d._new_process_group_helper
        import mpdist.torch
        assert distributed_c10d._new_process_group_helper is stock
        assert mpdist.torch.mpi_name.meant_by("cpu:mpi") == "cpu:mpi"
        try:
            mpdist.torch.as_mpi()
        except mpdist.UsageError as error:
            print(error)
    """
    done = run(1, "-c", textwrap.dedent(program))
    assert done.returncode == 0, done.stderr
    assert "which is built with MPI" in done.stdout
    assert 'Use the name "mpdist"' in done.stdout


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("value", "call", "printed"),
    [("0", "None", "False"), ("1", "None", "True"), ("0", "mpdist.torch.as_mpi(); mpdist.torch.as_mpi()", "True")],
)
def test_mpi_is_told_to_be_available_where_asked_for(
    monkeypatch: pytest.MonkeyPatch, value: str, call: str, printed: str
) -> None:
    monkeypatch.setenv("MPDIST_AS_MPI", value)
    program = (
        f"import sys, mpdist.torch; {call}; import torch.distributed as d; print(d.is_mpi_available(), *sys.modules)"
    )
    done = run(1, "-c", program)
    said, *modules = done.stdout.split()
    assert said == printed, done.stderr
    assert "mpi4py.MPI" not in modules


def test_what_a_library_has_put_into_the_environment_does_not_count_for_mpi(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="15000")
        import mpdist.torch, torch, torch.distributed as dist
        dist.init_process_group(sys.argv[1])
        ranks = torch.tensor(dist.get_rank())
        dist.all_reduce(ranks)
        assert ranks.item() == 1
        """)
    )
    done = run(2, str(script), "mpi")
    assert done.returncode == 0, done.stderr
    done = run(2, str(script), "mpdist")
    assert done.returncode != 0
    assert re.search(r"say rank 0 of 1, but MPI has started this process as rank [01] of 2", done.stderr), done.stderr
    assert "mpdist.torch.setup_env()" in done.stderr


@pytest.mark.any_mpi
def test_a_broken_entry_point_only_warns() -> None:
    program = """
        import os, warnings
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        import torch.distributed as dist
        dist.Backend.register_backend = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import mpdist.torch
        assert any("could not be registered" in str(each.message) for each in caught), caught
    """
    done = run(1, "-c", textwrap.dedent(program))
    assert done.returncode == 0, done.stderr
