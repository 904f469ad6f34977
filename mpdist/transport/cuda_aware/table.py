"""Table: for each operation, whether this MPI may be given a GPU's memory.

Three voices: the user's, the library's, and that of a trial. What none of them
speaks for is unknown, and staged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from mpdist.config import DEVICE_OPERATIONS


class Answer(Enum):
    """What happens to an operation that is given a GPU's memory."""

    OK = "ok"
    CRASHES = "crashes"
    FAILS = "fails"
    """Wrong values, or an error."""
    HANGS = "does not end"
    UNKNOWN = "unknown"


Table = Mapping[str, Answer]
"""By operation, as config.DEVICE_OPERATIONS has them; those that are missing are unknown."""


@dataclass(frozen=True)
class Finding:
    """What a trial has shown.

    Attributes:
        problem: why it shows nothing, or not all.
    """

    answers: Table
    problem: str = ""


REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")

# By family of MPI; not tried. Open MPI folds non-blocking reductions on the host, wherever the arrays are: see
# https://github.com/open-mpi/ompi/issues/9845 and 12045, and "Which MPI APIs do NOT work with CUDA-aware UCX?" in
# https://docs.open-mpi.org/en/v5.0.x/tuning-apps/networking/cuda.html
KNOWN: Mapping[str, Table] = {"openmpi": dict.fromkeys(REDUCTIONS, Answer.CRASHES)}


def needs_trial(word: str, says: str) -> bool:
    """Whether the answers depend on a trial.

    Args:
        word: MPDIST_CUDA_AWARE.
        says: the library of itself: yes, no or unknown.
    """
    return word == "probe" or (word == "auto" and says == "yes")


def to_try(family: str) -> tuple[str, ...]:
    """The operations of which nothing is known."""
    return tuple(op for op in DEVICE_OPERATIONS if op not in KNOWN.get(family, {}))


def decide(word: str, says: str, family: str, tried: Table) -> dict[str, Answer]:
    """The answer for every operation.

    Args:
        tried: what a trial has shown, where there was one.
    """
    if needs_trial(word, says):
        return _all(tried) | dict(KNOWN.get(family, {}))
    if word == "yes":
        return dict.fromkeys(DEVICE_OPERATIONS, Answer.OK) | dict(KNOWN.get(family, {}))
    if word in ("auto", "no"):
        return _all({})
    return _all(dict.fromkeys(word.split(","), Answer.OK))


def _all(known: Table) -> dict[str, Answer]:
    return {op: known.get(op, Answer.UNKNOWN) for op in DEVICE_OPERATIONS}


def text_of(table: Table) -> str:
    """`ok: send, recv; crashes: all_reduce`."""
    groups = {answer: [op for op, found in table.items() if found is answer] for answer in Answer}
    return "; ".join(f"{answer.value}: {', '.join(ops)}" for answer, ops in groups.items() if ops)
