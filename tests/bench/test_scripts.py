"""What the scripts in bench/ say of a mistake, before they start anything."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


has_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")


@pytest.mark.parametrize(
    ("script", "words", "text"),
    [
        ("core.py", ["--rounds", "0"], "'0' is not a number from 1 on"),
        ("core.py", ["--only", "typo"], "--only 'typo' is in none of: ping-pong 8 B"),
        ("core.py", ["--json", "/gone/x"], "--json /gone/x can't be written: No such file"),
        ("collectives.py", ["--seconds", "0"], "'0' is not a number of seconds above 0"),
        ("collectives.py", ["--seconds", "nan"], "'nan' is not a number of seconds above 0"),
        ("collectives.py", ["--only", "typo"], "--only 'typo' is in none of: all_reduce 8 B / raw blocking; "),
        ("collectives.py", ["--json", "/gone/x"], "--json /gone/x can't be written: No such file"),
        ("floors.py", ["--seconds", "-1"], "'-1' is not a number of seconds above 0"),
        ("floors.py", ["--only", "gloo"], "--only 'gloo' is in none of: all_reduce 8 B; "),
        ("floors.py", ["--json", "/gone/x"], "--json /gone/x can't be written: No such file"),
        ("gpu.py", ["--rounds", "0"], "'0' is not a number from 1 on"),
        ("gpu.py", ["--only", "typo"], "--only 'typo' is in none of: IPC send 256 MiB"),
        ("gpu.py", ["--json", "/gone/x"], "--json /gone/x can't be written: No such file"),
        pytest.param("alone.py", ["--launches", "0"], "'0' is not a number from 1 on", marks=has_torch),
        pytest.param("alone.py", ["--steps", "0"], "'0' is not a number from 1 on", marks=has_torch),
        pytest.param("alone.py", ["--json", "/gone/x"], "--json /gone/x can't be written", marks=has_torch),
        ("caches.py", ["--rounds", "0"], "'0' is not a number from 1 on"),
        ("folding.py", ["--rounds", "0"], "'0' is not a number from 1 on"),
        ("model.py", ["--step", "0"], "'0' is not a number of seconds above 0"),
        ("parts.py", ["--rounds", "0"], "'0' is not a number from 1 on"),
        ("ways.py", ["--rounds", "0"], "'0' is not a number from 1 on"),
        ("ways.py", ["--ops", "all_reduce,typo"], "--ops 'all_reduce,typo': 'typo' is none of: all_reduce, "),
        ("ways.py", ["--json", "/gone/x"], "--json /gone/x can't be written: No such file"),
        ("report.py", [], "python bench/report.py MPICH.jsonl OPENMPI.jsonl"),
    ],
)
def test_mistake_is_told(script: str, words: list[str], text: str) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "bench" / script), *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert text in done.stderr
    assert "Traceback" not in done.stderr
