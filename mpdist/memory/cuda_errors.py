"""CUDA errors: what CuPy raises while a GPU is used is DeviceFailed."""

from __future__ import annotations

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
            raise DeviceFailed(f"work on the GPU failed: {type(error).__name__}: {error}") from error


class Present(failures):
    """The same, while a device is the present one; entered from any thread, and again while it is."""

    __slots__ = ("_device",)

    def __init__(self, device: Any, *kinds: type[Exception]) -> None:
        """Take CuPy's device."""
        super().__init__(*kinds)
        self._device = device

    def __enter__(self) -> None:
        with failures(*self._kinds):
            self._device.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with failures(*self._kinds):
            self._device.__exit__(kind, error, at)
        super().__exit__(kind, error, at)
