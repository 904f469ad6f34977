"""Devices: where tensors are, and the streams in which a device computes.

A device has a module of torch's, `torch.cuda` for CUDA, with its streams and events. Nothing here costs anything where
tensors are on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpdist.memory.buffer import TORCH_DEVICES
from mpdist.torch.errors import WrongCall


def streams_of(device: torch.device) -> Any:
    """torch's module for a device."""
    return torch.get_device_module(device)


def is_served(tensor: Tensor) -> bool:
    """Whether its memory is one that we communicate."""
    return tensor.is_cpu or tensor.device.type in TORCH_DEVICES


def tensor_of(array: Any) -> Tensor:
    """The memory of another library's array on a device."""
    return torch.utils.dlpack.from_dlpack(array)


def check_together(tensors: Sequence[Tensor]) -> None:
    """Raise where tensors of one operation are in several places.

    Raises:
        WrongCall: they are.
    """
    if all(tensor.is_cpu for tensor in tensors):
        return
    devices = list(dict.fromkeys(str(tensor.device) for tensor in tensors))
    if len(devices) > 1:
        raise WrongCall(
            f"got tensors on {' and '.join(devices)}; all tensors of an operation must be on the same device"
        )


def devices_of(tensors: Sequence[Tensor]) -> list[int | str | torch.device]:
    """What a Future of these tensors must be told: the devices besides the CPU."""
    return list({tensor.device: None for tensor in tensors if not tensor.is_cpu})
