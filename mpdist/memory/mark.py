"""Mark: a place in a queue of work on a device, which tells when all before it is done."""

from __future__ import annotations

from typing import Final, Protocol


class Mark(Protocol):
    """A place in a queue of copies; a request, as programs of collectives yield them."""

    def Test(self) -> bool:
        """Whether all before it is done.

        Raises:
            DeviceFailed: the device has failed.
        """

    def wait(self) -> None:
        """Block until it is."""


class Over:
    """The mark of what is over already."""

    def Test(self) -> bool:
        return True

    def wait(self) -> None:
        pass


OVER: Final = Over()
