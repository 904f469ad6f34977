"""PyTorch's own distributed suite over the backend: every test that gloo passes on a CPU passes here.

Which those are stands in passed_by_gloo.json, for one version of torch; `python tests/torch_support/census.py` makes it
anew. A selection always runs, all of it with --large.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch_support import suite

import mpdist

pytest.importorskip("expecttest", reason="PyTorch's suite needs expecttest")

# It sets variables of the environment, and some of its tests leave theirs.
pytestmark = pytest.mark.apart

PASSED: dict[str, list[str]] = json.loads((Path(suite.__file__).with_name("passed_by_gloo.json")).read_text())

ALWAYS = (
    "test_all_gather_object_default_pg",
    "test_all_reduce_sum_async",
    "test_all_to_all_single_unequal_split",
    "test_barrier_group",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_static_graph_nested_types",
    "test_DistributedDataParallelCPU",
    "test_irecv",
    "test_monitored_barrier_wait_all_ranks",
    "test_send_recv_any_source_torch_profiler",
)

is_their_torch = pytest.mark.skipif(
    not torch.__version__.startswith(f"{PASSED['torch']}."), reason=f"the list is of torch {PASSED['torch']}"
)


@is_their_torch
@pytest.mark.ranks(3)
@pytest.mark.limit(150)
@pytest.mark.parametrize("name", [each for each in PASSED["3"] if each in ALWAYS])
def test_selected(world: mpdist.Communicator, name: str) -> None:
    suite.run(name, "mpdist")


@is_their_torch
@pytest.mark.ranks(3)
@pytest.mark.large
@pytest.mark.limit(200)
@pytest.mark.parametrize("name", [each for each in PASSED["3"] if each not in ALWAYS])
def test_on_3_ranks(world: mpdist.Communicator, name: str) -> None:
    suite.run(name, "mpdist")


@is_their_torch
@pytest.mark.ranks(4)
@pytest.mark.large
@pytest.mark.limit(200)
@pytest.mark.parametrize("name", PASSED["4"])
def test_on_4_ranks(world: mpdist.Communicator, name: str) -> None:
    suite.run(name, "mpdist")
