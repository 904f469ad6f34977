"""Environment variables: name, type, default, one sentence. All of them are here.

A value is checked when it is read; a wrong one raises with the values that are
allowed. Reading is pure: `Config.read(environ)` in, a frozen record out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from mpdist.errors import UsageError

PREFIX = "MPDIST_"

# Variables of that prefix that are no settings: what our processes tell each other, what steers tests.
NO_SETTINGS = ("RUN", "OWNER", "COMPLETION_", "BENCH_", "TEST_", "FAKECLUSTER")

_TRUE = {"1": True, "true": True, "yes": True, "on": True}
_FALSE = {"0": False, "false": False, "no": False, "off": False, "": False}


def _boolean(text: str) -> bool:
    return (_TRUE | _FALSE)[text.strip().lower()]


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(text)
    return int(text)


ALGORITHMS = ("auto", "native", "shared", "hierarchical")
Choice: TypeAlias = str
"""One of ALGORITHMS."""


def _folder(text: str) -> str:
    if text and not os.path.isdir(text):
        raise ValueError(text)
    return text


def _algorithm(text: str) -> str:
    if text not in ALGORITHMS:
        raise ValueError(text)
    return text


Folder: TypeAlias = str
"""Path of a folder; empty: none."""

DEVICE_OPERATIONS = (
    "send", "recv", "broadcast", "gather", "scatter", "all_gather", "all_to_all",
    "all_reduce", "reduce", "reduce_scatter", "scan", "exscan",
)  # fmt: skip
"""What MPI may do with a GPU's memory, or not."""
Operations: TypeAlias = str
"""auto, no, yes, probe, or some of DEVICE_OPERATIONS with commas between them."""


def _device_operations(text: str) -> str:
    words = [word.strip() for word in text.lower().split(",")]
    if len(words) == 1 and words[0] in _TRUE | _FALSE:
        return "yes" if _boolean(words[0]) else "no"
    if words not in (["auto"], ["probe"]) and not set(words) <= set(DEVICE_OPERATIONS):
        raise ValueError(text)
    return ",".join(words)


# type -> (reader, what a valid value looks like)
_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "bool": (_boolean, "0, 1, true, false, yes, no, on or off"),
    "int": (_count, "a whole number >= 0"),
    "str": (str, "a path"),
    "Folder": (_folder, "a folder that exists, of a memory file system"),
    "Choice": (_algorithm, f"one of {', '.join(ALGORITHMS)}"),
    "float": (_seconds, "a number of seconds >= 0"),
    "Operations": (
        _device_operations,
        f"auto, 0, 1, probe, or operations with commas between: {', '.join(DEVICE_OPERATIONS)}",
    ),
}


@dataclass(frozen=True)
class Config:
    """What the environment says; the field `timeout` is the variable `MPDIST_TIMEOUT`, and so on."""

    timeout: float = 1800.0
    """Seconds after which a pending collective fails; 0 waits for ever."""
    report_after: float = 60.0
    """Seconds after which an operation that still waits is diagnosed on stderr; 0 never."""
    debug: bool = False
    """Compare every collective's arguments between ranks before it runs; watch the memory of pending operations."""
    allow_pickle: bool = True
    """Allow object operations, which unpickle what other ranks send."""
    progress_thread: bool = False
    """Advance pending operations in a thread of their own, also while Python computes."""

    algorithm: Choice = "auto"
    """Force an algorithm of the large collectives where it can be used, instead of choosing one by size."""
    tuning: str = ""
    """Thresholds that `mpdist bench --tune` has written; default mpdist/tuning.json in the user's configuration."""
    shared_memory: bool = True
    """Let the ranks of a node share memory; else collectives and `comm.empty` take private memory."""
    reach: bool = True
    """Let the ranks of a node read and write each other's private memory through the kernel, where it allows that."""
    ipc: bool = True
    """Let the ranks of a node read each other's GPU memory by CUDA IPC, where it can be; else through host memory."""
    ranks_per_node: int = 0
    """Take so many ranks of a node for a node of their own, to try on one what is done between nodes; 0: as it is."""
    shared_memory_dir: Folder = ""
    """Folder of a memory file system to make shared memory in; default: in memory without a name."""
    as_mpi: bool = False
    """Let torch.distributed.is_mpi_available() say yes: frameworks that ask it take mpdist, which "mpi" means."""
    keep_memory: int = 1024
    """MiB of freed memory that a process keeps for its next step once it trains, on huge pages; 0: leave that to the
    C library. With glibc only."""
    cuda_aware: Operations = "auto"
    """Give MPI the memory of GPUs: auto: where it says that it takes it and a trial confirms it; 0: never; 1: where it
    is not known to crash; probe: where a trial confirms it, whatever it says; or just for the operations listed."""

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read the variables.

        Raises:
            UsageError: a value is not valid; the text lists the valid ones.
        """
        environ = os.environ if environ is None else environ
        values = {}
        for field in fields(cls):
            name = variable(field.name)
            if name in environ:
                values[field.name] = _parse(name, environ[name], str(field.type))
        return cls(**values)


def variable(field: str) -> str:
    """Name of the environment variable of a field."""
    return f"{PREFIX}{field.upper()}"


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """A line for each variable of our prefix that is no setting: it may be misspelt."""
    environ = os.environ if environ is None else environ
    known = [variable(field.name) for field in fields(Config)]
    passed_over = tuple(PREFIX + name for name in NO_SETTINGS)
    found = sorted(name for name in environ if name.startswith(PREFIX) and not name.startswith(passed_over))
    return [_unknown(name, known) for name in found if name not in known]


def _unknown(name: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches  # seldom needed

    nearest = get_close_matches(name.removeprefix(PREFIX), [each.removeprefix(PREFIX) for each in known], 1)
    advice = f"did you mean {PREFIX}{nearest[0]}?" if nearest else f"there are {', '.join(known)}"
    return f"environment variable {name} is not known and does nothing: {advice}"


def _parse(name: str, text: str, kind: str) -> Any:
    reader, valid = _READERS[kind]
    try:
        return reader(text)
    except (KeyError, ValueError) as error:
        raise UsageError(f"environment variable {name}={text!r} is not valid: it must be {valid}") from error
