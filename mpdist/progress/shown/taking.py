"""Taking: how a receiver gets the data of a message from the sender's device.

From the array itself, where this process can open its memory, else from slots that
the sender fills for it. Afterwards the sender is told, whatever came of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpdist.errors import DeviceFailed
from mpdist.memory import slots
from mpdist.memory.buffer import address_of
from mpdist.progress.marks import copied, settled
from mpdist.progress.shown.ticket import FAILED, OVER, TAKEN

if TYPE_CHECKING:
    from mpdist.memory import Buffer
    from mpdist.memory.elements import Array
    from mpdist.memory.mark import Mark
    from mpdist.memory.openings import Opening
    from mpdist.progress import wire
    from mpdist.progress.collective import Steps
    from mpdist.progress.shown.showing import Showing
    from mpdist.progress.shown.ticket import Ticket

# A copy to memory that is not pinned may keep its caller until it is over: so many bytes take less than 1 ms.
HOST_BYTES = 4 * 1024 * 1024


class Shown:
    """Where the data of a message are.

    Attributes:
        place: what its sender has said.
        ticket: by which the two keep step.
        exports: what this process has opened.
    """

    _opening: Opening | None = None
    _is_over = False

    def __init__(
        self, showing: Showing, src: int, place: wire.Place, ticket: Ticket, word: memoryview, slots_handle: bytes
    ) -> None:
        """Take the word that tells of the segment, and what opens the sender's slots."""
        self.place = place
        self.ticket = ticket
        self.exports = showing.exports
        self._channel = showing.channel
        self._src = src
        self._word = word
        self._slots_handle = slots_handle

    def array(self) -> int | None:
        """Address of the data, until `drop`; None where the sender has to fill slots."""
        place = self.place
        if place.offset < 0:
            return None
        try:
            if not place.number:
                return self.exports.block(place.handle) + place.offset
            self._opening = self.exports.openings.open(place.handle, place.number, self._word)
        except DeviceFailed:
            return None
        assert self._opening.address is not None
        return self._opening.address + place.offset

    def slots(self) -> int:
        """Address of the sender's slots."""
        return self.exports.block(self._slots_handle)

    def tell(self) -> None:
        """The sender may wait for what has just been told."""
        self._channel.engine.has_advanced = True
        self._channel.ring(self._src)

    def drop(self) -> None:
        """The data are not needed any more; the sender hears of it, once: the ticket is another message's then.

        What it does not show any more is closed before. Interrupted by a signal's handler, it is to be called again.
        """
        if self._is_over:
            return
        opening, self._opening = self._opening, None
        if opening is not None:
            self.exports.openings.leave(opening)
        self.ticket.fence()
        self.ticket.words[TAKEN] = OVER
        self._is_over = True  # no call between these two, in which a handler could run
        self.tell()


def take_to_device(shown: Shown, x: Buffer) -> Steps[None]:
    """Copy the data into an array on a device, which may be written."""
    return _take(shown, x.address, shown.place.nbytes, x)


def take_to_host(shown: Shown, octets: Array) -> Steps[None]:
    """Copy the data into host memory (uint8)."""
    return _take(shown, address_of(octets), HOST_BYTES, octets)


def _take(shown: Shown, target: int, most: int, keep: object) -> Steps[None]:
    """Copy all of it to an address, so many bytes at a time at the most; what lies there is kept.

    Raises:
        DeviceFailed: of this rank, or of the sender.
    """
    marks: list[Mark] = []
    try:
        with settled(marks):
            yield from _reached(shown.ticket.ready, 1)
            source = shown.array()
            if source is not None:
                yield from _copied(shown, source, target, shown.place.nbytes, most, marks)
            else:
                yield from _from_slots(shown, target, most, marks)
    finally:
        shown.drop()


def _from_slots(shown: Shown, target: int, most: int, marks: list[Mark]) -> Steps[None]:
    source = shown.slots()
    shown.ticket.ask()
    shown.tell()
    for number, (offset, start, end) in enumerate(slots.spans(shown.place.nbytes), 1):
        yield from _reached(shown.ticket.filled, number)
        yield from _copied(shown, source + offset, target + start, end - start, most, marks)
        shown.ticket.tell_taken(number)
        shown.tell()


def _copied(shown: Shown, source: int, target: int, nbytes: int, most: int, marks: list[Mark]) -> Steps[None]:
    lane = shown.exports.lane
    for start in range(0, nbytes, most):
        lane.copy(source + start, target + start, min(most, nbytes - start))
        marks[:] = [lane.mark()]
        yield from copied(marks)


def _reached(look: Callable[[], int], value: int) -> Steps[None]:
    """Until the sender has told so much.

    Raises:
        DeviceFailed: it never will.
    """
    if FAILED < look() < value:
        yield _Told(look, value)
    if look() == FAILED:
        raise DeviceFailed("the sender's device has failed, so its data cannot be had; its own error says more")


class _Told:
    """The sender has told so much, or that it never will; as a request."""

    def __init__(self, look: Callable[[], int], value: int) -> None:
        self._look = look
        self._value = value

    def Test(self) -> bool:
        return not FAILED < self._look() < self._value
