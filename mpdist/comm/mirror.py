"""Mirror: host memory that stands for an array on a device while an operation runs.

Where MPI gets the array itself, a Mirror has that one's address, and is never looked at.
To the operation it is a Buffer like any other, and the `like` of results that the
caller did not bring: what is allocated like it is a Mirror too, of a new array on
the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from mpdist.memory import HOST, Buffer, allocate_like, as_buffer

if TYPE_CHECKING:
    from mpdist.comm.staging import Staging
    from mpdist.memory import Element
    from mpdist.memory.elements import Array
    from mpdist.memory.pinned import Loan


class Mirror(Buffer):
    """Host memory in the place of a device's.

    Attributes:
        original: the array on the device.
        whole: the Mirror of which this is a part; itself, if of none.
        loan: keeps the host memory.
    """

    __slots__ = ("_staging", "_whole", "loan", "original")

    loan: Loan

    def __init__(
        self,
        staging: Staging,
        original: object,
        element: Element,
        shape: Sequence[int],
        octets: Array | None,
        readonly: bool = False,
        whole: Mirror | None = None,
        at: int | None = None,
    ) -> None:
        """Take host memory (uint8), or where the array itself is."""
        count = prod(shape)
        super().__init__(octets, count, count * element.itemsize, element, HOST, readonly, None, at)
        self.shape = tuple(shape)
        self.original: Any = original
        self._whole = whole
        self._staging = staging

    @property
    def whole(self) -> Mirror:
        return self if self._whole is None else self._whole

    @property
    def owner(self) -> Mirror:  # not kept: it would hold itself
        return self.whole

    @owner.setter
    def owner(self, _: object) -> None:
        pass

    def land(self, loan: Loan) -> None:
        """Stand for the array by this host memory."""
        self.loan = loan
        self.exporter = loan.bytes
        self._address = None

    def part(self, start: int, end: int) -> Mirror:
        """The elements from `start` to `end`; as a result it stands for the whole."""
        unit = self.element.itemsize
        octets = None if self.octets is None else self.octets[start * unit : end * unit]
        at = self.address + start * unit if octets is None else None
        shape = (end - start,)
        return Mirror(self._staging, self.original, self.element, shape, octets, self.readonly, self.whole, at)

    @property
    def octets(self) -> Any:
        """The host memory (uint8), if it has some."""
        return self.exporter

    # What results are made of, as NumPy and torch have it.

    def new_empty(self, shape: Sequence[int]) -> Mirror:
        """The Mirror of a new array of this one's library and type."""
        original = allocate_like(self.original, tuple(shape))
        return self._staging.mirror(as_buffer(original), is_result=True)

    def __getitem__(self, span: slice) -> View:
        return View(self.original[span])


class View:
    """A part of a new result, which is copied to the device as a whole."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def reshape(self, shape: Sequence[int]) -> View:
        return View(self.original.reshape(tuple(shape)))
