"""CUDA errors: what CuPy raises while a GPU is used is DeviceFailed."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from mpdist.errors import DeviceFailed


class failures:
    """Errors of these kinds as ours: those of another library may come from a signal's handler."""

    __slots__ = ("_kinds",)

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, self._kinds):
            raise _failed(error) from error


class Present(failures):
    """The same, while a device is the present one; entered from any thread, and again while it is.

    As CuPy's Device does it, in a quarter of the time: most of what is asked of a GPU takes less than 1 us.
    """

    __slots__ = ("_index", "_runtime")

    def __init__(self, runtime: Any, index: int, *kinds: type[Exception]) -> None:
        """Take CuPy's runtime, and the number of the device."""
        super().__init__(*kinds)
        self._runtime = runtime
        self._index = index

    def __enter__(self) -> None:
        try:
            before = self._runtime.getDevice()
            if before != self._index:
                self._runtime.setDevice(self._index)
        except self._kinds as error:
            raise _failed(error) from error
        _before.devices.append(before)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        before = _before.devices.pop()
        if before != self._index:
            with failures(*self._kinds):
                self._runtime.setDevice(before)
        if error is not None:
            super().__exit__(kind, error, at)


class _Before(threading.local):
    """The devices that were present before a thread took others, the last one at the end."""

    def __init__(self) -> None:
        self.devices: list[int] = []


_before = _Before()


def _failed(error: BaseException) -> DeviceFailed:
    return DeviceFailed(f"work on the GPU failed: {type(error).__name__}: {error}")
