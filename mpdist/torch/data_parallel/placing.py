"""Placing: on which device a module is, and its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.utils import _to_kwargs

from mpdist.errors import UsageError
from mpdist.memory.buffer import TORCH_DEVICES

Named = Sequence[tuple[str, Tensor]]


def device_of(named: Named) -> torch.device:
    """The one device of all tensors.

    Raises:
        UsageError: there are several, or it is none whose tensors are communicated.
    """
    devices: dict[torch.device, str] = {}
    for name, tensor in named:
        devices.setdefault(tensor.device, name)
    if len(devices) > 1:
        listed = "; ".join(f"{name} is on {device}" for device, name in devices.items())
        raise UsageError(f"the module's parameters are on several devices: {listed}; move it to one")
    device = next(iter(devices))
    if device.type != "cpu" and device.type not in TORCH_DEVICES:
        raise UsageError(
            f"the module is on {device}; DistributedDataParallel averages on cpu and cuda: module.to('cpu')"
        )
    return device


def check_ids(device: torch.device, device_ids: Any, output_device: Any) -> list[int] | None:
    """What torch's class has as `device_ids`, where it is given.

    Raises:
        UsageError: it is not the device of the module.
    """
    if device.type == "cpu":
        if device_ids or output_device is not None:
            raise UsageError(f"device_ids={device_ids!r}, output_device={output_device!r}: leave them out on the CPU")
        return None
    given = [*(device_ids or ()), *([] if output_device is None else [output_device])]
    if len(device_ids or ()) > 1 or any(_as_device(each, device) != device for each in given):
        raise UsageError(
            f"device_ids={device_ids!r}, output_device={output_device!r}: the module is on {device}, and a rank has "
            "one device; leave them out, or give that one"
        )
    return [device.index] if device_ids else None


def _as_device(given: Any, of: torch.device) -> torch.device:
    return torch.device(of.type, given) if isinstance(given, int) else torch.device(given)


def brought(inputs: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> tuple[Any, Any]:
    """The arguments of a forward, whose tensors are moved to the device, in whatever containers they are."""
    moved_inputs, moved_kwargs = _to_kwargs(inputs, kwargs, device, False)
    return moved_inputs[0], moved_kwargs[0]
