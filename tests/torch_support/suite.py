"""PyTorch's own distributed test-suite, run in-process on ranks that mpiexec has started.

It ships in the wheel, and spawns processes itself; here its methods are called on ranks that exist. Decorators that
look at the backend's name see "gloo", so that nothing is left out that gloo has to pass; the groups are of the
backend under test.
"""

from __future__ import annotations

import os
import tempfile
import traceback
import unittest
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch_support.pretended_gpus import pretended_gpus

import mpdist


class Skipped(Exception):
    """The suite leaves this test out, with the reason."""


@cache
def suite() -> ModuleType:
    """The suite's module; it reads its environment when it is imported."""
    world = mpdist.init()
    os.environ |= {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(world.size),
        "RANK": str(world.rank),
        "INIT_METHOD": "file:///unused",
        "MASTER_ADDR": "127.0.0.1",
        "TEMP_DIR": "",
    }
    from torch.testing._internal.distributed import distributed_test

    # Decorators that look when a test runs leave out less for MPI: groups of two among three ranks are fine.
    os.environ["BACKEND"] = "mpi"
    # What is checked of events of torch's own backends is checked of ours.
    for supported in (
        distributed_test.PROFILING_SUPPORTED_BACKENDS,
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
    ):
        supported.append(dist.Backend("mpdist"))
    return distributed_test


@cache
def case() -> type:
    """The suite's class, as its own launcher would make it."""
    module = suite()
    return type("Suite", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})


def names() -> list[str]:
    """All tests of the suite."""
    return [name for name in dir(case()) if name.startswith("test_")]


def run(name: str, backend: str) -> None:
    """Run one test on this rank; all ranks call it.

    Raises:
        Skipped: the suite leaves it out.
    """
    module = suite()
    # Some tests choose by this name what to build; only one compares it with that of the group.
    module.BACKEND = backend if name == "test_get_backend" else "gloo"
    folder = _folder()
    os.environ["TEMP_DIR"] = str(folder)
    test = case()(name)
    test.rank, test.file_name = dist_rank(), str(folder / "shared")
    module.Barrier.barrier_id = 0
    seconds = module.CUSTOM_PG_TIMEOUT.get(name, 60)
    world = mpdist.init()
    dist.init_process_group(
        backend,
        init_method=test.init_method,
        world_size=world.size,
        rank=world.rank,
        timeout=timedelta(seconds=seconds),
    )
    try:
        test._barrier()
        with pretended_gpus():
            _call(module, test, name)
        test._barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _call(module: ModuleType, test: Any, name: str) -> None:
    from torch.testing._internal import common_distributed, common_utils

    common_utils.set_rng_seed()
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)  # some tests leave theirs
    dist.set_debug_level_from_env()
    reasons = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}
    try:
        getattr(test, name)()
    except unittest.SkipTest as skip:
        raise Skipped(str(skip)) from None
    except SystemExit as end:
        raise Skipped(reasons.get(end.code, f"exit status {end.code}")) from None  # type: ignore[arg-type]


def dist_rank() -> int:
    return mpdist.init().rank


def _folder() -> Path:
    """A new folder that all ranks use."""
    world = mpdist.init()
    made = tempfile.mkdtemp(prefix="suite-") if world.rank == 0 else None
    folder = Path(world.broadcast_object(made, src=0).wait())
    if world.rank == 0:
        for part in ("barrier", "test_dir", "init_dir"):
            (folder / part).mkdir()
    world.barrier().wait()
    return folder


def outcome(name: str, backend: str) -> str:
    """`passed`, `skipped: reason`, or `failed:` and the traceback, for a census."""
    try:
        run(name, backend)
    except Skipped as skip:
        return f"skipped: {skip}"
    except BaseException:
        return f"failed: {traceback.format_exc()}"
    return "passed"
