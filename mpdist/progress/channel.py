"""Channel: one communicator's share of the Engine: its messages, its order of collectives.

Point to point goes over our own receive queue: while receives wait, the Engine
probes for any message, matches it, checks type and size, and only then lets MPI
write into the receiver's buffer.
"""

from __future__ import annotations

import sys
from asyncio import _get_running_loop as running_loop
from asyncio import current_task
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from mpdist.errors import ClosedError
from mpdist.memory import Buffer, as_buffer
from mpdist.progress import wire
from mpdist.progress.backoff import message_credit
from mpdist.progress.collective import (
    Collective,
    Direct,
    Place,
    Program,
    Steps,
    Words,
    check_task,
    one_call,
    user_place,
)
from mpdist.progress.mailbox import Mailbox
from mpdist.progress.message import Incoming, Message, ProbedMessage
from mpdist.progress.pickling import decode
from mpdist.progress.receive import Receive, ReceiveEither
from mpdist.progress.send import Send, Sent, SentAndTurn
from mpdist.progress.work import Work

if TYPE_CHECKING:
    from mpdist.progress.engine import Engine
    from mpdist.transport.mpi import Request, Transport

W = TypeVar("W", bound=Collective[Any])

Check = Callable[["Channel", str, Callable[[], str], Steps[Any]], Steps[Any]]
"""Wraps a collective's steps, to compare it between ranks first."""

# The user's frame, seen from `post_direct` called by a method of Communicator inside its `operation` wrapper.
CALLER = 3

# How many messages one look takes at the most, so that a flood does not hold a turn.
POLL_MESSAGES = 16

# So many collectives a channel remembers after they are over, for the diagnosis.
RECENT = 16

# Out-of-band buffers of an object are copied behind its pickle up to this size, and sent from where they are above it.
INLINE_OBJECT_BYTES = 64 * 1024


class Channel:
    """What the Engine knows of one communicator.

    Attributes:
        name: for texts, and the same on all members, so that ranks can speak about it.
        world_ranks: the members' ranks in the world.
        peers: the same without this rank.
        box: posted receives and unclaimed messages.
        sequence: number of collectives posted so far.
        recent: name and place of the last of them.
        timeout: seconds a collective may take; None: the job's default; 0: for ever.
        broken: why it refuses further use; empty while it does not.
    """

    def __init__(self, engine: Engine, transport: Transport, name: str, world_ranks: Sequence[int]) -> None:
        self.engine = engine
        self.transport = transport
        self.name = name
        self.rank = transport.rank
        self.size = transport.size
        self.world_ranks = tuple(world_ranks)
        self.peers = tuple(rank for place, rank in enumerate(self.world_ranks) if place != self.rank)
        self.max_tag = wire.max_tag(transport.max_tag)
        self.box: Mailbox[Receive, Incoming] = Mailbox()
        self.is_listening = False
        self.sequence = 0
        self.recent: deque[tuple[str, Place | None]] = deque(maxlen=RECENT)
        self.timeout: float | None = None
        self.broken = ""
        self.collectives: deque[Collective[Any]] = deque()
        self.check: Check | None = None
        self._running: Collective[Any] | None = None  # of several steps
        self._queue: deque[Collective[Any]] = deque()
        self._in_pieces: dict[tuple[int, int], Incoming] = {}
        self._probed: set[Incoming] = set()
        self._sent = Sent(self)
        self._status = transport.status
        self.improbe = transport.improbe
        self.isend = transport.isend
        self.byte = transport.byte
        self.any_message = (transport.any_source, transport.any_tag, transport.status)
        self.flags = engine.doorbell.flags
        engine.channels.append(self)

    def where(self) -> str:
        """`'world' (rank 0 of 4)`."""
        return f"'{self.name}' (rank {self.rank} of {self.size})"

    # ------------------------------------------------------------------ sending

    def send(self, buffer: Buffer, dst: int, tag: int) -> Work[None]:
        """Post an array; the arguments are checked."""
        if dst == self.rank:
            return self._send_to_self(buffer, tag)
        nbytes = buffer.nbytes
        if nbytes > wire.PIECE_BYTES:
            head = wire.pack_size(nbytes)
            return self._send_pieces(head, wire.ARRAY_IN_PIECES + buffer.element.code, [buffer], dst, tag, buffer)
        memory = buffer.exporter
        if memory is None:
            memory = self.transport.memory_of(buffer)
        if self.flags[self.world_ranks[dst]]:
            self.ring(dst)
        request = self.isend([memory, nbytes, self.byte], dst, tag << wire.CODE_BITS | buffer.element.code)
        return self.posted(request, dst, tag, buffer)

    def posted(self, request: Request, dst: int, tag: int, lease: object) -> Work[None]:
        """The Work of a posted message."""
        engine = self.engine
        if engine.doorbell.has_rung:
            engine.doorbell.give_way()
        if request.Test():
            engine.credit -= 1
            return self._sent if engine.credit > 0 else SentAndTurn(self)
        return self._activate(Send(self, request, dst, tag, lease))

    def _send_to_self(self, buffer: Buffer, tag: int) -> Work[None]:
        """A message to this rank is complete at once: it is copied into the mailbox."""
        incoming = Incoming(None, self.rank, tag, buffer.element.code, buffer.nbytes)
        data = buffer.array().copy()
        incoming.result = Message(data, self.rank, tag, buffer.count, buffer.nbytes, buffer.element)
        return self._kept_for_self(incoming)

    def _kept_for_self(self, incoming: Incoming) -> Work[None]:
        self.engine.credit -= message_credit(incoming.nbytes)
        with self.engine.lock:
            self._deliver(incoming)
        self.engine.flush()
        return self._sent if self.engine.credit > 0 else SentAndTurn(self)

    def send_frames(self, frames: list[memoryview], dst: int, tag: int) -> Work[None]:
        """Post a pickle (frame 0) and its out-of-band buffers."""
        if dst == self.rank:
            copies = [memoryview(bytearray(frame)) for frame in frames]
            incoming = Incoming(None, dst, tag, wire.OBJECT, sum(frame.nbytes for frame in frames))
            incoming.result = Message(decode(copies), dst, tag, 1, incoming.nbytes, None)
            return self._kept_for_self(incoming)
        if sum(frame.nbytes for frame in frames) <= INLINE_OBJECT_BYTES:
            head = wire.pack_frames(frames, inline=True)
            request = self.isend([head, len(head), self.byte], dst, wire.wire_tag(tag, wire.OBJECT))
            self.ring(dst)
            return self._activate(Send(self, request, dst, tag, head))
        head = wire.pack_frames(frames, inline=False)
        buffers = [as_buffer(frame) for frame in frames[1:]]
        return self._send_pieces(head, wire.OBJECT_IN_PIECES, buffers, dst, tag, frames)

    def _send_pieces(
        self, head: bytes | bytearray, code: int, bodies: list[Buffer], dst: int, tag: int, owner: object
    ) -> Work[None]:
        piece_tag = wire.wire_tag(tag, wire.PIECE)
        with self.engine.lock:  # another thread's pieces must not come in between
            requests = [self.isend([head, len(head), self.byte], dst, wire.wire_tag(tag, code))]
            for body in bodies:
                octets = body.array().view("u1")
                start = 0
                for size in wire.piece_sizes(body.nbytes):
                    piece = octets[start : start + size]
                    requests.append(self.isend([piece, size, self.byte], dst, piece_tag))
                    start += size
        self.ring(dst)
        return self._activate(Send(self, self.transport.together(requests), dst, tag, (head, bodies, owner)))

    def _activate(self, work: Work[None]) -> Work[None]:
        with self.engine.lock:  # another thread's driver may be looking at the end of the table
            self.engine.active.append(work)
        self.engine.ensure_ticking()
        return work

    def ring(self, rank: int) -> None:
        """Wake the member if it sleeps: something happened that it may wait for."""
        peer = self.world_ranks[rank]
        if self.flags[peer]:
            self.engine.doorbell.ring(peer)

    # ------------------------------------------------------------------ receiving

    def receive(self, receive: Receive) -> Receive:
        """Let a receive meet a message that is here, or wait for one."""
        engine = self.engine
        lock = engine.lock
        lock.acquire()
        try:
            box = self.box
            message = box.find(receive.src, receive.tag) if box.messages else None
            if message is not None:
                self._claim(message, receive)
            else:
                box.post(receive)
                if not self.is_listening:
                    self.is_listening = True
                    engine.listening.append(self)
        finally:
            lock.release()
        if not engine._ticking:
            engine.ensure_ticking()
        return receive

    def _claim(self, message: Incoming, receive: Receive) -> None:
        """A kept message meets its receive; a misfit stays where it is."""
        engine = self.engine
        if engine.credit <= 0:  # give the loop its turn first; until then the message is reserved
            self.box.remove(message)
            receive.reserve(message)
            engine.later.append(receive)
            return
        engine.credit -= message_credit(message.nbytes)
        if receive.accept(message):
            self.box.remove(message)

    def receive_probed(self, incoming: Incoming, x: object) -> Work[Message]:
        """Receive a message that a probe has matched."""
        buffer = None if x is None else as_buffer(x, writable=True)
        kind = ReceiveEither if buffer is None else Receive
        receive = kind(self, buffer, incoming.src, incoming.tag)
        with self.engine.lock:
            if receive.accept(incoming):
                self._probed.discard(incoming)
            elif incoming.probed is not None:
                incoming.probed._restored(incoming)
        self.engine.ensure_ticking()
        return receive

    def poll(self) -> bool:
        """Take what has arrived; True if anything has."""
        moved = False
        for _ in range(POLL_MESSAGES):
            message = self.improbe(*self.any_message)
            if message is None:
                return moved
            self.arrived(message)
            moved = True
            if not self.box.receives:
                return True
        return moved

    def poll_once(self) -> None:
        """Take one message if there is one."""
        message = self.improbe(*self.any_message)
        if message is not None:
            self.arrived(message)

    def arrived(self, handle: Any) -> None:
        """Give a message to the receive it matches, or keep it."""
        status = self._status
        mpi_tag = status.tag
        src = status.source
        nbytes = status.count
        code = mpi_tag & wire.CODE_MASK
        tag = mpi_tag >> wire.CODE_BITS
        self.engine.credit -= message_credit(nbytes)
        if code == wire.PIECE:
            self._add_piece(handle, src, tag, nbytes)
            return
        incoming = Incoming(handle, src, tag, code, nbytes)
        if wire.ARRAY_IN_PIECES <= code < wire.OBJECT:
            self._open_pieces(incoming)
        elif code == wire.OBJECT_IN_PIECES:
            incoming.parts = []
            self._in_pieces[src, tag] = incoming
        self._deliver(incoming)

    def _deliver(self, incoming: Incoming) -> None:
        """Give a message to the earliest receive that it fits; those before, which it matches, fail."""
        match = self.box.match
        while (receive := match(incoming.src, incoming.tag)) is not None:
            if receive.accept(incoming):
                return
        self.box.keep(incoming)

    def _open_pieces(self, incoming: Incoming) -> None:
        head = bytearray(8)
        incoming.handle.Recv([head, 8, self.byte])
        incoming.handle = None
        incoming.nbytes = wire.unpack_size(head)
        incoming.code -= wire.ARRAY_IN_PIECES
        incoming.parts = []
        self._in_pieces[incoming.src, incoming.tag] = incoming

    def _add_piece(self, handle: Any, src: int, tag: int, nbytes: int) -> None:
        incoming = self._in_pieces[src, tag]
        assert incoming.parts is not None
        incoming.parts.append((handle, nbytes))

    def probed(self, incoming: Incoming) -> ProbedMessage:
        """Hold a message for its own `recv`."""
        self._probed.add(incoming)
        incoming.probed = ProbedMessage(self, incoming)
        return incoming.probed

    def give_back(self, incoming: Incoming) -> None:
        """A cancelled receive returns its message: the next one gets it, in the old order."""
        if incoming.order == 0:
            incoming.order = self.box.next_order()
        self.box.restore(incoming)
        while incoming.order > 0 and (waiting := self.box.match(incoming.src, incoming.tag)) is not None:
            self._claim(incoming, waiting)

    # ------------------------------------------------------------------ collectives

    def post(
        self,
        op: str,
        program: Program,
        details: Callable[[], str],
        *arguments: Any,
        kind: type[W] = Collective,  # type: ignore[assignment]  # a default of a type variable
    ) -> W:
        """Post a collective, in program order; the arguments are checked."""
        if self.broken:
            self.check_usable(op)
        loop = running_loop()
        task = None if loop is None else current_task(loop)
        collectives = self.collectives
        while collectives and collectives[0]._done and collectives[0]._steps is None:
            collectives.popleft()
        if collectives:
            check_task(self, op, task)
        single = hasattr(program, "is_single_step")
        steps = program(self.transport, *arguments)
        if self.check is not None:
            steps, single = self.check(self, op, details, steps), False
        work = kind(self, op, steps, details)
        work.task = task
        work._place = user_place()
        with self.engine.lock:
            self.sequence += 1
            work.sequence = self.sequence
            self.recent.append((op, work._place))
            collectives.append(work)
            if self._running is not None or self._queue:
                work.is_queued = True
                self._queue.append(work)
            else:
                if not single:
                    self._running = work
                work._start()
        self.engine.ensure_ticking()
        return work

    def post_direct(
        self,
        op: str,
        words: Words,
        result: Any,
        call: Callable[..., Request],
        *arguments: Any,
        caller: int = CALLER,
    ) -> Collective[Any]:
        """Post a collective that is one call of MPI, whose result is known; the arguments are checked."""
        if self._running is not None or self._queue or self.check is not None or self.broken:
            describe, *rest = words
            return self.post(op, one_call, partial(describe, *rest), call, arguments, result)
        loop = running_loop()
        task = None if loop is None else current_task(loop)
        collectives = self.collectives
        if collectives:
            while collectives and collectives[0]._done and collectives[0]._steps is None:
                collectives.popleft()
            if collectives:
                check_task(self, op, task)
        work = Direct(self, op, result, words, task)
        frame = sys._getframe(caller)
        work._place = place = (frame.f_code, frame.f_lasti)
        engine = self.engine
        lock = engine.lock
        lock.acquire()
        try:
            work._request = call(*arguments)
            self.sequence += 1
            work.sequence = self.sequence
            self.recent.append((op, place))
            collectives.append(work)
            engine.active.append(work)
        finally:
            lock.release()
        flags = self.flags
        for peer in self.peers:
            if flags[peer]:
                engine.doorbell.ring(peer)
        if engine.doorbell.has_rung:
            engine.doorbell.give_way()
        if not engine._ticking:
            engine.ensure_ticking()
        return work

    def post_apart(self, work: W) -> W:
        """Post a program that has no place in the order of this channel's collectives."""
        with self.engine.lock:
            work._start()
        self.engine.ensure_ticking()
        return work

    def ended(self, work: Collective[Any]) -> None:
        """A collective has posted its last step: the next may start."""
        if self._running is work:
            self._running = None
            if self._queue:
                self.engine.later.append(self._queue[0])

    def advance_queue(self) -> None:
        """Look at the collective that the others wait for, and start what may start."""
        if self._running is not None:
            self._running._poll()
        while self._queue and self._running is None:
            work = self._queue.popleft()
            self._running = work
            work._start()

    def ring_all(self) -> None:
        """Wake the members that sleep: a collective has moved on."""
        self.engine.doorbell.ring_sleepers(self.peers)
        if self.engine.doorbell.has_rung:
            self.engine.doorbell.give_way()

    # ------------------------------------------------------------------ state

    def pending(self) -> Iterator[Work[Any]]:
        """Works of this communicator that wait outside the Engine's own tables."""
        yield from self.box.waiting()
        yield from (work for work in list(self.collectives) if not work._done and work.is_queued)

    def unfinished(self) -> list[Work[Any]]:
        """All pending Works of this communicator, but its closing."""
        return [work for work in self.engine.pending() if work._channel is self and work.op != "close"]

    def unclaimed(self) -> list[str]:
        """Messages that were sent to this rank and that nobody received, described."""
        return [message.describe() for message in [*self.box.unclaimed(), *self._probed]]

    def check_usable(self, op: str) -> None:
        """Raise ClosedError if a collective timed out or the order was broken here."""
        if self.broken:
            raise ClosedError(f"{op} on {self.where()}: this communicator cannot be used any more: {self.broken}")

    def close(self, why: str) -> None:
        """Refuse further use, and end what waits; the transport is freed unless something is pending on it."""
        engine = self.engine
        with engine.lock:
            if self in engine.channels:
                engine.channels.remove(self)
                engine.closed.append((self.name, self.world_ranks, self.sequence))
            if self in engine.listening:
                engine.listening.remove(self)
            for work in [*self.box.waiting(), *self._queue]:
                work._desert(ClosedError(f"{work.describe()} ended, because the communicator was closed: {why}"))
            self._queue.clear()
        if not self.unfinished():
            self.transport.free()
        self.refuse(why)
        engine.flush()

    def refuse(self, why: str) -> None:
        """Refuse further use, for this reason."""
        self.broken = why
        self.isend = self._closed
        self.__class__ = ClosedChannel

    def _closed(self, *_: object, **__: object) -> Any:
        raise ClosedError(f"communicator {self.where()} cannot be used: {self.broken}")

    @property
    def is_closed(self) -> bool:
        return False


class ClosedChannel(Channel):
    """A channel that refuses everything, as another class: open ones need no check on the hot path."""

    @property
    def is_closed(self) -> bool:
        return True

    send = send_frames = receive = receive_probed = post = post_apart = Channel._closed
