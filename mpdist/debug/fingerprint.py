"""Fingerprint: what a rank says of a collective it calls, and whether the ranks' words agree.

Only what must be the same everywhere is compared: the details of a collective
hold nothing else, but for the few listed here. The call's line is told, never compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from mpdist.errors import CollectiveMismatch
from mpdist.progress.roll import OWN_DETAILS, comparable

NBYTES = 1024
_PART_BYTES = 440


@dataclass(frozen=True)
class Call:
    """A collective as one rank calls it.

    Attributes:
        details: `float32 x 1024 sum`; None where they are not known any more.
        site: the caller's line.
    """

    op: str
    details: str | None = ""
    site: str = ""

    @property
    def text(self) -> str:
        return f"{self.op} {self.details or ''}".rstrip()

    def pack(self) -> bytes:
        """NBYTES bytes."""
        parts = (self.op, _cut(self.details or "", keep_start=True), _cut(self.site, keep_start=False))
        return "\0".join(parts).encode(errors="replace").ljust(NBYTES, b"\0")

    @classmethod
    def unpack(cls, record: bytes) -> Call:
        """Inverse of pack."""
        op, details, site = record.decode(errors="replace").split("\0")[:3]
        return cls(op, details, site)


def _cut(text: str, *, keep_start: bool) -> str:
    """At most _PART_BYTES bytes; a cut start keeps a checksum of the whole, so that it still differs."""
    data = text.replace("\0", " ").encode(errors="replace")
    if len(data) <= _PART_BYTES:
        return data.decode()
    if not keep_start:
        return "..." + data[3 - _PART_BYTES :].decode(errors="ignore")
    checksum = zlib.crc32(comparable(text).encode(errors="replace"))
    return f"{data[: _PART_BYTES - 20].decode(errors='ignore')}... ({checksum:08x})"


def is_mismatch(calls: Mapping[int, Call]) -> bool:
    """Whether the ranks' calls cannot be one collective."""
    ops = {call.op for call in calls.values()}
    if len(ops) > 1:
        return True
    known = {comparable(call.details) for call in calls.values() if call.details is not None}
    return len(known) > 1 and not ops <= OWN_DETAILS


def describe_mismatch(channel: str, sequence: int, calls: Mapping[int, Call]) -> str:
    """The calls of all ranks, those that are the same in one line."""
    ranks_of: dict[Call, list[int]] = {}
    for rank, call in sorted(calls.items()):
        ranks_of.setdefault(call, []).append(rank)
    rows = [(ranks_text(ranks) + ":", call.op, call.details or "", call.site) for call, ranks in ranks_of.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"    {who:{widths[0]}} {op:{widths[1]}} {details:{widths[2]}}  ({site})" for who, op, details, site in rows
    ]
    return "\n".join([f"call {sequence} on '{channel}' differs between ranks:", *lines])


def mismatch_error(channel: str, sequence: int, calls: Mapping[int, Call]) -> CollectiveMismatch | None:
    """The error of a collective that its ranks call differently; None where they agree."""
    if not is_mismatch(calls):
        return None
    lines = {rank: f"{each.text} ({each.site})" for rank, each in calls.items()}
    return CollectiveMismatch(describe_mismatch(channel, sequence, calls), lines)


def ranks_text(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"
