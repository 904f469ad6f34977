"""Store service: requests to the table on rank 0, by the control threads' letters.

Rank 0's control thread answers while its main thread computes; no port is opened. A rank that asks sleeps on a lock
until its own control thread has the reply.
"""

from __future__ import annotations

import itertools
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpdist.torch.errors import WrongCall
from mpdist.torch.store_table import Answer, Table

if TYPE_CHECKING:
    from mpdist.runtime.control import Control

SERVER = 0
ASK, TELL, WITHDRAW = "store_ask", "store_tell", "store_withdraw"


class Refused(Exception):
    """Rank 0 cannot carry out a request; the text says why."""


class StoreService:
    """This rank's end of the store; on rank 0 with the table."""

    def __init__(self, control: Control, rank: int, size: int) -> None:
        self._control = control
        self._rank = rank
        self._numbers = itertools.count()
        self._replies: dict[int, Reply] = {}
        self._lock = threading.Lock()  # of the table
        self._table = Table() if rank == SERVER else None
        if size > 1:
            if not control.can_mail:
                raise WrongCall(
                    "a key-value store over MPI needs an MPI that offers MPI_THREAD_MULTIPLE, which this one does not: "
                    "give init_process_group an init_method tcp:// or file://, or a store"
                )
            control.handlers |= {ASK: self._asked, TELL: self._told, WITHDRAW: self._withdrawn}

    def ask(self, op: str, arguments: Sequence[Any], seconds: float) -> Any:
        """The reply to a request.

        Raises:
            TimeoutError: no reply in time: the keys are not there, or rank 0's process is stopped.
            Refused: the request cannot be carried out.
        """
        number = next(self._numbers)
        reply = self._replies[number] = Reply()
        self._control.expected = len(self._replies)
        try:
            self._send(number, op, arguments, reply)
            if not reply.has_come.wait(min(seconds, threading.TIMEOUT_MAX)):
                self._withdraw(number)
                raise TimeoutError
            if reply.problem:
                raise Refused(reply.problem)
            return reply.value
        finally:
            del self._replies[number]
            self._control.expected = len(self._replies)

    def _send(self, number: int, op: str, arguments: Sequence[Any], reply: Reply) -> None:
        if self._table is None:
            self._control.mail(SERVER, {ASK: number, "op": op, "arguments": _packed(arguments)})
            return
        self._serve((SERVER, number), op, arguments, reply.come, reply.refuse)

    def _serve(
        self,
        who: tuple[int, int],
        op: str,
        arguments: Sequence[Any],
        answer: Answer,
        refuse: Callable[[str], object],
    ) -> None:
        """On rank 0. What is wrong with a request is told to who asked: the control thread has other work to do."""
        assert self._table is not None
        with self._lock:
            try:
                self._table.ask(who, op, arguments, answer)
            except Exception as error:
                refuse(f"{type(error).__name__}: {error}")

    def _withdraw(self, number: int) -> None:
        if self._table is None:
            self._control.mail(SERVER, {WITHDRAW: number})
            return
        with self._lock:
            self._table.withdraw((SERVER, number))

    # ------------------------------------------------------------------ letters, on the control thread

    def _asked(self, sender: int, letter: dict[str, Any]) -> None:
        number = letter[ASK]

        def answer(value: Any) -> None:
            self._control.mail(sender, {TELL: number, "value": _packed(value)})

        def refuse(problem: str) -> None:
            self._control.mail(sender, {TELL: number, "problem": problem})

        self._serve((sender, number), letter["op"], _unpacked(letter["arguments"]), answer, refuse)

    def _told(self, sender: int, letter: dict[str, Any]) -> None:
        reply = self._replies.get(letter[TELL])
        if reply is None:  # nobody waits any more
            return
        if "problem" in letter:
            reply.refuse(letter["problem"])
        else:
            reply.come(_unpacked(letter["value"]))

    def _withdrawn(self, sender: int, letter: dict[str, Any]) -> None:
        assert self._table is not None
        with self._lock:
            self._table.withdraw((sender, letter[WITHDRAW]))


class Reply:
    """What a request waits for."""

    def __init__(self) -> None:
        self.has_come = threading.Event()
        self.value: Any = None
        self.problem = ""

    def come(self, value: Any) -> None:
        self.value = value
        self.has_come.set()

    def refuse(self, problem: str) -> None:
        self.problem = problem
        self.has_come.set()


def _packed(value: Any) -> Any:
    """As JSON has it: bytes are a record of their own."""
    if isinstance(value, bytes):
        return {"bytes": b64encode(value).decode()}
    if isinstance(value, list | tuple):
        return [_packed(each) for each in value]
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, dict):
        return b64decode(value["bytes"])
    if isinstance(value, list):
        return [_unpacked(each) for each in value]
    return value
