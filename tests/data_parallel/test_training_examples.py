"""Examples of training: each runs as a real job, as its users start it, and prints what its docstring says."""

from __future__ import annotations

import ast
import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks.launch import mpiexec

pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytestmark = [pytest.mark.job, pytest.mark.any_mpi, pytest.mark.limit(120)]

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
COMMAND = re.compile(r"^\$ mpirun -n (\d+) python examples/(\S+)(.*)\n((?:.+\n?)+)", re.MULTILINE)
NAMES = ["train_digits_ddp.py", "train_accumulate.py", "train_uneven.py", "train_pipeline.py", "train_text.py"]


def run_job(ranks: int, folder: Path, name: str, *options: str) -> str:
    """What a job that ends well writes to stdout."""
    launcher = mpiexec(ranks) if ranks > 1 else []
    command = [*launcher, sys.executable, str(EXAMPLES / name), *options]
    job = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert job.returncode == 0, f"{name} on {ranks} ranks\n{job.stdout}\n{job.stderr}"
    assert "Warning" not in job.stderr, job.stderr
    assert "mpdist:" not in job.stderr, job.stderr
    return job.stdout


@pytest.mark.parametrize("name", NAMES)
def test_example_prints_what_its_docstring_says(name: str, tmp_path: Path) -> None:
    text = ast.get_docstring(ast.parse((EXAMPLES / name).read_text())) or ""
    ((ranks, path, options, promised),) = COMMAND.findall(text)
    assert path == name
    output = run_job(int(ranks), tmp_path, name, *options.split())
    assert doctest.OutputChecker().check_output(promised.rstrip() + "\n", output, doctest.ELLIPSIS), output
    if "--curve" in options:
        (picture,) = tmp_path.glob("*.png")
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_examples_run_on_one_rank(tmp_path: Path) -> None:
    """One after the other in one process, for imports take longer than they do."""
    ends = {
        "train_digits_ddp.py": r"test accuracy 9\d\.\d %, ranks: 1",
        "train_accumulate.py": "40 steps of 4 micro-batches, ranks: 1, gradients were averaged 40 times",
        "train_uneven.py": "rank 0 made 5 steps of its own\nall parameters are equal",
    }
    script = tmp_path / "all.py"
    script.write_text(
        f"import runpy, sys\n"
        f"for name in {[*ends]!r}:\n"
        f"    sys.argv = [name]\n"
        f"    runpy.run_path({str(EXAMPLES)!r} + '/' + name, run_name='__main__')\n"
        f"    print('end of', name)\n"
    )
    parts = re.split(r"end of .*\n", run_job(1, tmp_path, str(script)))
    assert len(parts) == len(ends) + 1
    for end, part in zip(ends.values(), parts, strict=False):
        assert re.search(f"{end}\n$", part), parts


def test_averager_takes_torch_tensors(tmp_path: Path) -> None:
    output = run_job(2, tmp_path, "08_average_gradients.py", "--torch")
    assert output == "y = 3.00 x + 1.00 after 200 steps, ranks: 2\n"


def test_text_is_learned_and_the_number_of_ranks_does_not_matter(tmp_path: Path) -> None:
    for ranks in (1, 2):
        lines = run_job(ranks, tmp_path, "train_text.py", "--steps", "60", "--batch", "8").splitlines()
        first, last = (float(re.findall(r"loss (\S+)", line)[0]) for line in (lines[0], lines[2]))
        assert first < 4.2
        assert last < 3.1  # of one batch: with the text of another Python it may be above the first
