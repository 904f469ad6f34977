"""bench/gpu.py: that it runs, on a simulated GPU, and what it says where there is none."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks.launch import mpiexec
from ranks.plugin import GPU_DEVICE

pytestmark = [
    pytest.mark.job,
    pytest.mark.any_mpi,
    pytest.mark.limit(180),
    pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed"),
]

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "bench" / "gpu.py")
SIMULATED = str(ROOT / "tests" / "torch_support" / "on_simulated_gpu.py")
TARGETS = [">= 0.85", "<= 0.1", "<= 0.4", "<= 0.15", "<= 0.08", "<= 0.6", "<= 0.6", "<= 0.6", "<= 1.3"]


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env=environ)


@pytest.mark.skipif(GPU_DEVICE.exists(), reason="torch has one kind of GPU in a process")
def test_all_cases_run_and_print_their_targets() -> None:
    done = run(*mpiexec(2), sys.executable, SIMULATED, SCRIPT)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"[<>]= [\d.]+", done.stdout) == TARGETS


@pytest.mark.parametrize(
    ("preparation", "text"),
    [
        ("sys.modules['cupy'] = None", "mpdist[cuda13]"),
        ("cupy = ModuleType('cupy'); cupy.cuda = N(runtime=N(getDeviceCount=lambda: 0)); sys.modules['cupy'] = cupy",
         "needs an NVIDIA GPU"),
    ],
)  # fmt: skip
def test_without_a_gpu_it_says_what_it_needs(preparation: str, text: str) -> None:
    program = (
        f"import runpy, sys\nfrom types import ModuleType, SimpleNamespace as N\n{preparation}\nsys.argv[1:] = []\n"
    )
    program += f"runpy.run_path({SCRIPT!r}, run_name='__main__')"
    done = run(sys.executable, "-c", program, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert text in line
    assert line.startswith("bench/gpu.py")
