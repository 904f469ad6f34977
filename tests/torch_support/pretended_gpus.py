"""GPUs that are the CPU: PyTorch's suite asks for a GPU in most of its DDP tests, and none is needed to run them.

Whatever is to be on `cuda:n`, or on device number n, stays on the CPU. For tests of communication only: what is
compared are two backends under the same pretence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

COUNT = 8


class OnCpu(TorchFunctionMode):
    """Rewrites devices in all calls of torch."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "cuda" and args and isinstance(args[0], torch.Tensor):
            return args[0]
        if "device" in kwargs:
            kwargs = {**kwargs, "device": on_cpu(kwargs["device"])}
        if name == "to" and len(args) > 1:
            args = (args[0], on_cpu(args[1]), *args[2:])
        return func(*args, **kwargs)


def on_cpu(device: Any) -> Any:
    """The device that is used in its place; anything else stays."""
    is_number = isinstance(device, int) and not isinstance(device, bool)
    if is_number or (isinstance(device, str | torch.device) and str(device).startswith("cuda")):
        return torch.device("cpu")
    return device


class Pretending(ModuleType):
    """torch as the suite's decorators see it."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = SimpleNamespace(
            **{name: getattr(torch.cuda, name) for name in dir(torch.cuda) if not name.startswith("__")}
            | {"is_available": lambda: True, "device_count": lambda: COUNT}
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def pretended_gpus() -> Iterator[None]:
    """Let the suite believe that there are GPUs."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.testing._internal import common_distributed

    init, to = DistributedDataParallel.__init__, torch.nn.Module.to

    def without_devices(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **rest: Any) -> None:
        init(self, module, **rest)

    def to_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        return to(self, *map(on_cpu, args), **{name: on_cpu(value) for name, value in kwargs.items()})

    nothing = {name: lambda *_, **__: None for name in ("set_device", "synchronize")}
    with (
        mock.patch.object(common_distributed, "torch", Pretending()),
        mock.patch.object(common_distributed, "TEST_CUDA", True),
        mock.patch.multiple(torch.cuda, current_device=lambda: 0, **nothing),
        mock.patch.object(DistributedDataParallel, "__init__", without_devices),
        mock.patch.object(torch.nn.Module, "to", to_cpu),
        OnCpu(),
    ):
        yield
