"""Devices of torch for tests: a simulated one everywhere, and CUDA where there is one.

On both, tensors get their values late, in the current stream: whoever does not wait for that communicates what was
there before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from comm.devices import SPIN, SPIN_TICKS
from ranks.plugin import GPU_DEVICE
from torch import Tensor
from torch_support import simulated_torch, values

import mpdist

# torch has one accelerator in a process: with the simulated one there is no other.
HAS_GPU = GPU_DEVICE.exists()
DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu)] if HAS_GPU else [simulated_torch.NAME]


def install() -> None:
    """Make the simulated device known where it is tested."""
    if not HAS_GPU:
        simulated_torch.install()


def moved(module: torch.nn.Module) -> torch.nn.Module:
    """A module brought to the device."""
    return module.cuda() if HAS_GPU else simulated_torch.moved_module(module)


@contextmanager
def opened(device: str, comm: mpdist.Communicator, *, is_default: bool = True) -> Iterator[str]:
    """Tensors of `values` come late; new ones are on the device, too, where it is the default."""
    before = values.placed
    default = torch.device(device) if is_default else nullcontext()
    if device == "cuda":
        values.placed = late_on_cuda
        with default:
            yield device
        torch.cuda.synchronize()
    else:
        values.placed = simulated_torch.late
        with simulated_torch.opened(comm, seconds=0.0002), default:
            yield device
    values.placed = before


def late_on_cuda(tensor: Tensor) -> Tensor:
    """The same on the GPU, after a kernel of some milliseconds."""
    import cupy
    import numpy as np

    there = tensor.cuda()
    late = torch.zeros_like(there)
    spin: Any = cupy.RawKernel(SPIN, "spin")
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        spin((1,), (1,), (np.int64(SPIN_TICKS),))
    return late.copy_(there)
