"""Programs for a GPU, run on a simulated one: `python tests/torch_support/on_simulated_gpu.py SCRIPT [OPTION...]`.

The examples and the benchmark of GPUs; each rank runs this.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from memory.simulated import simulated  # noqa: E402  # beside this script
from memory.simulated_cupy import module_of  # noqa: E402

import mpdist  # noqa: E402

SECONDS = 0.00002


def with_cupy(script: str) -> None:
    """One that uses CuPy; its kernels are slow here, so that few suffice."""
    with simulated(seconds=SECONDS) as gpu:
        sys.modules["cupy"] = module_of(lambda: gpu)
        module: Any = loaded(script)
        module.KERNELS = 2
        mpdist.run(module.main)


def with_torch(script: str, run: Callable[[ModuleType, str], None]) -> None:
    """One that uses torch, and CuPy perhaps."""
    from torch_support import simulated_torch

    simulated_torch.install()
    with simulated_torch.opened(mpdist.init(), seconds=SECONDS) as gpu:
        sys.modules["cupy"] = module_of(lambda: gpu)
        run(loaded(script), simulated_torch.NAME)


def loaded(script: str) -> ModuleType:
    name = Path(script).stem
    spec = importlib.util.spec_from_file_location(name, script)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def training(module: Any, device: str) -> None:
    module.EPOCHS = 2
    module.main(device)


def own_training(module: Any, device: str) -> None:
    module.my_gpu = lambda world: device
    sys.argv[1:] = ["--epochs", "2", "--torch"]
    options = module.parse_options()
    options.device = "cuda"
    mpdist.run(module.main, options)


def benchmark(module: Any, device: str) -> None:
    """Small arrays, which nevertheless go the way of large ones; gloo takes no tensors of the simulated GPU."""
    module.MIB = 16 * 1024
    module.TRANSFORMERS = dict.fromkeys(module.TRANSFORMERS, (1, 64, 16, 2))
    bench = module.Bench(argparse.Namespace(rounds=1, only=""), device)
    bench.gloo = bench.dist.group.WORLD
    module.WARM_UP = 1
    results = bench.run()
    if bench.world.rank == 0:
        module.publish(results, None)
    bench.dist.destroy_process_group()


PROGRAMS: dict[str, Callable[[str], None]] = {
    "gpu_all_reduce.py": with_cupy,
    "gpu_overlap.py": with_cupy,
    "train_digits.py": lambda script: with_torch(script, own_training),
    "train_digits_ddp.py": lambda script: with_torch(script, training),
    "torch_backend.py": lambda script: with_torch(script, training),
    "gpu.py": lambda script: with_torch(script, benchmark),
}

if __name__ == "__main__":
    PROGRAMS[Path(sys.argv[1]).name](sys.argv[1])
