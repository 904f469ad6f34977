"""Command line: `mpdist run` starts a job, `mpdist bench` measures, `mpdist info` describes the installation."""

from __future__ import annotations

import argparse
import contextlib
import errno
import math
import os
import sys
from collections.abc import Sequence

import mpdist
from mpdist.errors import MpdistError

USAGE_STATUS = 2
INTERRUPT_STATUS = 130  # as a shell has it for SIGINT
PIPE_STATUS = 141  # as a shell has it for SIGPIPE
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a write, when there is no place for more


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    open_standard_files()
    options, unknown = build_parser().parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return _COMMANDS[options.command](options)
    except MpdistError as error:
        text = str(error)
        print(text if text.startswith("mpdist ") else f"mpdist: {text}", file=sys.stderr)
        return USAGE_STATUS
    except KeyboardInterrupt:  # before a job is started that hears of it, or after its end
        return INTERRUPT_STATUS
    except BrokenPipeError:  # whoever reads has had enough, as `head` does
        _drop_output()
        return PIPE_STATUS
    except OSError as error:
        if error.errno not in FULL:
            raise
        _drop_output()
        print(f"mpdist {options.command}: its output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def open_standard_files() -> None:
    """Where 0, 1 or 2 is closed it becomes the empty device: else a socket or pipe of ours, or mpiexec's, gets it."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: it is `fd`


def _drop_output() -> None:
    """Python writes what is left of it at its end, and would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(options: argparse.Namespace) -> int:
    from mpdist.cli.run import run

    return run(options)


def _info(options: argparse.Namespace) -> int:
    from mpdist.cli.info import info

    return info(options)


def _bench(options: argparse.Namespace) -> int:
    from mpdist.cli.bench import bench

    return bench(options)


_COMMANDS = {"run": _run, "bench": _bench, "info": _info}


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="mpdist", description="Awaitable message passing over MPI.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"mpdist {mpdist.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_run(commands.add_parser("run", help="start a Python program on N ranks", allow_abbrev=False))
    _add_bench(commands.add_parser("bench", help="measure collectives on this machine", allow_abbrev=False))
    _add_info(commands.add_parser("info", help="describe this installation", allow_abbrev=False))
    for command in commands.choices.values():
        command.set_defaults(parser=command)  # which tells of arguments that it does not know
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Start a Python program on N ranks with this environment's mpiexec, and return the job's exit status: "
        "0 only if every rank finished. If a rank is lost, for whatever reason, the job ends within seconds."
    )
    # argparse would write "..." for the program.
    options = (
        "[--mpi auto|mpich|openmpi] [--mpiexec PATH] [--hostfile FILE]\n       [--launcher-arg ARG] [--tag-output] "
    )
    parser.usage = (
        f"mpdist run -n N {options}[--verbose] [--dry-run]\n       script.py [ARGUMENT ...] | -m module [ARGUMENT ...]"
    )
    add = parser.add_argument
    add("-n", "-np", "--ranks", type=_positive, required=True, metavar="N", help="number of ranks")
    add(
        "--mpi", choices=["auto", "mpich", "openmpi"], default="auto", help="whose mpiexec to take (default: the first)"
    )
    add("--mpiexec", type=_word, metavar="PATH", help="take this mpiexec")
    add("--tag-output", action="store_true", help="put [rank] in front of every line of output")
    add("--hostfile", type=_word, metavar="FILE", help="file that lists the hosts, in the form of this MPI")
    add(
        "--launcher-arg", action="append", default=[], metavar="ARG",
        help="pass ARG to mpiexec; repeat for more; --launcher-arg=--map-by if it begins with a dash",
    )  # fmt: skip
    add("--verbose", action="store_true", help="print the command")
    add("--dry-run", action="store_true", help="print the command and do nothing")
    add("-m", dest="module", action="store_true", help="the program is a module, as in python -m")
    add("program", nargs=argparse.REMAINDER, help="script.py or module, and its arguments")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Time of each operation by size, by mpdist and by its rivals in turn, in one run, results checked before and "
        "after. Sizes and bandwidths are those of nccl-tests. Starts its ranks itself, or is started by a launcher."
    )
    add = parser.add_argument
    add("--ops", type=_word, metavar="OP,...", help="operations, as all_reduce,barrier (default: all)")
    add("--sizes", type=_word, metavar="SIZES", help="8..64M, or 8,64K,1M (default 8..64M; with --tune 8..16M)")
    add("--factor", type=_factor, help="from one size to the next (default 4; with --tune 2)")
    add("-n", "-np", "--ranks", type=_positive, metavar="N", help="number of ranks (default 2)")
    add(
        "--rivals", type=_word, metavar="RIVAL,...",
        help="raw: mpi4py, blocking and not; tuned: the same in a second job whose MPI is tuned for one node; gloo: "
        "torch.distributed (default: all that are there)",
    )  # fmt: skip
    add(
        "--seconds",
        type=_seconds,
        metavar="SECONDS",
        help="for the rounds of one operation at one size (default 0.5; with --tune 0.2)",
    )
    add("--json", type=_word, metavar="FILE", help="add one JSON line for each case to this file")
    add("--plot", type=_word, metavar="FILE.png", help="write a picture")
    add("--tune", action="store_true", help="measure each algorithm forced, and write this machine's thresholds")
    add("--mpi", choices=["auto", "mpich", "openmpi"], default="auto", help="as of mpdist run")
    add("--mpiexec", type=_word, metavar="PATH", help="as of mpdist run")
    add("--hostfile", type=_word, metavar="FILE", help="as of mpdist run")
    add("--launcher-arg", action="append", default=[], metavar="ARG", help="as of mpdist run")
    # Of the jobs that it starts: who takes part, and where the cases go.
    add("--contender", action="append", help=argparse.SUPPRESS)
    add("--results", help=argparse.SUPPRESS)


def _add_info(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print what one needs to know to debug an installation. Also under mpiexec: then of all ranks, by rank 0."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _word(text: str) -> str:
    if not text:  # often that of a variable that is not set
        raise argparse.ArgumentTypeError("it is empty; say what it is to be, or leave it out")
    return text


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks: it must be a whole number from 1 on")
    return int(text)


def _factor(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number to multiply sizes by: it must be a whole number from 2 on"
        )
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds: it must be above 0, as 0.5")
