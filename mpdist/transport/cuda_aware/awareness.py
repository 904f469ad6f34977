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

import os
import sys
import threading
from importlib import metadata
from typing import TYPE_CHECKING

from mpdist.errors import Unavailable
from mpdist.memory.accelerator import accelerator_of
from mpdist.transport.cuda_aware.cache import Cache, Installation
from mpdist.transport.cuda_aware.library import cuda_support, library_path
from mpdist.transport.cuda_aware.probe import probe, settings
from mpdist.transport.cuda_aware.table import Answer, Finding, Table, decide, needs_trial, text_of, to_try

if TYPE_CHECKING:
    from mpdist.memory import Device

_BAD = (Answer.CRASHES, Answer.FAILS, Answer.HANGS)


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
            if device not in self._tables:
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
            _tell(finding)


class Question:
    """Which operations of this process's MPI may be given the memory of one GPU.

    Attributes:
        says: what the library says of itself: yes, no or unknown.
    """

    def __init__(self, word: str, device: Device) -> None:
        """MPI is running."""
        from mpdist.transport import mpi

        self._word = word
        self.device = device
        self._library = library_path()
        self._family = mpi.family()
        self.says = cuda_support(self._library)
        self.needs_trial = needs_trial(word, self.says)
        self._version = mpi.library_version()

    def known(self) -> Finding | None:
        """What needs no trial, or no new one; None else."""
        return self._cache().load() if self.needs_trial else Finding({})

    def tried(self, is_over: threading.Event) -> tuple[Finding, bool]:
        """What a trial shows, and whether it was made just now."""
        cache = self._cache()
        with cache.alone(is_over):
            kept = cache.load()
            if kept is not None:
                return kept, False
            finding = probe(self._library, self.device.index, to_try(self._family), is_over)
            if not is_over.is_set():
                cache.store(finding)
            return finding, True

    def table(self, finding: Finding) -> Table:
        """The answers."""
        return decide(self._word, self.says, self._family, finding.answers)

    def _cache(self) -> Cache:
        device = accelerator_of(self.device).describe()
        mpi4py = metadata.version("mpi4py")
        return Cache(Installation.of(self._library, self._version, mpi4py, device, settings(os.environ)))


def _tell(finding: Finding) -> None:
    """That arrays are staged though MPI is said to take them."""
    bad = {op: answer for op, answer in finding.answers.items() if answer in _BAD}
    if finding.problem:
        reason = f"a trial showed {'nothing' if not finding.answers else 'not all'}: {finding.problem}"
    elif bad:
        reason = f"a trial showed that it does not for all ({text_of(bad)})"
    else:
        return
    print(
        f"mpdist: MPI is said to take the memory of GPUs, but {reason}; such arrays go through host memory",
        file=sys.stderr,
    )


def described(word: str, device: Device) -> str:
    """The answers for one GPU in words, after a trial if one is needed: for `mpdist info`."""
    question = Question(word, device)
    try:
        finding = question.known()
        if finding is None:
            finding, _ = question.tried(threading.Event())
    except Unavailable as error:
        return f"not tried: {error}"
    problem = f" ({finding.problem})" if finding.problem else ""
    return text_of(question.table(finding)) + problem
