"""Receive: waits for a message, checks it, and lets MPI write it.

Type and size are checked before the buffer is touched; what does not fit fails
the receive and stays queued for a better one. A receive that is cancelled before
it meets a message is withdrawn; one that is cancelled later gives the message
back to its old place, so that the next receive gets it: nothing is lost. If the
message still comes then, the next receive waits for it: nothing overtakes it. What a
signal's handler interrupts while they meet goes on at the next look.
"""

from __future__ import annotations

import enum
import sys
from typing import TYPE_CHECKING

from mpdist.errors import CommunicationError, MessageTruncated, UnsupportedBuffer
from mpdist.memory import Buffer
from mpdist.progress.interruption import is_interruption, is_of_handler, is_over
from mpdist.progress.mailbox import ANY
from mpdist.progress.message import Incoming, Message, ReceiveThere
from mpdist.progress.transfer import NoRoom, Room, Transfer, kept, receive_now, room_for, transfer
from mpdist.progress.unbegun import Wrapped

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel
    from mpdist.progress.fastbox_reader import FastboxReader
    from mpdist.transport.requests import Request

# Up to this size a matched message has arrived with its envelope on both MPIs, so that MPI's blocking call only copies.
EAGER_BYTES = 2048


class Takes(enum.Enum):
    """Which kind of message a receive is for."""

    ARRAY = "an array"
    OBJECT = "an object"
    EITHER = "an array or an object"
    ENVELOPE = "any message, without receiving it"


class Receive(Wrapped[Message]):
    """A posted receive.

    Attributes:
        src, tag: the pattern; mailbox.ANY for any.
        order: its place in the mailbox, not positive when it does not wait there.
        is_repeatable: the program of its transfer may be begun again, after what it has done.
        is_listener: it takes what comes until the communicator is closed, and does not keep that from being closed.
    """

    op = "recv"
    order = 0
    takes = Takes.ARRAY
    is_repeatable = True
    is_listener = False
    _request: Request | None = None
    _incoming: Incoming | None = None
    _reserved = False
    _given_up = False
    _steps: Transfer | None = None
    _room: Room = None

    _buffer: Buffer | None

    def __init__(self, channel: Channel, buffer: Buffer | None, src: int, tag: int) -> None:
        self._channel = channel
        self._buffer = buffer
        self.src = src
        self.tag = tag

    # ------------------------------------------------------------------ meeting a message

    def accept(self, incoming: Incoming) -> bool:
        """Take the message; False if it does not fit: then this Work has failed, and the message is to be kept."""
        if not self.fits(incoming):
            return False
        try:
            room = self._find_room(incoming)
        except (CommunicationError, UnsupportedBuffer) as error:
            self._fail(error)
            return False
        self._incoming = incoming
        self._room = room
        if incoming.handle is not None and incoming.parts is None and incoming.nbytes <= EAGER_BYTES:
            self._receive_now(incoming, room)
            return True
        return self._start_transfer(incoming)

    def accept_entry(self, reader: FastboxReader) -> bool:
        """The same of what lies there in a fastbox, while it waits alone; False if it does not fit, or another way is.

        Under the Engine's lock.
        """
        return False

    def fits(self, incoming: Incoming) -> bool:
        """Compare type and size; where they differ this Work has failed."""
        try:
            self._check(incoming)
        except (CommunicationError, UnsupportedBuffer) as error:
            self._fail(error)
            return False
        return True

    def hold(self, incoming: Incoming) -> bool:
        """Go on with the message at the next look, where `accept` was interrupted; False if it did not fit."""
        engine = self._channel.engine
        if self._done:
            return self._error is None or self in engine.wrecks
        incoming.order = incoming.order or self.order
        if self._room is None and self._steps is None:
            self.reserve(incoming)
        else:
            self._reserved = False
            if self.is_repeatable:
                self._steps = self._program(incoming)
        if self not in engine.active:
            engine.active.append(self)
        return True

    def _start_transfer(self, incoming: Incoming) -> bool:
        """Start a transfer; False if there is no memory for it."""
        self._steps = self._program(incoming)
        try:
            self._step()
        except NoRoom as error:
            self._fail(self._no_room(incoming, error))
            return False
        if self._steps is not None:
            self._channel.engine.active.append(self)
        return True

    def _program(self, incoming: Incoming) -> Transfer:
        """The steps of its transfer."""
        return transfer(self._channel, incoming, self._room)

    def _check(self, incoming: Incoming) -> None:
        """Raise if the message does not fit this receive."""
        if incoming.is_object:
            if self.takes is Takes.EITHER and not self._channel.engine.allow_pickle:
                raise UnsupportedBuffer(self._misfit(incoming, "MPDIST_ALLOW_PICKLE=0", "allow objects to receive it"))
            if self.takes is Takes.ARRAY:
                raise UnsupportedBuffer(self._misfit(incoming, "a receive of an array", "take it with recv_object"))
            return
        if self.takes is Takes.OBJECT:
            raise UnsupportedBuffer(self._misfit(incoming, "a receive of an object", "take it with recv"))
        buffer = self._buffer
        if buffer is None:
            return
        if buffer.element.code != incoming.code:
            element = incoming.element()
            assert element is not None
            got, advice = f"a buffer of {buffer.element.name}", f"receive into {element.name}, or without x"
            raise UnsupportedBuffer(self._misfit(incoming, got, advice))
        if buffer.nbytes < incoming.nbytes:
            need = incoming.nbytes // buffer.element.itemsize
            got, advice = f"a buffer of {buffer.count} elements", f"receive into {need} elements, or without x"
            raise MessageTruncated(self._misfit(incoming, got, advice))

    def _find_room(self, incoming: Incoming) -> Room:
        try:
            return room_for(incoming, self._buffer)
        except NoRoom as error:
            failure = self._no_room(incoming, error)
            raise failure from failure.__cause__
        except UnsupportedBuffer as error:
            got, advice = "a receive without x", "give x as a torch tensor, or import ml_dtypes first"
            text = self._misfit(incoming, f"{got}, for which NumPy has no type", advice)
            raise UnsupportedBuffer(text) from error

    def _no_room(self, incoming: Incoming, error: NoRoom) -> CommunicationError:
        failure = CommunicationError(self._misfit(incoming, str(error), "free memory, and receive it again"))
        failure.__cause__ = error.__cause__
        return failure

    def _misfit(self, incoming: Incoming, got: str, advice: str) -> str:
        return f"{self.describe()}: {incoming.describe()} met {got}; the message stays queued: {advice}"

    def reserve(self, incoming: Incoming) -> None:
        """Hold a message until the event loop has had its turn, or it has come."""
        self._incoming = incoming
        self._reserved = True

    # ------------------------------------------------------------------ getting it

    def _receive_now(self, incoming: Incoming, room: Room) -> None:
        try:
            self._finish(receive_now(self._channel, incoming, room))
        except BaseException as error:  # a failed transfer, or an object that cannot be unpickled
            if is_of_handler(error) or not isinstance(error, Exception):
                raise
            self._broke(error)

    def _poll(self) -> bool:
        if self.order > 0:
            self._channel.inbox.poll_once()
            return self._done
        if self._reserved:
            return self._take_reserved()
        if (self._done and not self._given_up) or self._steps is None:
            return self._done
        return self._advance()

    def _take_reserved(self) -> bool:
        incoming = self._incoming
        assert incoming is not None
        if not self._done:
            if _still_comes(incoming):
                return False
            self._take(incoming)
        self._reserved = False
        return self._done

    def _take(self, incoming: Incoming) -> None:
        if incoming.lost:
            self._fail(CommunicationError(f"{self.describe()}: {incoming.describe()} is lost: {incoming.lost}"))
            return
        try:
            is_taken = self.accept(incoming)
        except BaseException:  # of a signal's handler
            if not self.hold(incoming):
                self._channel.inbox.give_back(incoming)
            raise
        if not is_taken:
            self._channel.inbox.give_back(incoming)

    def _advance(self) -> bool:
        try:
            return self._step()
        except NoRoom as error:
            incoming = self._incoming
            assert incoming is not None
            if self._given_up:
                incoming.arriving = None
                return True
            self._fail(self._no_room(incoming, error))
            self._restore(incoming)
            return True

    def _step(self) -> bool:
        """Look once at the transfer; True when it is over. NoRoom: what has come of the message is kept with it."""
        steps = self._steps
        assert steps is not None
        try:
            try:
                while self._request is None or self._request.Test():
                    self._request = next(steps)
            except StopIteration as stop:
                if stop.value is None:  # it was over before
                    return self._interrupted_twice(steps)
                self._arrived(stop.value)
                return True
        except NoRoom:
            self._steps = self._request = None
            raise
        except BaseException as error:
            is_interrupted = is_of_handler(error) or (is_interruption(error) and not is_over(steps))
            if is_interrupted and self._begin_again(steps):
                raise
            if isinstance(error, Exception):  # a failed transfer, or an object that cannot be unpickled
                self._broke(error)
                return True
            self._channel.engine.wrecks.append(self)
            self._broke(error)
            raise
        return False

    def _interrupted_twice(self, steps: Transfer) -> bool:
        """Its transfer was interrupted, and once more before it was begun again."""
        if self._begin_again(steps):
            return False
        self._broke(InterruptedError("by the handler of a signal"))
        return True

    def _begin_again(self, steps: Transfer) -> bool:
        """Let a transfer that was interrupted go on; False if it can't."""
        incoming = self._incoming
        assert incoming is not None
        if not self.is_repeatable or incoming.shown is not None:
            return not is_over(steps)
        if self._steps is not None:
            self._steps, self._request = self._program(incoming), None
        return True

    def _broke(self, error: BaseException) -> None:
        self._steps = self._request = None
        if self._incoming is not None and self._incoming.shown is not None:
            self._incoming.shown.drop()  # again, where its program was interrupted in that
        if self._given_up:
            self._lose(f"{type(error).__name__}: {error}")
        if self._done:
            return
        failure = CommunicationError(f"{self.describe()} failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self._fail(failure)

    def _arrived(self, message: Message) -> None:
        incoming = self._incoming
        assert incoming is not None
        if not self._given_up:
            self._finish(message)
            incoming.forget()
            incoming.result = None
        elif self._keep(incoming, message):
            incoming.arriving = None
        self._steps = self._request = self._room = None  # whoever keeps the Work keeps no more memory than its result
        self._channel.ring(incoming.src)  # its send is complete now

    # ------------------------------------------------------------------ giving up

    def cancel(self, msg: object = None) -> bool:
        """Withdraw it; False if it has met a message, or is done."""
        with self._channel.engine.lock:
            withdrawn = not self._done and self._leave_queue()
        if withdrawn:
            self._channel.hand_out()
        return withdrawn

    def _leave_queue(self) -> bool:
        incoming, is_queued = self._incoming, self.order > 0
        if self._reserved and incoming is not None:
            try:
                self._withdraw()
            except BaseException:  # of a signal's handler
                self._leave_queue()
                raise
            self._reserved = False
            self._channel.inbox.give_back(incoming)
            return True
        try:
            if self._channel.inbox.box.withdraw(self):
                self._withdraw()
                self._forget_memory()
                return True
        except BaseException:  # of a signal's handler
            if is_queued and self.order <= 0 and not self._done:
                self._withdraw()
            raise
        return False

    def _forget_memory(self) -> None:
        """It was withdrawn, and may stay in the mailbox's queue for a while."""
        self._buffer = None

    def _abandon(self) -> None:
        """The await was cancelled: the message, if it came, goes to the next receive."""
        engine = self._channel.engine
        with engine.lock:
            if not (self._given_up or self._cancelled or self._looked_at):
                self._give_up()
        self._channel.hand_out()

    def _give_up(self) -> None:
        if not self._done and self._leave_queue():
            return
        self._given_up = True
        if not self._done:
            self._withdraw()
            if self._incoming is not None:
                self._let_go()
        elif self._error is None:
            message = self._result
            self._withdraw()
            self._give_back(message)

    def _give_back(self, message: Message) -> None:
        """Let the next receive have the message, from a copy: whoever was cancelled may use their array again."""
        incoming = self._incoming
        if incoming is None:
            return
        try:
            is_kept = self._keep(incoming, message)
        except BaseException:  # of a signal's handler, perhaps after another: a copy of much takes long
            if self._keep(incoming, message):
                self._restore(incoming)
            raise
        if is_kept:
            self._restore(incoming)

    def _keep(self, incoming: Incoming, message: Message) -> bool:
        try:
            incoming.result = kept(message)
        except MemoryError as error:
            why = f"there is no memory to keep it: {error}"
            print(f"mpdist: {self.describe()} was cancelled, and {incoming.describe()} is lost, {why}", file=sys.stderr)
            self._lose(why)
            return False
        incoming.forget()
        return True

    def _let_go(self) -> None:
        """Its message still comes, and the transfer goes on in the Engine's table: the next receive has to wait."""
        incoming = self._incoming
        assert incoming is not None
        incoming.arriving = self
        self._restore(incoming)

    def _lose(self, why: str) -> None:
        """Its message will not come to whoever has got it, or will ask for it."""
        incoming = self._incoming
        assert incoming is not None
        incoming.lost = why
        incoming.arriving = None
        if incoming.order > 0:
            self._channel.inbox.box.remove(incoming)

    def _restore(self, incoming: Incoming) -> None:
        incoming.order = incoming.order or self.order
        self._channel.inbox.give_back(incoming)

    def _expire(self, error: BaseException) -> None:
        """It took too long: withdrawn, with the error as its result."""
        if self._leave_queue():
            self._cancelled = False
            self._error = None
            self._fail(error)
            return
        self._given_up = True
        self._fail(error)
        self._let_go()

    def _desert(self, error: BaseException) -> None:
        self._channel.inbox.box.withdraw(self)
        super()._desert(error)

    def _seen_error(self) -> BaseException:
        self._looked_at = True
        return super()._seen_error()

    def details(self) -> str:
        src = "any rank" if self.src == ANY else self.src
        tag = "any tag" if self.tag == ANY else f"tag {self.tag}"
        return f"from {src}, {tag}"


def _still_comes(incoming: Incoming) -> bool:
    """Look once whether a receive that was given up still gets it."""
    if incoming.arriving is not None:
        incoming.arriving._poll()
    return incoming.arriving is not None


class ReceiveObject(Receive):
    """A receive for an object."""

    op = "recv_object"
    takes = Takes.OBJECT


class ReceiveEither(Receive):
    """A receive for whatever comes; an array into a new array."""

    op = "messages"
    takes = Takes.EITHER


class Probe(Receive):
    """A receive that only matches; its Message is received by the message's own `recv`."""

    op = "probe"
    takes = Takes.ENVELOPE

    def __init__(self, channel: Channel, src: int, tag: int, receive_there: ReceiveThere) -> None:
        """Take what receives a message into an array on a device."""
        super().__init__(channel, None, src, tag)
        self._receive_there = receive_there

    def accept(self, incoming: Incoming) -> bool:
        incoming.order = incoming.order or self.order
        self._finish(self._channel.inbox.probed(incoming, self._receive_there))
        return True

    def _leave_queue(self) -> bool:
        if self._reserved and self._incoming is not None:
            self._channel.inbox.unprobed(self._incoming)  # where accept was interrupted
        return super()._leave_queue()

    def _give_up(self) -> None:
        if not self._done:
            self._leave_queue()
        elif self._error is None:
            incoming = self._result._incoming  # type: ignore[attr-defined]  # a probe's result is a ProbedMessage
            if incoming is not None:
                self._withdraw()
                self._channel.inbox.unprobed(incoming)
                self._restore(incoming)
