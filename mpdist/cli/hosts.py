"""Hosts: what a host file says, and whether the ranks find room on its hosts. Pure.

A line is `name:4`, or Open MPI's `name slots=4`, which MPICH refuses in words that do not tell what to write. Of more
ranks than there is room for Open MPI says only that its slots are not enough, while MPICH begins again with the first
host, in silence. Where a host has no number the launcher decides (MPICH: 1 and round again; Open MPI: its cores).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mpdist.cli.launcher import Kind
from mpdist.errors import UsageError

# Of the launcher's own words, those that place ranks by something else than the host file's numbers.
_PLACING = re.compile(r"oversubscribe|^-+(h|hosts?|ppn|perhost|map-by|rankfile|rf)(=|$)", re.IGNORECASE)
SHOWN = 4
"""Hosts that an error text lists."""


@dataclass(frozen=True)
class Host:
    """One line.

    Attributes:
        number: of ranks that it has room for, as it is written; None: the line has none.
        has_slots: whether it is written as `slots=`.
    """

    name: str
    number: str | None
    has_slots: bool = False


def parse(lines: Iterable[str]) -> list[Host]:
    """The hosts of a file, in its order."""
    words = (line.partition("#")[0].split() for line in lines)
    return [_host(*line) for line in words if line]


def _host(first: str, *others: str) -> Host:
    if first.count(":") == 1:  # an IPv6 address has more
        name, _, number = first.partition(":")
        return Host(name, number)
    slots = next((word.removeprefix("slots=") for word in others if word.startswith("slots=")), None)
    return Host(first, slots, slots is not None)


def require_room(
    path: str, hosts: Sequence[Host], ranks: int, kind: Kind, extra: Sequence[str], environ: Mapping[str, str]
) -> None:
    """Find out before anything is started what the launcher would refuse, or do otherwise than it is written.

    Args:
        path: of the host file.
        extra: words for the launcher, and
        environ: its variables, which may allow more ranks than there is room for.

    Raises:
        UsageError: no host, a line that this launcher cannot read, or more ranks than the hosts have room for.
    """
    if not hosts:
        raise UsageError(f"mpdist run: the host file {path!r} names no host")
    for host in hosts:
        _require_number(path, host)
        if host.has_slots and kind is Kind.MPICH:
            raise UsageError(
                f"mpdist run: the host file {path!r} has '{host.name} slots={host.number}', as Open MPI reads it; this "
                f"mpiexec is MPICH's: write '{host.name}:{host.number}'"
            )
    numbers = [int(host.number) for host in hosts if host.number is not None]
    room = sum(numbers)
    if len(numbers) < len(hosts) or room >= ranks or _is_placed_otherwise(extra, environ):
        return
    listed = ", ".join(f"{host.name}: {host.number}" for host in hosts[:SHOWN]) + ", ..." * (len(hosts) > SHOWN)
    raise UsageError(
        f"mpdist run: {ranks} ranks do not fit: the host file {path!r} has room for {room} ({listed}). Start fewer "
        "(-n), or write larger numbers into it"
    )


def _require_number(path: str, host: Host) -> None:
    if host.number is not None and not (host.number.isdecimal() and int(host.number) > 0):
        raise UsageError(
            f"mpdist run: the host file {path!r} gives {host.name!r} {host.number!r} for a number of ranks; it must be "
            "a whole number from 1 on"
        )


def _is_placed_otherwise(extra: Sequence[str], environ: Mapping[str, str]) -> bool:
    variables = (f"{name}={value}" for name, value in environ.items() if name.startswith(("PRTE_MCA_", "OMPI_MCA_")))
    return any(_PLACING.search(word) for word in (*extra, *variables))
