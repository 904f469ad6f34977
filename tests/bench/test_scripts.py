"""What the scripts in bench/ say of a mistake, before they start anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("script", "words", "text"),
    [
        ("core.py", ["--rounds", "0"], "'0' is not a number from 1 on"),
        ("core.py", ["--only", "typo"], "--only 'typo' is in none of: ping-pong 8 B"),
        ("core.py", ["--json", "/gone/x"], "--json /gone/x can't be written: No such file"),
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
