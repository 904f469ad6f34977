"""Examples: each runs as a real job, as its users start it, and prints what its docstring says."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from ranks.launch import mpiexec
from ranks.plugin import GPU_DEVICE

pytestmark = [pytest.mark.job, pytest.mark.either_mpi]

EXAMPLES = Path(__file__).parent.parent / "examples"
README = EXAMPLES.parent / "README.md"
NAMES = sorted(path.name for path in EXAMPLES.glob("0*.py"))
JOB_SECONDS = 45.0
COMMAND = re.compile(r"^\$ mpirun -n (\d+) python examples/(\S+)(.*)\n((?:.+\n?)+)", re.MULTILINE)

# As promised in train_digits.py: points between runs on different numbers of ranks. Other CPUs round otherwise too.
NOISE = 1.5

has_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")


class Run(NamedTuple):
    """A command in a docstring, and the output that it promises."""

    ranks: int
    options: list[str]
    output: str


def documented(name: str) -> list[Run]:
    """The commands in an example's docstring."""
    text = ast.get_docstring(ast.parse((EXAMPLES / name).read_text())) or ""
    runs = [(match[2], Run(int(match[1]), match[3].split(), match[4])) for match in COMMAND.finditer(text)]
    assert runs, f"{name}: its docstring has no command"
    assert {path for path, _ in runs} == {name}
    return [run for _, run in runs]


def run_job(name: str, ranks: int, *options: str, on: tuple[str, ...] = ()) -> tuple[str, str]:
    """What a job that ends well writes to stdout and stderr; one rank needs no launcher.

    Args:
        on: the script that runs the example, if it does not run by itself.
    """
    launcher = mpiexec(ranks) if ranks > 1 else []
    command = [*launcher, sys.executable, *on, str(EXAMPLES / name), *options]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        try:
            output, errors = job.communicate(timeout=JOB_SECONDS)
        except subprocess.TimeoutExpired:
            job.terminate()
            output, errors = job.communicate(timeout=5)
            pytest.fail(f"{name} on {ranks} ranks did not end within {JOB_SECONDS:g} s\n{output}\n{errors}")
    assert job.returncode == 0, f"{name} on {ranks} ranks ended with {job.returncode}\n{output}\n{errors}"
    assert "mpdist:" not in errors  # a failed Work, a forgotten message, an unclosed communicator
    return output, errors


@pytest.mark.parametrize("name", NAMES)
def test_example_prints_what_its_docstring_says(name: str) -> None:
    for run in documented(name):
        output, _ = run_job(name, run.ranks, *run.options)
        assert doctest.OutputChecker().check_output(run.output.rstrip() + "\n", output, doctest.ELLIPSIS), output


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_example_runs_on_any_number_of_ranks(name: str, ranks: int) -> None:
    output, _ = run_job(name, ranks)
    assert output.strip()


@pytest.mark.parametrize("name", NAMES)
def test_example_is_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 80


PROGRAMS = [
    block for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if "mpdist.run(" in block
]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_programs_of_the_readme_run_as_printed(number: int, ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text(PROGRAMS[number])
    output, errors = run_job(str(script), ranks)
    assert sorted(line[: len("rank 0")] for line in output.splitlines()) == [f"rank {rank}" for rank in range(ranks)]
    assert errors == ""


def test_readme_shows_a_first_program_and_an_event_loop() -> None:
    assert ["TaskGroup" in program for program in PROGRAMS] == [False, True]


def test_what_the_docs_show_of_an_example_stands_there() -> None:
    text = (README.parent / "docs" / "gpu.md").read_text()
    blocks = re.findall(r"\(\.\./examples/(\w+\.py)\)\):\n\n```python\n(.*?)```", text, re.DOTALL)
    assert [name for name, _ in blocks] == ["gpu_all_reduce.py", "train_digits_ddp.py"]
    for name, block in blocks:
        example = (EXAMPLES / name).read_text()
        assert [line for line in block.splitlines() if line.strip() not in example] == [], name


def accuracy_in(line: str) -> float:
    match = re.search(r"test accuracy (\d+\.\d) %", line)
    assert match, line
    return float(match[1])


@cache
def digits_accuracy(ranks: int, *options: str) -> float:
    """Final test accuracy in percent."""
    output, _ = run_job("train_digits.py", ranks, *options)
    *epochs, summary = output.splitlines()
    assert [line.partition(":")[0] for line in epochs] == [f"epoch {epoch:2}" for epoch in range(1, 21)]
    assert f"ranks: {ranks}" in summary
    assert accuracy_in(summary) == accuracy_in(epochs[-1])
    return accuracy_in(summary)


@pytest.mark.parametrize("options", [(), pytest.param(("--torch",), marks=has_torch)], ids=["numpy", "torch"])
def test_digits_are_learned_on_2_ranks(options: tuple[str, ...]) -> None:
    accuracy = digits_accuracy(2, *options)
    assert accuracy >= 95
    (promised,) = [run for run in documented("train_digits.py") if ("--torch" in run.options) == bool(options)]
    assert abs(accuracy - accuracy_in(promised.output.splitlines()[-1])) <= NOISE


@pytest.mark.parametrize("ranks", [2, 4])
def test_digits_accuracy_does_not_depend_on_the_number_of_ranks(ranks: int) -> None:
    # The last batch of an epoch has 3 pictures: the ranks' shares differ, and one of 4 ranks has none.
    assert abs(digits_accuracy(ranks) - digits_accuracy(1)) <= NOISE


@pytest.mark.any_mpi
def test_digits_progress_bar_replaces_the_lines_of_epochs() -> None:
    output, errors = run_job("train_digits.py", 2, "--progress", "--epochs", "2")
    (summary,) = output.splitlines()
    assert "after 2 epochs" in summary
    assert "| 2/2 [" in errors


@pytest.mark.any_mpi
@has_torch
def test_text_names_a_mistake_before_it_trains() -> None:
    mistakes = {
        "--width 30": "--width a multiple of 4",
        "--steps 0": "all numbers must be at least 1",
        "--curve /gone/x.png": "--curve /gone/x.png: there is no folder /gone",
    }
    ends = ends_of([("", "train_text.py", options.split()) for options in mistakes])
    for text, end in zip(mistakes.values(), ends, strict=True):
        assert end.status == 2
        assert text in end.errors.splitlines()[-1]


GPU_NAMES = sorted(path.name for path in EXAMPLES.glob("gpu_*.py"))
ON_GPU = ("train_digits.py", "train_digits_ddp.py", "torch_backend.py")
SIMULATED = (str(Path(__file__).parent / "torch_support" / "on_simulated_gpu.py"),)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_NAMES)
def test_gpu_example_prints_what_its_docstring_says(name: str) -> None:
    for run in documented(name):
        output, _ = run_job(name, run.ranks, *run.options)
        assert doctest.OutputChecker().check_output(run.output.rstrip() + "\n", output, doctest.ELLIPSIS), output


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_training_on_a_gpu_learns_as_on_the_cpu(name: str) -> None:
    output, _ = run_job(name, 2, "--device", "cuda")
    assert accuracy_in(output.splitlines()[-1]) >= 90


@pytest.mark.any_mpi
@pytest.mark.parametrize("name", GPU_NAMES)
def test_gpu_example_prints_on_a_simulated_gpu_what_its_docstring_says(name: str) -> None:
    for run in documented(name):
        output, _ = run_job(name, run.ranks, *run.options, on=SIMULATED)
        assert doctest.OutputChecker().check_output(run.output.rstrip() + "\n", output, doctest.ELLIPSIS), output


@pytest.mark.any_mpi
@pytest.mark.skipif(GPU_DEVICE.exists(), reason="torch has one kind of GPU in a process")
@pytest.mark.parametrize("name", [pytest.param(each, marks=has_torch) for each in ON_GPU])
def test_training_on_a_simulated_gpu_learns(name: str) -> None:
    output, _ = run_job(name, 2, on=SIMULATED)
    assert accuracy_in(output.splitlines()[-1]) >= 75  # after 2 epochs


NO_CUPY = "sys.modules['cupy'] = None"
NO_GPU = """
from types import ModuleType, SimpleNamespace as N
def count(): raise RuntimeError('cudaErrorNoDevice: no CUDA-capable device is detected')
cupy = ModuleType('cupy'); cupy.cuda = N(runtime=N(getDeviceCount=count)); sys.modules['cupy'] = cupy
"""


@pytest.mark.any_mpi
@pytest.mark.parametrize(("preparation", "text"), [(NO_CUPY, "mpdist[cuda13]"), (NO_GPU, "NVIDIA GPU")])
@pytest.mark.parametrize("names", [GPU_NAMES, pytest.param(ON_GPU, marks=has_torch)], ids=["CuPy", "torch"])
def test_gpu_example_says_what_is_missing(names: Sequence[str], preparation: str, text: str) -> None:
    options = ["--device", "cuda"] if names is ON_GPU else []
    for name, end in zip(names, ends_of([(preparation, name, options) for name in names]), strict=True):
        assert end.status == 1
        (line,) = end.errors.splitlines()
        assert line.startswith(name)
        assert text in line


@pytest.mark.any_mpi
@pytest.mark.parametrize("missing", ["sklearn", "threadpoolctl", "tqdm"])
def test_digits_names_the_extra_that_is_missing(missing: str) -> None:
    (end,) = ends_of([(f"sys.modules[{missing!r}] = None", "train_digits.py", [])])
    assert end.status == 1
    (line,) = end.errors.splitlines()
    assert missing in line
    assert "pip install 'mpdist[examples]'" in line


class End(NamedTuple):
    """How a program ended, and what it wrote to stderr."""

    status: int
    errors: str


def ends_of(programs: Sequence[tuple[str, str, list[str]]]) -> list[End]:
    """How examples end that do not come to start MPI: all in one process, for imports take longer than they do.

    Args:
        programs: for each some lines to run before, its name and its options.
    """
    text = f"""
        import contextlib, io, json, runpy, sys
        ends = []
        for lines, name, options in {programs!r}:
            exec(lines)
            sys.argv = [name, *options]
            with contextlib.redirect_stderr(io.StringIO()) as errors:
                try:
                    runpy.run_path({str(EXAMPLES)!r} + "/" + name, run_name="__main__")
                    status = 0
                except SystemExit as end:
                    status = end.code
                    if isinstance(status, str):
                        print(status, file=sys.stderr)
                        status = 1
            ends.append((status, errors.getvalue()))
        assert "mpi4py.MPI" not in sys.modules
        print(json.dumps(ends))
    """
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", textwrap.dedent(text)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=JOB_SECONDS, env=environ)
    assert done.returncode == 0, done.stderr
    return [End(*end) for end in json.loads(done.stdout)]
