"""What bench/model.py says where it cannot go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MODEL = Path(__file__).parents[2] / "bench" / "model.py"


def said(*arguments: str) -> str:
    command = [sys.executable, str(MODEL), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr


@pytest.mark.parametrize("op", ["all_reduce", "ping_pong"])
def test_a_file_without_messages_of_two_sizes_is_told(tmp_path: Path, op: str) -> None:
    line = '{"median": 1e-6, "p95": 1e-6, "algorithm_bandwidth": 1, "bus_bandwidth": 1, "rounds": 7, "repetitions": 9}'
    case = f'{{"op": "{op}", "nbytes": 8, "ranks": 2, "nodes": 1, "lines": {{"raw": {line}}}, "machine": {{}}}}'
    (tmp_path / "cases.jsonl").write_text(case + "\n")
    assert said(str(tmp_path / "cases.jsonl")).startswith("no ping_pong of 2 ranks on one node, in two sizes")


def test_a_node_without_ranks_is_refused() -> None:
    assert "--local is 0; a node has at least 1 rank" in said("--local", "0")
