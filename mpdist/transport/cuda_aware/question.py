"""Question: which operations of this process's MPI may be given the memory of one GPU, and who answers it.

Loaded when the first array of a GPU comes.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

from mpdist.memory.accelerator import accelerator_of
from mpdist.transport.cuda_aware.cache import Cache, Installation
from mpdist.transport.cuda_aware.claim import cuda_support, library_path
from mpdist.transport.cuda_aware.probe import probe, settings
from mpdist.transport.cuda_aware.table import Answer, Finding, Table, decide, needs_trial, text_of, to_try

if TYPE_CHECKING:
    from mpdist.memory import Device

_BAD = (Answer.CRASHES, Answer.FAILS, Answer.HANGS)


class Question:
    """What is asked for one GPU.

    Attributes:
        says: what the library says of itself: yes, no or unknown.
    """

    def __init__(self, word: str, device: Device) -> None:
        """MPI is running."""
        import mpi4py

        from mpdist.transport.mpi import family, library_version

        self._word = word
        self.device = device
        self._library = library_path()
        self._family = family()
        self.says = cuda_support(self._library)
        self.needs_trial = needs_trial(word, self.says)
        self._versions = library_version(), mpi4py.__version__

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
            try:
                finding = probe(self._library, self.device.index, to_try(self._family), is_over)
            except OSError as error:  # no room for its report
                finding = Finding({}, f"{type(error).__name__}: {error}")
            if not is_over.is_set():
                cache.store(finding)
            return finding, True

    def table(self, finding: Finding) -> Table:
        """The answers."""
        return decide(self._word, self.says, self._family, finding.answers)

    def _cache(self) -> Cache:
        device = accelerator_of(self.device).describe()
        return Cache(Installation.of(self._library, *self._versions, device, settings(os.environ)))


def tell(finding: Finding) -> None:
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
    except Exception as error:  # CuPy has errors of its own where there is no GPU
        return f"not tried: {type(error).__name__}: {error}"
    problem = f" ({finding.problem})" if finding.problem else ""
    return text_of(question.table(finding)) + problem
