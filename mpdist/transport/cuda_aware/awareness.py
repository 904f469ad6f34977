"""Awareness: what this process's MPI may be given of a GPU's memory, found out when its first array comes.

A trial takes seconds, so it is made in a thread, by one process of a user at a time, and
once for an installation: until its answers are there everything is staged.

Ranks need not agree. A message is the same for MPI wherever the array is that it comes
from or goes to; and so is a collective, if each rank makes the same calls of MPI, of the
same sizes, for whatever it does with its arrays before and after. comm/ways.py sees to
that: only what would be MPI's own call anyway is given to MPI as it is. The trial shows
that ranks with their arrays here and there get along.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from mpdist.transport.cuda_aware.table import Answer, Finding, Table

if TYPE_CHECKING:
    from mpdist.memory import Device
    from mpdist.transport.cuda_aware.question import Question


class Awareness:
    """The tables of this process, one for each GPU."""

    def __init__(self, word: str = "no") -> None:
        """Take MPDIST_CUDA_AWARE, as Config has it."""
        self._word = word
        self._tables: dict[Device, Table] = {}
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def takes(self, op: str, device: Device) -> bool:
        """Whether MPI may be given arrays of this GPU for an operation; never blocks for long."""
        table = self._tables.get(device)
        if table is None:
            table = self._open(device)
        return table.get(op) is Answer.OK

    def close(self) -> None:
        """Break off what is still being tried."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _open(self, device: Device) -> Table:
        with self._lock:
            if self._word == "no":
                self._tables[device] = {}
            if device not in self._tables:
                from mpdist.transport.cuda_aware.question import Question

                question = Question(self._word, device)
                kept = question.known()
                self._tables[device] = question.table(Finding({}) if kept is None else kept)
                if kept is None:
                    name = f"mpdist-cuda-aware-{device.index}"
                    self._threads.append(threading.Thread(target=self._find, args=(question,), name=name, daemon=True))
                    self._threads[-1].start()
            return self._tables[device]

    def _find(self, question: Question) -> None:
        finding, is_new = question.tried(self._is_over)
        self._tables[question.device] = question.table(finding)
        if is_new and not self._is_over.is_set():
            from mpdist.transport.cuda_aware.question import tell

            tell(finding)
