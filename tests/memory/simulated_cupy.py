"""CuPy on a simulated GPU: as much of it as the examples and benchmarks of GPUs use, with kernels that run late."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from memory.simulated import DeviceArray, Simulated


class SimulatedArray(DeviceArray):
    """A CuPy array: what asks for its values on the host waits for them."""

    def __init__(self, gpu: Simulated, values: Any) -> None:
        super().__init__(values)
        self.gpu = gpu
        self.nbytes = values.nbytes

    def now(self) -> Any:
        """The values, when all that is queued is over."""
        self.gpu.program.mark().wait()
        return self.get()

    def __getitem__(self, index: Any) -> Any:
        return SimulatedArray(self.gpu, self._values[index]) if isinstance(index, slice) else self.now()[index]

    def __eq__(self, other: object) -> Any:
        return self.now() == (other.now() if isinstance(other, SimulatedArray) else other)

    __hash__ = None  # type: ignore[assignment]

    def write(self, compute: Callable[[Any], Any]) -> None:
        """Queue a kernel that gives it these values."""

        def kernel() -> None:
            self._values[...] = compute(self._values)

        self.gpu.program.run(kernel)


class Current:
    """The only device."""

    def __init__(self, index: int) -> None:
        assert index == 0

    def use(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def module_of(current: Callable[[], Simulated]) -> ModuleType:
    """The module `cupy` on the simulated GPU that is current when it is called."""
    cupy: Any = ModuleType("cupy")

    def new(values: Any) -> SimulatedArray:
        gpu = current()
        array = SimulatedArray(gpu, gpu.empty(values.shape, values.dtype)._values)
        array.write(lambda _: values)
        return array

    def sin(x: SimulatedArray, out: SimulatedArray) -> None:
        out.write(lambda _: np.sin(x._values))

    cupy.float32 = np.float32
    cupy.full = lambda shape, value, dtype: new(np.full(shape, value, dtype))
    cupy.linspace = lambda start, stop, num: new(np.linspace(start, stop, num))
    cupy.sin = sin
    cupy.copyto = lambda target, source: target.write(lambda _: source._values)
    cupy.cuda = SimpleNamespace(
        Device=Current,
        get_current_stream=lambda: SimpleNamespace(synchronize=lambda: current().program.mark().wait()),
        runtime=SimpleNamespace(getDeviceCount=lambda: 1),
        using_allocator=nullcontext,
    )
    return cupy
