"""Trial: a program in which MPI does each operation with a GPU's memory. It may crash, or hang.

    python -m mpdist.transport.cuda_aware.trial REPORT DEVICE RANKS SECONDS OPERATION...

Rank 0 appends lines to the file REPORT: `ranks 2`; for each operation `begin send`, then
`ok send` or `fails send`; at last `end`. Or `problem` and why nothing can be tried. An
operation ends the process when it takes longer than SECONDS.

Alone, a reduction reduces nothing, so that is not tried.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Sequence

from mpdist.errors import MpdistError
from mpdist.memory.accelerator import accelerator_of
from mpdist.memory.buffer import cuda
from mpdist.transport.cuda_aware.operations import Trial
from mpdist.transport.cuda_aware.table import REDUCTIONS


class Report:
    """A file of lines, which are there when the next thing begins."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def write(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())


def main(path: str, device: int, ranks: int, seconds: int, operations: Sequence[str]) -> None:
    """One rank's part."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    report = Report(path)
    try:
        accelerator = accelerator_of(cuda(device))  # before MPI starts: some look then for the GPU in use
        accelerator.attend()
    except Exception as error:
        report.write(f"problem {type(error).__name__}: {' '.join(str(error).split())}")
        raise SystemExit(1) from error
    from mpdist.transport import mpi

    transport = mpi.start()
    if transport.size != ranks:
        report.write(f"problem the launcher starts {transport.size} rank instead of {ranks}")
        raise SystemExit(1)
    write = report.write if transport.rank == 0 else _ignore
    write(f"ranks {ranks}")
    trial = Trial(transport, accelerator)
    for op in operations:
        if ranks == 1 and op in REDUCTIONS:
            continue
        signal.alarm(seconds)
        write(f"begin {op}")
        found = transport.all_gather_now(_tried(trial, op))
        write(f"{'ok' if all(found) else 'fails'} {op}")
    write("end")
    signal.alarm(seconds)
    mpi.stop()


def _tried(trial: Trial, op: str) -> bool:
    try:
        return trial.holds(op)
    except (trial.transport.failure, MpdistError):
        return False


def _ignore(_: str) -> None: ...


if __name__ == "__main__":
    _path, _device, _ranks, _seconds, *_operations = sys.argv[1:]
    main(_path, int(_device), int(_ranks), int(_seconds), _operations)
