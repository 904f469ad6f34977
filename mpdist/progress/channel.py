"""Channel: one communicator's share of the Engine, and the order of its collectives.

Collectives match by their order, so one of several steps holds back those after
it until it has posted its last step. Messages: `sending.py` and `inbox.py`.
"""

from __future__ import annotations

import asyncio.tasks
import sys
from asyncio import _get_running_loop as running_loop
from asyncio import current_task
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import starmap
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from mpdist.errors import ClosedError
from mpdist.progress import wire
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
from mpdist.progress.fastbox import Fastbox, Fastboxes
from mpdist.progress.inbox import Inbox
from mpdist.progress.interruption import is_interruption
from mpdist.progress.work import Work

if TYPE_CHECKING:
    from mpdist.progress.engine import Engine
    from mpdist.progress.outbox import Outbox
    from mpdist.progress.roll import Signer
    from mpdist.progress.shown.showing import Showing
    from mpdist.transport.mpi import Transport
    from mpdist.transport.requests import Request

W = TypeVar("W", bound=Collective[Any])


class Team(Protocol):
    """What members of a communicator share in memory."""

    def close(self, together: bool) -> None:
        """Give it back; not together: while others may still use it."""


Check = Callable[["Channel", str, Callable[[], str], Steps[Any], Sequence[object]], Steps[Any]]
"""Wraps the steps of a collective with these arguments, to compare it between ranks first."""

# The user's frame, seen from `post_direct` called by a method of Communicator inside its `operation` wrapper.
CALLER = 3

# The task that each loop runs. Python 3.11 asks the kernel for the process's number each time `current_task` looks for
# the running loop, which takes 0.2 us. Where Python keeps its tasks elsewhere this stays empty, and is not believed.
known_tasks: dict[asyncio.AbstractEventLoop | None, asyncio.Task[Any]] = getattr(asyncio.tasks, "_current_tasks", {})


def running_task() -> asyncio.Task[Any] | None:
    """The task that this thread's loop runs; None outside tasks."""
    loop = running_loop()
    return None if loop is None else current_task(loop)


# So many collectives a channel remembers after they are over, for the diagnosis.
RECENT = 16


class Channel:
    """What the Engine knows of one communicator.

    Attributes:
        name: for texts, and the same on all members, so that ranks can speak about it.
        world_ranks: the members' ranks in the world.
        peers: the same without this rank.
        addressed: the members to which this one has sent, numbered as here.
        opened: the fastboxes into which small arrays may be put, by member.
        fastboxes: all of them.
        inbox: its messages and receives.
        sequence: number of collectives posted so far.
        recent: name, words and place of the last of them.
        timeout: seconds a collective may take; None: the job's default; 0: for ever.
        broken: why it refuses further use; empty while it does not.
        is_ending: because the job ends: who iterates over messages is at their end.
        team: what its members share in memory, kept for the algorithms that do.
        few: the same, of a few numbers.
        at_once: this again, where all_reduces of such numbers may go without asking for anything else.
        devices: the same of their devices.
        teller: who tells the others as what this member comes to a collective, where they want to know.
        showing: how messages go from device to device; made for the first that may.
        has_met, has_met_for_few: whether they have tried to share.
        advice: what to look at where its collectives wait in vain.
        outbox: messages that wait for their data; made for the first of them.
        signer: compares its collectives with those of other ranks of the node; None where there is nothing to compare.
    """

    advice = ""
    outbox: Outbox | None = None
    signer: Signer | None = None
    devices: Team | None = None
    teller: object = None
    showing: Showing | None = None
    is_ending = False

    def __init__(self, engine: Engine, transport: Transport, name: str, world_ranks: Sequence[int]) -> None:
        self.engine = engine
        self.transport = transport
        self.name = name
        self.rank = transport.rank
        self.size = transport.size
        self.world_ranks = tuple(world_ranks)
        self.addressed: set[int] = set()
        self.peers = tuple(rank for place, rank in enumerate(self.world_ranks) if place != self.rank)
        # From Python 3.12 on a loop over one peer would jump back without the `try` in which it is.
        self._peer = self.peers[0] if len(self.peers) == 1 else None
        self.max_tag = wire.max_tag(transport.max_tag)
        self.sequence = 0
        self.recent: deque[tuple[str, Words, Place | None]] = deque(maxlen=RECENT)
        self.timeout: float | None = None
        self.broken = ""
        self.collectives: deque[Collective[Any]] = deque()
        self.check: Check | None = None
        self.team: Team | None = None
        self.has_met = False
        self.few: Team | None = None
        self.at_once: Any = None  # of a type of a higher level
        self.has_met_for_few = False
        self._running: Collective[Any] | None = None  # of several steps
        self._queue: deque[Collective[Any]] = deque()
        self.isend = transport.isend
        self.byte = transport.byte
        self.flags = engine.doorbell.flags
        self.opened: dict[int, Fastbox] = {}
        self.fastboxes = Fastboxes(self)
        self.inbox = Inbox(self)
        engine.channels.append(self)

    def where(self) -> str:
        """`'world' (rank 0 of 4)`."""
        return f"'{self.name}' (rank {self.rank} of {self.size})"

    def ring(self, rank: int) -> None:
        """Wake the member if it sleeps: something happened that it may wait for."""
        peer = self.world_ranks[rank]
        doorbell = self.engine.doorbell
        if doorbell.flags[peer]:
            doorbell.ring(peer)

    # ------------------------------------------------------------------ collectives

    def post(
        self,
        op: str,
        program: Program,
        details: Callable[[], str],
        *arguments: Any,
        kind: type[W] = Collective,  # type: ignore[assignment]  # a default of a type variable
        is_unchecked: bool | None = None,
    ) -> W:
        """Post a collective, in program order; the arguments are checked.

        Args:
            details: makes its text; it keeps no array alive, for it is remembered longer than the collective.
            is_unchecked: whether it compares nothing by itself; if not said, those of a single step, MPI's own.
        """
        if self.broken:
            self.check_usable(op)
        task = running_task()
        if self.collectives:
            check_task(self, op, task)
        single = hasattr(program, "is_single_step")
        steps = program(self.transport, *arguments)
        if self.check is not None:
            steps, single = self.check(self, op, details, steps, arguments), False
        work = kind(self, op, steps, details)
        work.task = task
        work._place = user_place()
        unchecked = single if is_unchecked is None else is_unchecked
        try:
            with self.engine.lock:
                if self.signer is not None and op != "close":  # a rank may close what others are still about to use
                    self.signer.sign_made(self.sequence + 1, op, details, unchecked)
                self.sequence += 1
                work.sequence = self.sequence
                self.recent.append((op, (details,), work._place))
                self.collectives.append(work)
                if self._running is not None or self._queue:
                    work.is_queued = True
                    self._queue.append(work)
                else:
                    if not single:
                        self._running = work
                    work._start()
            self.hand_out()  # a close that is over at once has ended others
            self.engine.ticking.stir()
        except BaseException:  # of a signal's handler
            if work.sequence:
                if work._steps is not None and not work.is_queued and work not in self.engine.active:
                    self.engine.active.append(work)
                self.lost_hold_of(op)
            elif self.signer is not None:
                self.signer.take_back(self.sequence + 1)
            raise
        return work

    def post_direct(
        self,
        op: str,
        words: Words,
        result: Any,
        call: Callable[..., Request],
        *arguments: Any,
        caller: int = CALLER,
        is_unchecked: bool | None = True,
    ) -> Collective[Any]:
        """Post a collective that is one call, whose result is known; the arguments are checked.

        Args:
            is_unchecked: whether it compares nothing by itself, as MPI's own; None: so, and nor is it compared here.
        """
        if self._running is not None or self._queue or self.check is not None or self.broken:
            return self._post_indirect(op, words, result, call, arguments, is_unchecked)
        engine = self.engine
        ticking = engine.ticking
        task = known_tasks.get(ticking.loop) if ticking.thread == get_ident() else None
        if task is None:
            task = running_task()
        collectives = self.collectives
        if collectives:
            check_task(self, op, task)
        work = Direct(self, op, result, words, task)
        frame = sys._getframe(caller)
        work._place = place = (frame.f_code, frame.f_lasti)
        try:
            with engine.lock:
                if self._running is not None or self._queue:  # by another thread, since it was looked at
                    return self._post_indirect(op, words, result, call, arguments, is_unchecked)
                if self.signer is not None and is_unchecked is not None:
                    self.signer.sign(self.sequence + 1, (op, words, is_unchecked))
                try:
                    # Held at once: after a call of a class a handler could raise, and others know of the request.
                    [work._request] = starmap(call, (arguments,))
                except BaseException as error:  # MPI's, or of a signal's handler
                    self._not_posted(work, call, arguments, error)
                    raise
                self.sequence += 1
                work.sequence = self.sequence
                self.recent.append((op, words, place))
                collectives.append(work)
                engine.active.append(work)
            if self._peer is None:
                self.ring_all()
            elif self.flags[self._peer]:
                engine.doorbell.ring(self._peer)
                if engine.doorbell.has_rung:
                    engine.doorbell.give_way()
            if ticking.is_asleep or not ticking.is_on:
                ticking.stir()
        except BaseException:  # of a signal's handler
            if work.sequence:
                if work not in engine.active:
                    engine.active.append(work)
                self.lost_hold_of(op)
            raise
        return work

    def _not_posted(
        self, work: Direct[Any], call: Callable[..., Request], arguments: object, error: BaseException
    ) -> None:
        """The call has raised; where a signal's handler did, MPI may have it nevertheless, which nobody can see."""
        if self.signer is not None:
            self.signer.take_back(self.sequence + 1)
        if getattr(call, "__self__", None) is self.transport and is_interruption(error):
            work._left = arguments
            self.engine.wrecks.append(work)
            self.lost_hold_of(work.op)

    def lost_hold_of(self, op: str) -> None:
        """A signal's handler has raised when others knew of a collective, or may have, and its caller has no Work."""
        self.give_up(f"a signal's handler has interrupted {op} while it was posted, so its ranks may be out of step")

    def _post_indirect(
        self,
        op: str,
        words: Words,
        result: Any,
        call: Callable[..., Request],
        arguments: tuple[Any, ...],
        is_unchecked: bool | None,
    ) -> Collective[Any]:
        describe, *rest = words
        details = partial(describe, *rest)
        return self.post(op, one_call, details, call, arguments, result, is_unchecked=bool(is_unchecked))

    def post_apart(self, work: W) -> W:
        """Post a program that has no place in the order of this channel's collectives."""
        work.is_apart = True
        work._place = user_place()
        with self.engine.lock:
            work._start()
        self.engine.ticking.stir()
        return work

    def ended(self, work: Collective[Any]) -> None:
        """A collective has posted its last step: the next may start."""
        if self._running is work:
            if self._queue:
                self.engine.later.append(self._queue[0])
            self._running = None  # last: a signal's handler may raise before it, and this is called again

    def queued(self) -> list[Collective[Any]]:
        """Collectives that wait for their turn."""
        return list(self._queue)

    @property
    def turn(self) -> int:
        """Number of the collective of several steps whose turn it is."""
        assert self._running is not None
        return self._running.sequence

    def advance_queue(self) -> None:
        """Look at the collective that the others wait for, and start what may start."""
        running = self._running
        if running is not None:
            if running.is_queued:  # a signal's handler came before its start
                running._start()
            else:
                running._poll()
        while self._queue and self._running is None:
            self._running = work = self._queue[0]
            del self._queue[0]
            work._start()

    def ring_all(self) -> None:
        """Wake the members that sleep: a collective has moved on."""
        self.engine.doorbell.ring_sleepers(self.peers)
        if self.engine.doorbell.has_rung:
            self.engine.doorbell.give_way()

    # ------------------------------------------------------------------ state

    def pending(self) -> Iterator[Work[Any]]:
        """Works of this communicator that wait outside the Engine's own tables."""
        yield from self.inbox.box.waiting()
        yield from (work for work in list(self.collectives) if not work._done and work.is_queued)

    def unfinished(self) -> list[Work[Any]]:
        """All pending Works of this communicator, but its closing."""
        return [work for work in self.engine.pending() if work._channel is self and work.op != "close"]

    def abandoned_sends(self) -> list[Work[Any]]:
        """Pending sends that perhaps nobody can await any more."""
        works = self.unfinished()
        return [work for work in works if work._is_abandoned and not isinstance(work, Collective)]

    def under_way(self) -> list[Work[Any]]:
        """Works of this communicator with which MPI is not done, whatever became of them, but its closing."""
        works: list[Work[Any]] = [*self.engine.active, *self.engine.later]
        return [work for work in works if work._channel is self and work.op != "close" and _is_under_way(work)]

    def check_usable(self, op: str) -> None:
        """Raise ClosedError if a collective timed out or the order was broken here."""
        if self.broken:
            raise self.unusable(op)

    def unusable(self, op: str) -> ClosedError:
        """What an operation raises where use is refused."""
        return ClosedError(f"{op} on {self.where()}: this communicator cannot be used any more: {self.broken}")

    def close(self, why: str, together: bool = False) -> None:
        """Refuse further use, and end what waits.

        Args:
            together: all members are done with the communicator. Only then is it given back to MPI: MPICH gives its
                number to the next one, where messages of members that are not done yet would match.
        """
        engine = self.engine
        with engine.lock:
            if self in engine.channels:
                engine.channels.remove(self)
                begun = self.sequence - len(self._queue)  # what waits ends now, though others may have begun it
                engine.closed.append((self.name, self.world_ranks, begun))
            if self.inbox in engine.listening:
                engine.listening.remove(self.inbox)
            self.end_waiting(why)
        self.fastboxes.close()
        if self.team is not None:
            self.team.close(together)
            self.team = None
        if self.few is not None:
            self.few.close(together)
            self.few = None
        if self.devices is not None:
            self.devices.close(together)
            self.devices = None
        if self.showing is not None:
            self.showing.close(together)  # and stays: what is still pending may take what others show
        if together and not self.unfinished():
            self.transport.free()
        self.refuse(why)
        self.hand_out()

    def hand_out(self) -> None:
        """Have callbacks called; where this thread holds the lock, whoever drives does so after its release."""
        engine = self.engine
        if engine.finished and not engine.lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            engine.flush()

    def end_waiting(self, why: str) -> None:
        """Receives that no message has met, and collectives that have not begun, end with ClosedError."""
        for work in [*self.inbox.box.waiting(), *self._queue]:
            work._desert(ClosedError(f"{work.describe()} ended, because the communicator was closed: {why}"))
        self._queue.clear()

    def give_up(self, why: str) -> None:
        """Refuse further use, for this reason, but to be closed; what is pending goes on."""
        self.at_once = None
        self.broken = why
        self.isend = self._refuse_to_send
        self.opened = {}
        self.fastboxes.end()
        self.inbox.close()

    def refuse(self, why: str) -> None:
        """Refuse everything, for this reason."""
        self.give_up(why)
        self.flags = bytearray(len(self.flags))  # a send looks at them before it is refused: finalize() unmaps them
        self.__class__ = ClosedChannel

    def _refuse_to_send(self, *_: object) -> Any:
        raise self.unusable("send")

    @property
    def is_closed(self) -> bool:
        return False


class Dropped(NamedTuple):
    """What is left of a communicator that the program cannot reach any more.

    Attributes:
        close: posts its closing.
    """

    channel: Channel
    close: Callable[[], Work[None]]


def _is_under_way(work: Work[Any]) -> bool:
    return not work._done or getattr(work, "_request", None) is not None


class ClosedChannel(Channel):
    """A channel that refuses everything, as another class: open ones need no check on the hot path."""

    @property
    def is_closed(self) -> bool:
        return True

    def post(self, op: str, *_: object, **__: object) -> Any:
        raise self.unusable(op)

    def post_apart(self, work: Work[Any]) -> Any:
        raise self.unusable(work.op)
