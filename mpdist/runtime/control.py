"""Control: a thread per rank that finds out why an operation does not end.

It asks the other ranks' control threads, on a communicator of their own, so that
it gets an answer even while their main threads compute or sleep. It reports what
takes long, fails what is past its limit, and notices when this rank waits for what
only finished ranks could give. A rank that does not answer is never held for dead.

    watch      finds the operations that are late
    inquiries  ask the ranks concerned, for a second at most
    stuck      finds waits for ranks that have finished
    diagnosis  makes words of the answers
"""

from __future__ import annotations

import math
import os
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from time import monotonic
from typing import TYPE_CHECKING, Any

from mpdist.config import Config
from mpdist.errors import MpdistError, WorkTimeout
from mpdist.runtime import diagnosis
from mpdist.runtime.answers import operation_of, posted_collectives
from mpdist.runtime.diagnosis import MOST_OPERATIONS
from mpdist.runtime.inquiries import ANSWER_SECONDS, Inquiries, Inquiry
from mpdist.runtime.last_words import write_error
from mpdist.runtime.mail import Mail
from mpdist.runtime.records import Answers, Operation
from mpdist.runtime.stuck import Stuck
from mpdist.runtime.watch import LONGEST_SCAN, Watch, effective_limit

if TYPE_CHECKING:
    from mpdist.progress.engine import Engine
    from mpdist.progress.work import Work
    from mpdist.transport.mpi import Transport

# How often to look for letters: usually, where a turn costs a core 0.2 ms; while an answer is expected.
POLL_SECONDS, ASKING_SECONDS = 0.05, 0.002

# After a letter for a handler more are likely.
LIVELY_SECONDS = 0.25

# The least time for answers about an operation whose limit is short.
SHORTEST_ANSWER_SECONDS = 0.25

# Ranks that end at nearly the same time need not hear of it: a letter from each to all is their number squared.
ANNOUNCE_SECONDS = 0.25

# The engine's lock is held for long only while MPI makes a communicator.
LOCK_SECONDS = 0.05

MOST_TABLE = 200

# What goes wrong in each turn is not to fill the screen.
MOST_FAILURES = 3

Pair = tuple["Work[Any]", Operation]


class Control:
    """The control thread of this rank.

    Attributes:
        finished: world ranks whose main program has ended -> by communicator, how many collectives they posted.
        handlers: for a letter with this key: who is given sender and letter, on this thread.
        expected: how many answers handlers wait for; while there are any, letters are looked for often.
    """

    def __init__(
        self, engine: Engine, transport: Transport | None, config: Config, on_stuck: Callable[[str], None]
    ) -> None:
        """Watch an Engine.

        Args:
            transport: of its own, over all ranks; None where there is one rank, or MPI allows no threads:
                then limits are kept, and nobody is asked.
            on_stuck: called once, on this thread, with the reason, when only finished ranks could set this one going.
        """
        self.finished: dict[int, Mapping[str, int]] = {}
        self.handlers: dict[str, Callable[[int, dict[str, Any]], None]] = {}
        self.expected = 0
        self._unhandled: list[tuple[int, dict[str, Any]]] = []  # their handler is still to come
        # Held, not inherited from: its private names, of which Python adds new ones, are not to meet ours.
        self._thread = threading.Thread(target=self._run, name="mpdist-control", daemon=True)
        self._engine = engine
        self._mail = None if transport is None else Mail(transport)
        self._rank = engine.meeting.rank
        self._is_alone = engine.meeting.size == 1
        self._config = config
        self._watch = Watch(engine, config)
        self._wake = threading.Event()
        self._wakes_at = 0.0
        self._ending = False
        self._starting = threading.Lock()
        self._owner_pid = os.getpid()
        self._announce_at = math.inf
        self._inquiries = Inquiries(engine, self._mail)
        self._stuck = Stuck(engine, self._inquiries, self.finished, on_stuck)
        self._failing: list[tuple[Work[Any], MpdistError]] = []
        self._outbox: deque[tuple[int, dict[str, Any]]] = deque()  # filled by any thread
        self._lively_until = 0.0
        self._failures = 0
        engine.on_limit = self._limit_changed

    # ------------------------------------------------------------------ from other threads

    def start(self) -> None:
        """Start; a lone rank that reports nothing starts its thread with the first limit that is set."""
        if not self._is_alone or self._config.report_after > 0:
            self._thread.start()

    def announce_finished(self) -> None:
        """This rank's main program has ended: all ranks are told, if the job goes on."""
        self._inquiries.is_finished = True
        self._announce_at = monotonic() + ANNOUNCE_SECONDS
        self._wake.set()

    @property
    def can_mail(self) -> bool:
        """Whether there are other ranks, and their control threads can be written to."""
        return self._mail is not None

    def mail(self, rank: int, letter: dict[str, Any]) -> None:
        """Send a letter for `handlers` of that rank; an answer to it is looked for often."""
        self._outbox.append((rank, letter))
        self._wake.set()

    def stop(self) -> None:
        """End the thread; when this returns it makes no MPI call any more."""
        self._engine.on_limit = None
        self._ending = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _limit_changed(self, work: Work[Any] | None) -> None:
        """The Engine's hook: a Work has got a limit, or a communicator a timeout."""
        if os.getpid() != self._owner_pid:
            return
        if work is None:
            self._watch.timeouts_changed()
            self._wake.set()
        elif self._watch.limit(work) < self._wakes_at:
            self._wake.set()
        if self._is_alone and not self._thread.is_alive():
            with self._starting:
                if self._thread.ident is None:
                    self._thread.start()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        """Look for letters and late operations until `stop`."""
        while not self._ending:
            try:
                self._turn()
            except Exception:  # all limits depend on this thread
                self._keep_limits()
            self._sleep()
        if self._mail is not None:
            self._mail.close()

    def _keep_limits(self) -> None:
        """The turn has failed: what is past its limit fails all the same, though nobody says whom it waits for."""
        self._failures += 1
        if self._failures <= MOST_FAILURES:
            last = "; nothing is said of it any more" if self._failures == MOST_FAILURES else ""
            what = f"mpdist: rank {self._rank}: the diagnosis has failed, limits are kept without it{last}:"
            write_error(f"{what}\n{traceback.format_exc().rstrip()}")
        for work in self._watch.overdue():
            limit = effective_limit(work, self._config)
            self._failing.append((work, WorkTimeout(f"{work.describe()} is not done after {limit:g} s", work=work)))
        self._fail_expired()

    def _sleep(self) -> None:
        if self._inquiries or self._failing or self.expected or monotonic() < self._lively_until:
            seconds = ASKING_SECONDS
        elif self._is_alone:
            seconds = LONGEST_SCAN
        else:
            seconds = POLL_SECONDS
        now = monotonic()
        self._wakes_at = min(now + seconds, self._watch.next_look)
        if self._wake.wait(max(self._wakes_at - now, 0.001)):
            self._wake.clear()

    def _turn(self) -> None:
        self._engine.attend_all()
        if self._mail is not None:
            for sender, letter in self._mail.received():
                self._read(self._mail, sender, letter)
            self._handle()
            self._send_posted(self._mail)
            self._mail.settle()
            if monotonic() >= self._announce_at:
                self._announce(self._mail)
        late = self._watch.look()
        if late.expired:
            self._inquire_expired(late.expired)
        if late.long:
            self._inquire_long(late.long)
        self._stuck.look()
        self._inquiries.conclude()
        self._fail_expired()

    # ------------------------------------------------------------------ letters

    def _read(self, mail: Mail, sender: int, letter: dict[str, Any]) -> None:
        if self._inquiries.read(mail, sender, letter):
            return
        if "finished" in letter:
            self.finished[sender] = letter["finished"]
        else:
            self._lively_until = monotonic() + LIVELY_SECONDS
            self._unhandled.append((sender, letter))

    def _handle(self) -> None:
        """Give letters to their handlers; those that nobody handles yet are kept."""
        letters, self._unhandled = self._unhandled, []
        for sender, letter in letters:
            handler = next((self.handlers[key] for key in letter if key in self.handlers), None)
            if handler is None:
                self._unhandled.append((sender, letter))
                continue
            try:
                handler(sender, letter)
            except Exception:  # of one letter: all waits depend on this thread
                what = f"mpdist: rank {self._rank}: a letter of rank {sender} is dropped:"
                write_error(f"{what}\n{traceback.format_exc().rstrip()}")

    def _send_posted(self, mail: Mail) -> None:
        while self._outbox:
            self._lively_until = monotonic() + LIVELY_SECONDS
            mail.send(*self._outbox.popleft())

    def _announce(self, mail: Mail) -> None:
        self._announce_at = math.inf
        table = dict(list(posted_collectives(self._engine).items())[-MOST_TABLE:])
        for rank in range(mail.size):
            if rank != self._rank:
                mail.send(rank, {"finished": table})

    # ------------------------------------------------------------------ past the limit

    def _inquire_expired(self, works: Sequence[Work[Any]]) -> None:
        """Ask once for each communicator, then fail its operations."""
        for channel in {work._channel for work in works}:
            here = [work for work in works if work._channel is channel]
            shortest = min(effective_limit(work, self._config) for work in here)
            seconds = min(max(shortest, SHORTEST_ANSWER_SECONDS), ANSWER_SECONDS)
            operations = [operation_of(work) for work in here]
            peers = {peer for operation in operations for peer in operation.peers}

            def fail(inquiry: Inquiry, pairs: Sequence[Pair] = tuple(zip(here, operations, strict=True))) -> None:
                self._failing += [self._timeout(work, operation, inquiry) for work, operation in pairs]

            self._inquiries.ask(operations, peers, fail, seconds)

    def _timeout(self, work: Work[Any], operation: Operation, inquiry: Inquiry) -> tuple[Work[Any], WorkTimeout]:
        limit = effective_limit(work, self._config)
        can_ask = self._mail is not None or self._is_alone
        text = diagnosis.timeout_text(operation, limit, inquiry.answers if can_ask else None)
        late = [operation.rank_in(rank) for rank in diagnosis.missing(operation, inquiry.answers)]
        return work, WorkTimeout(text, work, late)

    def _fail_expired(self) -> None:
        if not self._failing or not self._engine.lock.acquire(timeout=LOCK_SECONDS):
            return
        try:
            failing, self._failing = self._failing, []
            _expire_all(failing)
        finally:
            self._engine.lock.release()
        self._engine.flush()

    # ------------------------------------------------------------------ taking long

    def _inquire_long(self, works: Sequence[Work[Any]]) -> None:
        first = sorted(works, key=lambda work: (work.sequence == 0, work.sequence))[:MOST_OPERATIONS]
        pairs = [(work, operation_of(work)) for work in first]
        self._find_spokesman(pairs, len(works) - len(first), {self._rank}, {})

    def _find_spokesman(self, pairs: Sequence[Pair], more: int, asked: Set[int], answers: Answers) -> None:
        """Ask lower ranks, ever more of them, until one reports the same; if none does ask all others, and report.

        A collective that ranks call differently can never end: it fails wherever that is found.
        """
        mine = [pair for pair in pairs if not pair[0]._done and self._is_spokesman(pair[1], answers)]
        operations = [operation for _, operation in mine]
        if not mine:
            return
        lower = diagnosis.next_lower(operations, self._rank, asked)

        def go_on(inquiry: Inquiry) -> None:
            if lower:
                self._find_spokesman(mine, more, asked | set(lower), inquiry.answers)
            else:
                self._report(inquiry, mine, more)
            errors = ((work, diagnosis.mismatch(operation, inquiry.answers)) for work, operation in mine)
            self._failing += [(work, error) for work, error in errors if error is not None]

        rest = lower or {peer for operation in operations for peer in operation.peers} - asked
        self._inquiries.ask(operations, rest, go_on, known=answers)

    def _is_spokesman(self, operation: Operation, answers: Answers) -> bool:
        return diagnosis.is_spokesman(operation, self._rank, answers, self._config.report_after)

    def _report(self, inquiry: Inquiry, pairs: Sequence[Pair], more: int) -> None:
        told = [pair for pair in pairs if not pair[0]._done and self._is_spokesman(pair[1], inquiry.answers)]
        if told:
            operations = [operation for _, operation in told]
            text = diagnosis.report(socket.gethostname(), self._rank, operations, inquiry.answers, more)
            write_error(text)


def _expire_all(failing: Sequence[tuple[Work[Any], MpdistError]]) -> None:
    for work, error in failing:
        if not work._done:
            work._expire(error)
