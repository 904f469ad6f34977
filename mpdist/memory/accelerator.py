"""Accelerator: the little that mpdist asks of a device whose memory neither MPI nor NumPy can touch.

Copies are queued, and go on by themselves; a Mark tells when all that was queued
before it is done, see mark.py. Both directions have a queue of their own, so that one half of an
array travels out while the other comes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from mpdist.errors import DeviceFailed, Unavailable
from mpdist.memory.cuda import Cuda

if TYPE_CHECKING:
    from mpdist.memory.buffer import Buffer, Device
    from mpdist.memory.elements import Array
    from mpdist.memory.mark import Mark
    from mpdist.memory.sharing import Sharing


class Accelerator(Protocol):
    """One device."""

    def follow(self, x: Buffer) -> None:
        """Let later copies wait for what the program has queued so far for this memory, in its own stream.

        Raises:
            UsageError: the program records that stream into a graph, instead of running it.
        """

    def ready(self, x: Buffer) -> Mark:
        """When all is over that the program has queued so far for this memory, OVER if it is; raises as follow does."""

    def attend(self) -> None:
        """Before calls of an MPI that is given this memory: it looks for the GPU that this thread uses."""

    def describe(self) -> str:
        """Its name, and the version of its driver."""

    def identity(self) -> int:
        """A number that only this device has, in all processes of the node (63 bits)."""

    def copy_out(self, source: Buffer, start: int, target: Array) -> Mark:
        """Queue a copy of the bytes from `start` on into host memory (uint8), which may be pinned."""

    def copy_in(self, source: Array, target: Buffer, start: int) -> Mark:
        """Queue a copy of host memory (uint8) over the bytes from `start` on."""

    def empty(self, shape: Sequence[int], dtype: object) -> object:
        """A new array there, not initialised."""

    def pin(self, memory: Array) -> bool:
        """Let copies from and to this host memory go by themselves; False if it cannot be done: they work, slower."""

    def unpin(self, memory: Array) -> None:
        """Before pinned memory is given back."""

    def sharing(self) -> Sharing:
        """The device as several processes share it."""


_known: dict[Device, Accelerator] = {}


def accelerator_of(device: Device) -> Accelerator:
    """The accelerator with this memory.

    Raises:
        Unavailable: the library that it needs is not installed, or does not work here, or there is no such device.
    """
    known = _known.get(device)
    if known is None:
        known = _known.setdefault(device, _opened(device))  # all threads are to have the same streams
    return known


def _opened(device: Device) -> Accelerator:
    try:
        return Cuda(device.index)
    except ImportError as error:
        raise Unavailable(
            f"an array on {device} is copied by CuPy, which cannot be loaded ({error}): install the extra for your "
            "driver, pip install 'mpdist[cuda13]' or 'mpdist[cuda12]', or copy the array to the host first"
        ) from error
    except DeviceFailed as error:
        raise Unavailable(
            f"{device} cannot be used in this process ({error}): its GPUs are counted from cuda:0 on, and are those of "
            "CUDA_VISIBLE_DEVICES where that is set"
        ) from error
