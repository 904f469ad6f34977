"""Mirror: host memory that stands for an array on a device while an operation runs.

To the operation it is a Buffer like any other, and the `like` of results that the
caller did not bring: what is allocated like it is a Mirror too, of a new array on
the device. Where MPI gets the array itself, a Mirror stands at that one's address, and is
never looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from mpdist.memory import HOST, Buffer, allocate_like, as_buffer

if TYPE_CHECKING:
    from mpdist.comm.staging import Staging
    from mpdist.memory.elements import Array
    from mpdist.memory.pinned import Loan


class Mirror(Buffer):
    """Host memory in the place of a device's.

    Attributes:
        there: the array on the device.
        staging: the operation's.
        whole: the Mirror of which this is a part; itself, if of none.
    """

    __slots__ = ("_is_given", "_loan", "_octets", "_whole", "staging", "there")

    def __init__(
        self,
        staging: Staging,
        there: Buffer,
        shape: Sequence[int] | None = None,
        whole: Mirror | None = None,
        octets: Array | None = None,
        at: int | None = None,
    ) -> None:
        """Take the array on the device, and host memory (uint8), or where on the device MPI is to find it.

        With a shape it stands for a part of the array.
        """
        element = there.element
        shape = there.shape if shape is None else shape
        count = prod(shape)
        self._octets: Any = octets
        self._loan: Loan | None = None
        self._is_given = at is not None
        super().__init__(None, count, count * element.itemsize, element, HOST, there.readonly, None, at)
        self.shape = tuple(shape)
        self.there = there
        self._whole = whole
        self.staging = staging

    @property
    def original(self) -> Any:
        """The array as the caller knows it."""
        return self.there.owner

    @property
    def whole(self) -> Mirror:
        return self if self._whole is None else self._whole

    @property
    def owner(self) -> Mirror:  # not kept: it would hold itself
        return self.whole

    @owner.setter
    def owner(self, _: object) -> None:
        pass

    def give(self) -> None:
        """From now on it has the address of the array itself, for MPI alone."""
        self._is_given = True
        self._address = self.there.address

    def part(self, start: int, end: int) -> Mirror:
        """The elements from `start` to `end`; as a result it stands for the whole."""
        unit = self.element.itemsize
        octets = None if self._is_given else self.octets[start * unit : end * unit]
        at = self.address + start * unit if self._is_given else None
        return Mirror(self.staging, self.there, (end - start,), self.whole, octets, at)

    @property
    def octets(self) -> Any:
        """The host memory (uint8), lent when it is first needed: an array may go another way."""
        if self._octets is None:
            self._loan = self.staging.pinned.lend(self.nbytes)
            self._octets = self._loan.bytes
        return self._octets

    @property
    def exporter(self) -> Any:
        return None if self._is_given else self.octets

    @exporter.setter
    def exporter(self, _: object) -> None:
        pass

    @property
    def place(self) -> int:
        """The array's own: two Mirrors overlap where their arrays do."""
        return self.there.address

    # What results are made of, as NumPy and torch have it.

    def new_empty(self, shape: Sequence[int]) -> Mirror:
        """The Mirror of a new array of this one's library and type."""
        original = allocate_like(self.original, tuple(shape))
        return self.staging.mirror(as_buffer(original), is_result=True)

    def __getitem__(self, span: slice) -> View:
        return View(self.original[span])


class View:
    """A part of a new result, which is copied to the device as a whole."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def reshape(self, shape: Sequence[int]) -> View:
        return View(self.original.reshape(tuple(shape)))
