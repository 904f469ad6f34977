"""Inbox: where the messages and the receives of one communicator come together.

Point to point goes over our own receive queue: while receives wait, the Engine
probes for any message, matches it, checks type and size, and only then lets MPI
write into the receiver's buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeVar

from mpdist.progress import wire
from mpdist.progress.array_receive import ArrayReceive
from mpdist.progress.backoff import USUAL_CREDIT, message_credit
from mpdist.progress.fastbox import EPOCH, GONE, READ_AT
from mpdist.progress.fastbox_reader import FastboxReader, reader_of
from mpdist.progress.mailbox import Mailbox
from mpdist.progress.message import Incoming, Message, ProbedMessage, ReceiveThere, ShownIncoming
from mpdist.progress.receive import Receive, ReceiveEither
from mpdist.progress.received import receive_at_once

if TYPE_CHECKING:
    from numpy import ndarray

    from mpdist.memory import Buffer, Element
    from mpdist.progress.channel import Channel
    from mpdist.progress.work import Work

R = TypeVar("R", bound=Receive)

# How many messages one look takes at the most, so that a flood does not hold a turn.
POLL_MESSAGES = 16

# Into fastboxes, some 1 and 8 us.
LOOKS = 16
LOOKS_AT_ONCE = 200


class Inbox:
    """The receiving side of a channel.

    Attributes:
        box: posted receives and unclaimed messages.
        is_listening: whether the Engine's drives probe for it.
        envelope: MPI's status of what a probe has found, and where in it what is.
        probed_for: an iterator without end, of what a probe finds, or None. After a call of the probe a signal's
            handler could raise before the message has a name; a `for` names it at once.
        untaken: a message that MPI has given out, until it is delivered.
        boxes, readers: the fastboxes of other members, by member, and those of them with one in turn first.
        looks, looks_at_once: as many into a box for a small message, between two of MPI's probes, and by who posts.
        unread: a message from one of them, until it is delivered.
        is_in_hand: a thread may have a message in hand that comes back: so none that comes later may be taken.
    """

    def __init__(self, channel: Channel) -> None:
        transport = channel.transport
        self.channel = channel
        self.engine = channel.engine
        self.box: Mailbox[Receive, Incoming] = Mailbox()
        self.is_listening = self.is_in_hand = False
        self.envelope = transport.envelope
        self.failure = transport.failure
        arguments = transport.any_source, transport.any_tag, transport.status
        self.probed_for: Iterator[Any] = map(transport.improbe, *map(repeat, arguments))
        self.untaken: object = None
        self.boxes: dict[int, FastboxReader] = {}
        self.readers: deque[FastboxReader] = deque()
        self.unread: Incoming | None = None
        self._read_in_a_row = 0
        self._is_mpis_turn = False
        self.looks = range(1 if self.engine.backoff.yields else LOOKS)
        self.looks_at_once = range(1 if self.engine.backoff.yields else LOOKS_AT_ONCE)
        self._head = bytearray()
        self._in_pieces: dict[tuple[int, int], Incoming] = {}
        self._probed: set[Incoming] = set()
        self._all_came_of: set[int] = set()

    # ------------------------------------------------------------------ receives

    def receive(self, receive: R) -> R:
        """Let a receive meet a message that is here, or wait for one."""
        engine = self.engine
        try:
            with engine.lock:
                box = self.box
                message = box.find(receive.src, receive.tag) if box.messages else None
                if message is not None:
                    self._claim(message, receive)
                else:
                    box.post(receive)
                    self._listen()
            if message is not None:
                engine.ticking.stir()
            elif not engine.ticking.is_on:
                engine.ticking.ensure()
        except BaseException:  # of a signal's handler: nobody will ever wait for it
            receive._abandon()
            raise
        return receive

    def receive_array(self, x: ndarray[Any, Any], element: Element, nbytes: int, src: int, tag: int) -> ArrayReceive:
        """The same for a receive into a NumPy array, where nothing else waits: the latency path."""
        work: ArrayReceive = ArrayReceive()
        work._channel = self.channel
        work._x = x
        work._element = element
        work._nbytes = nbytes
        work._done = work._looked_at = False
        work._error = work._callbacks = None
        work.order = 0
        work.src = src
        work.tag = tag
        engine = self.engine
        box = self.box
        if box.messages or box.receives:
            return self.receive(work)
        try:
            with engine.lock:
                if box.messages or box.receives:  # another thread's
                    return self.receive(work)
                box.sole = work
                box.receives = work.order = 1
                if not self.is_listening:
                    self._listen()
            if not engine.ticking.is_on:
                engine.ticking.ensure()
        except BaseException:  # of a signal's handler: nobody will ever wait for it
            work._abandon()
            raise
        return work

    def _listen(self) -> None:
        if not self.is_listening:
            self.is_listening = True
            self.engine.listening.append(self)

    def _claim(self, message: Incoming, receive: Receive) -> None:
        """A kept message meets its receive; a misfit stays where it is."""
        engine = self.engine
        box = self.box
        was_in_hand, self.is_in_hand = self.is_in_hand, True
        try:
            box.remove(message)
            if message.arriving is not None or engine.credit <= 0:
                # Reserved until it has come, or the loop has had its turn; a misfit fails at once, for who comes next
                # is to meet the same message in any case.
                if not receive.fits(message):
                    box.restore(message)
                    return
                receive.reserve(message)
                (engine.later if message.arriving is None else engine.active).append(receive)
                return
            engine.credit -= message_credit(message.nbytes)
            if not receive.accept(message):
                box.restore(message)
        except BaseException:  # of a signal's handler
            if not receive.hold(message):
                box.restore(message)
            elif message.order > 0:
                box.remove(message)
            raise
        finally:
            self.is_in_hand = was_in_hand

    def give_back(self, incoming: Incoming) -> None:
        """A cancelled receive returns its message: the next one gets it, in the old order."""
        if incoming.lost:
            return
        if incoming.order == 0:
            incoming.order = -self.box.next_order()
        waiting = None
        try:
            self.box.restore(incoming)
            while True:  # a condition would be outside of `try`, see interruption.py
                if incoming.order <= 0:
                    break
                waiting = self.box.match(incoming.src, incoming.tag)
                if waiting is None:
                    break
                self._claim(incoming, waiting)
        except BaseException:  # of a signal's handler
            if waiting is not None and not waiting._done and waiting._incoming is not incoming:
                self._claim(incoming, waiting)
            if incoming.probed is None and (waiting is None or waiting._incoming is not incoming):
                self.give_back(incoming)
            raise

    # ------------------------------------------------------------------ messages

    def poll(self, most: int = POLL_MESSAGES) -> bool:
        """Take what has arrived, so many messages at the most; True if anything has."""
        was_in_hand, self.is_in_hand = self.is_in_hand, True
        try:
            return self._poll(most)
        finally:
            self.is_in_hand = was_in_hand

    def _poll(self, most: int) -> bool:
        taken = 0
        while self.readers and self._read_one():
            taken += 1
            if taken == most or not self.box.receives:
                return True
        for handle in self.probed_for:
            if handle is None:
                break
            self.untaken = handle
            try:
                self.arrived(handle)
            except BaseException:  # of a signal's handler
                if self.untaken is handle:
                    self.arrived(handle)
                raise
            taken += 1
            if taken == most or not self.box.receives:
                break
        return taken > 0 or (self._is_mpis_turn and self._read_one())

    def poll_once(self) -> bool:
        """Take one message; False if there is none."""
        return self.poll(1)

    def arrived(self, handle: Any) -> None:
        """Give the message that was probed last to the receive it matches, or keep it."""
        words, source_at, tag_at, nbytes_at = self.envelope
        mpi_tag = words[tag_at]
        src = words[source_at]
        nbytes = words[nbytes_at]
        code = mpi_tag & wire.CODE_MASK
        tag = mpi_tag >> wire.CODE_BITS
        if src in self.boxes:
            self._read_all(self.boxes[src])
        self.engine.credit -= message_credit(nbytes)
        if code >= wire.PIECE:
            self._add(handle, src, tag, nbytes, code)
            return
        incoming = Incoming(handle, src, tag, code, nbytes)
        if wire.ARRAY_IN_PIECES <= code < wire.OBJECT:
            self._open_pieces(incoming)
        elif code == wire.OBJECT_IN_PIECES:
            incoming.parts = []
            self._in_pieces[src, tag] = incoming
        self.deliver(incoming)

    def deliver(self, incoming: Incoming) -> None:
        """Give a message to the earliest receive that it fits; those before, which it matches, fail."""
        receive = None
        try:
            if incoming.result is None:
                self.untaken = None
            elif self.unread is incoming:
                self.unread = None
            while True:  # a condition would be outside of `try`, see interruption.py
                receive = self.box.match(incoming.src, incoming.tag)
                if receive is None:
                    self.box.keep(incoming)
                    return
                if receive.accept(incoming):
                    return
                receive = None
        except BaseException:  # of a signal's handler
            if receive is None or not receive.hold(incoming):
                self.deliver(incoming)
            raise

    def _open_pieces(self, incoming: Incoming) -> None:
        head = self._head_of(incoming.handle, 8)
        incoming.handle = None
        incoming.nbytes = wire.unpack_size(head)
        incoming.code -= wire.ARRAY_IN_PIECES
        incoming.parts = []
        self._in_pieces[incoming.src, incoming.tag] = incoming

    def _add(self, handle: Any, src: int, tag: int, nbytes: int, code: int) -> None:
        """A piece of a message that has come before, the last of its sender, or what says where the data are."""
        if code == wire.LAST:
            self._all_came_of.add(src)
            if handle:  # not received yet, and then interrupted
                handle.Recv([bytearray(), 0, self.channel.byte])
            self._leave_box(src)
            return
        if code == wire.FASTBOX:
            self._open_box(handle, src)
            return
        if code >= wire.ARRAY_SHOWN:
            self._open_shown(handle, src, tag, nbytes, code - wire.ARRAY_SHOWN)
            return
        incoming = self._in_pieces[src, tag]
        assert incoming.parts is not None
        # No call, after which a handler could raise: it would be added again.
        incoming.parts += ((handle, nbytes),)
        self.untaken = None

    def all_pieces_came(self, incoming: Incoming) -> None:
        """No more come; what its sender sends with this tag from now on belongs to a later message."""
        key = incoming.src, incoming.tag
        if self._in_pieces.get(key) is incoming:
            del self._in_pieces[key]

    def _head_of(self, handle: Any, nbytes: int) -> bytearray:
        """Receive what stands for a message; if that was interrupted after it, what has come."""
        if handle:
            self._head = bytearray(nbytes)
            handle.Recv([self._head, nbytes, self.channel.byte])
        return self._head

    def _open_shown(self, handle: Any, src: int, tag: int, nbytes: int, code: int) -> None:
        head = self._head_of(handle, nbytes)
        showing = self.channel.showing
        assert showing is not None, "nobody shows what this rank has not found it can take"
        place = wire.Place.unpack(head)
        self.deliver(ShownIncoming(showing.shown(src, place), src, tag, code, place.nbytes))

    receive_at_once = receive_at_once

    # ------------------------------------------------------------------ small ones through shared memory

    def next_reader(self) -> FastboxReader | None:
        """A box with an entry, each in turn; None as well when so many were read that it is MPI's messages' turn."""
        if self._read_in_a_row >= POLL_MESSAGES:
            self._read_in_a_row = 0
            self._is_mpis_turn = True
            return None
        self._is_mpis_turn = False
        readers = self.readers
        for _ in range(len(readers)):
            reader = readers[0]
            readers.rotate(-1)
            if reader.words[reader.place[0]] == reader.number:  # has_one
                self._read_in_a_row += 1
                return reader
        return None

    def comes_later(self, src: int) -> bool:
        """Whether a member has put something into its box before what MPI has given out of it."""
        reader = self.boxes.get(src)
        return reader is not None and reader.has_one()

    def _read_one(self) -> bool:
        reader = self.next_reader()
        if reader is None:
            return False
        self.read(reader)
        return True

    def read(self, reader: FastboxReader) -> None:
        """Deliver the entry that is there."""
        self.engine.credit -= USUAL_CREDIT
        sole = self.box.sole
        if sole is not None and (sole.accept_entry(reader) or not reader.has_one()):
            return
        try:
            incoming = reader.pass_on(self)
            if incoming is not None:
                self.deliver(incoming)
        except BaseException:  # of a signal's handler
            if self.unread is not None:
                self.deliver(self.unread)
            raise

    def _read_all(self, reader: FastboxReader) -> None:
        """Deliver what was put there before a message that MPI has given out."""
        while reader.has_one():
            self.read(reader)

    def _open_box(self, handle: Any, src: int) -> None:
        offset = wire.unpack_size(self._head_of(handle, 8))
        reader = self.boxes.get(src)
        if reader is None:
            channel = self.channel
            shared = channel.engine.shared
            assert shared is not None, "only ranks of a node have one"
            reader = reader_of(shared, src, channel.world_ranks[src], offset)
            # No call until the end, after which a handler could raise: this would be done again.
            self.boxes[src] = reader
            self.readers += (reader,)
        reader.number += EPOCH
        self.untaken = None

    def _leave_box(self, src: int) -> None:
        """Never look there again, for its sender may take the memory back."""
        reader = self.boxes.get(src)
        if reader is not None:
            others = deque(each for each in self.readers if each is not reader)
            # No call between these.
            del self.boxes[src]
            self.readers = others
            reader.words[READ_AT] = GONE
            self.channel.ring(src)

    # ------------------------------------------------------------------ probed messages

    def probed(self, incoming: Incoming, receive_there: ReceiveThere) -> ProbedMessage:
        """Hold a message for its own `recv`."""
        self._probed.add(incoming)
        incoming.probed = ProbedMessage(self.channel, incoming, receive_there)
        return incoming.probed

    def unprobed(self, incoming: Incoming) -> None:
        """Nobody holds it for its own `recv` any more."""
        self._probed.discard(incoming)
        incoming.probed = None

    def receive_probed(self, incoming: Incoming, buffer: Buffer | None) -> Work[Message]:
        """Receive a message that a probe has matched, into memory of the host."""
        kind = ReceiveEither if buffer is None else Receive
        return self.take_probed(incoming, kind(self.channel, buffer, incoming.src, incoming.tag))

    def take_probed(self, incoming: Incoming, receive: Receive) -> Work[Message]:
        """Let this receive have the message."""
        with self.engine.lock:
            if receive.accept(incoming):
                self._probed.discard(incoming)
            elif incoming.probed is not None:
                incoming.probed._restored(incoming)
        self.engine.ticking.stir()
        return receive

    def listeners(self) -> list[Receive]:
        """The receives of iterators over messages, which wait until the communicator is closed."""
        return [receive for receive in self.box.waiting() if receive.is_listener]

    def unclaimed(self) -> list[str]:
        """Messages that were sent to this rank and that nobody received, described."""
        return [message.describe() for message in [*self.box.unclaimed(), *self._probed]]

    # ------------------------------------------------------------------ end

    def has_all_of(self, senders: frozenset[int]) -> bool:
        """Take what has arrived; whether these members have said their last, so that all of theirs has come."""
        for _ in range(POLL_MESSAGES):
            if senders <= self._all_came_of or not self.poll_once():
                break
        return senders <= self._all_came_of

    def take_in(self) -> int:
        """Take what has arrived; how many messages nobody has received."""
        with self.engine.lock:
            self._take_in()
        self.engine.flush()
        return self.box.messages

    def _take_in(self) -> None:
        while self.poll():
            pass

    def take_unclaimed(self) -> Iterator[tuple[int, Any, int]]:
        """Source, MPI's message and size of what nobody has received and MPI still has; it stays listed.

        What senders show is dropped: they wait no longer.
        """
        for message in [*self.box.unclaimed(), *self._probed]:
            if message.shown is not None:
                message.shown.drop()
            whole = [] if message.handle is None else [(message.handle, message.nbytes)]
            parts = message.parts or []
            message.handle = message.parts = None
            for handle, nbytes in whole + parts:
                yield message.src, handle, nbytes

    def close(self) -> None:
        """Refuse further receives."""
        self.__class__ = ClosedInbox


class ClosedInbox(Inbox):
    """The inbox of a closed channel, as another class: open ones need no check on the hot path."""

    def receive(self, receive: Receive) -> Any:
        raise self.channel.unusable(receive.op)

    def _refuse_to_receive(self, *_: Any, **__: Any) -> Any:
        raise self.channel.unusable("recv")

    receive_array = receive_at_once = receive_probed = take_probed = _refuse_to_receive
