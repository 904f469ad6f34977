"""mpdist: awaitable message passing over MPI, in pure Python.

Importing it starts nothing and loads neither MPI nor NumPy: names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mpdist import unstarted

if TYPE_CHECKING:
    from mpdist import torch as torch
    from mpdist.comm import ANY_SOURCE, ANY_TAG, Communicator
    from mpdist.errors import (
        ClosedError,
        CollectiveMismatch,
        CommRevoked,
        CommunicationError,
        InvalidRank,
        MessageTruncated,
        MpdistError,
        RankFailed,
        SizeMismatch,
        Unavailable,
        UnsupportedBuffer,
        UsageError,
        WorkTimeout,
    )
    from mpdist.gradients import GradientAverager, average
    from mpdist.memory import ReduceOp, premul_sum
    from mpdist.progress import Message, Work
    from mpdist.runtime import finalize, init, run

unstarted.watch()

__version__ = "0.1.0"

_HOMES = {
    "mpdist.comm": ("ANY_SOURCE", "ANY_TAG", "Communicator"),
    "mpdist.errors": (
        "ClosedError",
        "CollectiveMismatch",
        "CommRevoked",
        "CommunicationError",
        "InvalidRank",
        "MessageTruncated",
        "MpdistError",
        "RankFailed",
        "SizeMismatch",
        "Unavailable",
        "UnsupportedBuffer",
        "UsageError",
        "WorkTimeout",
    ),
    "mpdist.gradients": ("GradientAverager", "average"),
    "mpdist.memory": ("ReduceOp", "premul_sum"),
    "mpdist.progress": ("Message", "Work"),
    "mpdist.runtime": ("finalize", "init", "run"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "ClosedError",
    "CollectiveMismatch",
    "CommRevoked",
    "CommunicationError",
    "Communicator",
    "GradientAverager",
    "InvalidRank",
    "Message",
    "MessageTruncated",
    "MpdistError",
    "RankFailed",
    "ReduceOp",
    "SizeMismatch",
    "Unavailable",
    "UnsupportedBuffer",
    "UsageError",
    "Work",
    "WorkTimeout",
    "average",
    "finalize",
    "init",
    "premul_sum",
    "run",
]


def __getattr__(name: str) -> object:
    if name == "torch":
        return import_module("mpdist.torch")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'mpdist' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
