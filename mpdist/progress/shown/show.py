"""Show: the sending of a message whose receiver takes the data itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpdist.errors import DeviceFailed
from mpdist.memory.mark import OVER
from mpdist.memory.slots import SLOTS, spans
from mpdist.progress import wire
from mpdist.progress.sending import posted
from mpdist.progress.shown.showing import may_show, showing_of

if TYPE_CHECKING:
    from mpdist.memory import Buffer
    from mpdist.memory.arena import Block
    from mpdist.memory.mark import Mark
    from mpdist.progress.channel import Channel
    from mpdist.progress.shown.showing import Showing
    from mpdist.progress.shown.ticket import Ticket
    from mpdist.progress.work import Work
    from mpdist.transport.requests import Request

# Sends look so often at the most which segments are gone: asking the driver about all takes as long as a send.
REFRESH_SECONDS = 0.05


def show(channel: Channel, x: Buffer, dst: int, tag: int) -> Work[None] | None:
    """Post a message of an array on a device; None where it has to go another way."""
    if not may_show(channel, x.nbytes):
        return None
    showing = showing_of(channel, x.device)
    if showing.device != x.device or not showing.is_taken_by(dst):
        return None
    ready: Mark | None = showing.exports.accelerator.ready(x)
    made = showing.new_ticket()
    if made is None:
        return None
    block, ticket = made
    head = showing.place_of(x, block.offset).pack()
    channel.addressed.add(dst)
    if ready is OVER:
        ticket.tell_ready()
        ready = None
    request = Show(showing, x, dst, ready, block, ticket)
    try:
        request.message = channel.isend(
            [head, len(head), channel.byte], dst, wire.wire_tag(tag, wire.ARRAY_SHOWN + x.element.code)
        )
        work = posted(channel, request, dst, tag, (x, head))
    except BaseException:  # of a signal's handler
        channel.fastboxes.shut(dst)
        raise
    showing.refresh(REFRESH_SECONDS)
    return work


class Show:
    """The request of such a message: done when its receiver needs the array no more.

    Each look goes on from what the last one has left, wherever a signal's handler has interrupted that.

    Attributes:
        message: the request of the message that says where the data are.
    """

    message: Request | None

    def __init__(self, showing: Showing, x: Buffer, dst: int, ready: Mark | None, block: Block, ticket: Ticket) -> None:
        """Take the mark of the data; None: the receiver has been told that they are there."""
        self._showing = showing
        self._x = x
        self._dst = dst
        self._ready = ready
        self._block = block
        self._ticket = ticket
        self._is_looked_at = False
        self._is_over = False
        self._filled = 0
        self._filling: Mark | None = None
        self._spans = spans(x.nbytes)

    def Test(self) -> bool:
        if not self._is_looked_at:  # by whoever posts it: what goes wrong is for the Work to say
            self._is_looked_at = True
            return False
        try:
            return self._test()
        except DeviceFailed:
            self._ticket.tell_failed()
            self._showing.keep(self._block)
            self._showing.slots().leave(self)
            self._tell()
            raise

    def _test(self) -> bool:
        if self.message is not None:
            if not self.message.Test():
                return False
            self.message = None
        if self._ready is not None:
            if not self._ready.Test():
                return False
            self._ticket.tell_ready()
            self._ready = None
            self._tell()
        if self._filling is not None and not self._is_filled():
            return False
        if self._is_over:
            return True
        if self._ticket.is_over():
            self._showing.slots().leave(self)
            self._is_over = True
            self._showing.give_back(self._block, self._ticket)  # the ticket may be another message's from now on
            return True
        if self._ticket.is_asked():
            self._fill()
        return False

    def _is_filled(self) -> bool:
        """Whether the copy into a slot is over; then its receiver knows."""
        assert self._filling is not None
        if not self._filling.Test():
            return False
        self._ticket.tell_filled(self._filled + 1)
        self._filled += 1
        self._filling = None
        self._tell()
        return True

    def _fill(self) -> None:
        """Queue the next copy into a slot, if it is this message's turn and one is free."""
        slots = self._showing.slots()
        if self._filled == len(self._spans) or not slots.is_turn_of(self):
            return
        if self._filled - self._ticket.taken() < SLOTS:
            offset, start, end = self._spans[self._filled]
            lane = self._showing.exports.lane
            lane.copy(self._x.address + start, slots.block.address + offset, end - start)
            self._filling = lane.mark()

    def _tell(self) -> None:
        """The receiver may wait for it."""
        channel = self._showing.channel
        channel.engine.has_advanced = True
        channel.ring(self._dst)
