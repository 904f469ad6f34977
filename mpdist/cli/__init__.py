"""Command line: `mpdist run` starts a job, `mpdist info` describes the installation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mpdist.errors import MpdistError

USAGE_STATUS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = build_parser().parse_args(arguments)
    try:
        return _COMMANDS[options.command](options)
    except MpdistError as error:
        print(f"mpdist: {error}", file=sys.stderr)
        return USAGE_STATUS


def _run(options: argparse.Namespace) -> int:
    from mpdist.cli.run import run

    return run(options)


def _info(options: argparse.Namespace) -> int:
    from mpdist.cli.info import info

    return info(options)


_COMMANDS = {"run": _run, "info": _info}


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="mpdist", description="Awaitable message passing over MPI.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_run(commands.add_parser("run", help="start a Python program on N ranks", allow_abbrev=False))
    _add_info(commands.add_parser("info", help="describe this installation", allow_abbrev=False))
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Start a Python program on N ranks with this environment's mpiexec, and return the job's exit status: "
        "0 only if every rank finished. If a rank is lost, for whatever reason, the job ends within seconds."
    )
    add = parser.add_argument
    add("-n", "--ranks", type=_positive, required=True, metavar="N", help="number of ranks")
    add(
        "--mpi", choices=["auto", "mpich", "openmpi"], default="auto", help="whose mpiexec to take (default: the first)"
    )
    add("--mpiexec", metavar="PATH", help="take this mpiexec")
    add("--tag-output", action="store_true", help="put [rank] in front of every line of output")
    add("--hostfile", metavar="FILE", help="file that lists the hosts, in the form of this MPI")
    add(
        "--launcher-arg", action="append", default=[], metavar="ARG",
        help="pass ARG to mpiexec; repeat for more; --launcher-arg=--map-by if it begins with a dash",
    )  # fmt: skip
    add("--verbose", action="store_true", help="print the command")
    add("--dry-run", action="store_true", help="print the command and do nothing")
    add("-m", dest="module", action="store_true", help="the program is a module, as in python -m")
    add("program", nargs=argparse.REMAINDER, help="script.py or module, and its arguments")


def _add_info(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print what one needs to know to debug an installation. Also under mpiexec: then of all ranks, by rank 0."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of ranks: it must be >= 1")
    return value
