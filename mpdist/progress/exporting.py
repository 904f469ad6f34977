"""Exporting: what this process has exported on each device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpdist.memory.accelerator import accelerator_of
from mpdist.memory.exports import Exports

if TYPE_CHECKING:
    from mpdist.memory import Device
    from mpdist.progress.engine import Engine


def exports_of(engine: Engine, device: Device) -> Exports:
    """A device's.

    Raises:
        Unavailable: the library for such arrays is missing.
    """
    known = engine.exports.get(device)
    if known is None:
        known = engine.exports.setdefault(device, Exports(accelerator_of(device)))  # another thread may be here
    return known
