"""Job: what `mpdist run` has heard of its ranks, and what follows from it.

Pure: events in, decisions out; the I/O is in run.py. A job has succeeded only
if every one of its ranks has reported its own good end and the launcher
returned 0: MPICH's mpiexec returns 0 after `os._exit(0)` in mid-run, Open MPI's
after the death of a host. The first rank that fails by itself is the cause, and
the only one that is named; but one that a signal has killed before one that left
with a status: Open MPI ends a rank so that finds the connection to a dead one
closed, and of that end, on another host, we may hear first.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mpdist.cli.warden import exit_status, is_success

# Why a rank may have been killed by a signal that says little by itself.
HINTS = {"SIGKILL": "perhaps by the kernel, for want of memory"}

# MPI itself ends a rank so, for one where ranks call a collective with different sizes.
DEBUG_HINT = " (MPDIST_DEBUG=1 may say why)"


@dataclass
class Rank:
    """One rank as its warden describes it."""

    number: int
    pid: int
    host: str
    records: list[str] = field(default_factory=list)
    wait_status: int | None = None

    @property
    def is_good(self) -> bool:
        return self.wait_status is not None and is_success(self.wait_status, self.records)

    @property
    def may_be_a_victim(self) -> bool:
        """Whether it may have ended because another has: it left with a status, and told no reason."""
        return self.wait_status is not None and os.WIFEXITED(self.wait_status) and "told" not in self.records


@dataclass(frozen=True)
class Verdict:
    """How the job ended.

    Attributes:
        status: exit status of `mpdist run`.
        lines: what to print on stderr, at the very end.
    """

    status: int
    lines: Sequence[str] = ()


@dataclass
class Job:
    """Everything that is known about a job of `size` ranks.

    Attributes:
        starting: numbers of the ranks that are in the start of mpdist, which needs all.
        absent: the first that has left, and had not come to that.
    """

    size: int
    ranks: dict[int, Rank] = field(default_factory=dict)
    cause: Rank | None = None
    starting: set[int] = field(default_factory=set)
    absent: Rank | None = None
    interrupted_by: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether every rank has reported its end."""
        return len(self.ranks) == self.size and all(r.wait_status is not None for r in self.ranks.values())

    def started(self, number: int, pid: int, host: str) -> Rank:
        """A rank has been started."""
        self.ranks[number] = Rank(number, pid, host)
        return self.ranks[number]

    def recorded(self, rank: Rank, word: str) -> None:
        """A rank has written a word of its completion record; `told` makes it the cause."""
        rank.records.append(word)
        if word == "init":
            self.starting.add(rank.number)
        if word == "open":
            self.starting.discard(rank.number)
        if word == "told":
            self.cause = self.cause or rank

    def ended(self, rank: Rank, wait_status: int, by_itself: bool) -> None:
        """A rank has ended; if badly and by itself, it is the cause, unless there is one already."""
        rank.wait_status = wait_status
        self.starting.discard(rank.number)
        if rank.is_good and "init" not in rank.records:
            self.absent = self.absent or rank
        if (
            by_itself
            and not rank.is_good
            and (self.cause is None or (self.cause.may_be_a_victim and not rank.may_be_a_victim))
        ):
            self.cause = rank

    def blame_absent(self) -> bool:
        """Where ranks start mpdist, one that has left without is the cause; whether there is one."""
        if self.absent is None or not self.starting:
            return False
        self.cause = self.cause or self.absent
        return True

    def verdict(self, launcher_status: int) -> Verdict:
        """Judge the job.

        Args:
            launcher_status: of mpiexec as `subprocess` gives it: negative for a signal.
        """
        status = shell_status(launcher_status)
        if self.interrupted_by is not None:
            text = f"mpdist: the job was stopped by {signal_name(self.interrupted_by)}"
            return Verdict(128 + self.interrupted_by, [text])
        if self.cause is not None:
            return self._blame(self.cause, status)
        if launcher_status == -signal.SIGPIPE:  # whoever reads the output has had enough, as `head` does
            return Verdict(status)
        if not self.ranks:
            return Verdict(status or 1, [f"mpdist: mpiexec {describe(launcher_status)} and started no rank"])
        good = [number for number, rank in self.ranks.items() if rank.is_good]
        if len(good) < self.size:
            return Verdict(status or 1, [unproved(good, self.size, launcher_status, self._silent_hosts())])
        if status:
            return Verdict(status, [f"mpdist: all ranks finished, but mpiexec {describe(launcher_status)}"])
        return Verdict(0)

    def _silent_hosts(self) -> list[str]:
        """Of several, those with a rank whose end nobody has reported."""
        hosts = {rank.host for rank in self.ranks.values()}
        return sorted({rank.host for rank in self.ranks.values() if rank.wait_status is None}) if len(hosts) > 1 else []

    def _blame(self, rank: Rank, launcher_status: int) -> Verdict:
        status = launcher_status if rank.wait_status is None else exit_status(rank.wait_status)
        if "told" in rank.records:
            return Verdict(status or 1)
        who = f"rank {rank.number} of {self.size} (host {rank.host}, pid {rank.pid})"
        return Verdict(status or 1, [f"mpdist: {who} {end_of(rank)}; the job is stopped"])


def end_of(rank: Rank) -> str:
    """How a failed rank ended, as the rest of a sentence."""
    assert rank.wait_status is not None
    when = ""
    if "used" in rank.records:
        agreed = "done" in rank.records
        when = " after the job was agreed to be finished" if agreed else " before the job was agreed to be finished"
    if os.WIFSIGNALED(rank.wait_status):
        name = signal_name(os.WTERMSIG(rank.wait_status))
        hint = f" ({HINTS[name]})" if name in HINTS else ""
        return f"was killed by {name}{hint}{when}"
    code = os.waitstatus_to_exitcode(rank.wait_status)
    if code == 0 and not when:
        return "left with exit status 0 and has never started mpdist, for which the others wait"
    if code == 0:
        return f"left with exit status 0, as by os._exit(0),{when}"
    if not when:
        return f"left with exit status {code} before it started mpdist (what it printed says why)"
    if "open" not in rank.records:  # a variable is wrong, say
        return f"left with exit status {code} while it started mpdist (what it printed says why)"
    return f"left with exit status {code}{when}{'' if 'done' in rank.records else DEBUG_HINT}"


def unproved(good: Sequence[int], size: int, launcher_status: int, silent_hosts: Sequence[str]) -> str:
    """The text for a job that was ended by something that no rank has seen."""
    hosts = f", perhaps {', '.join(silent_hosts)}" if silent_hosts else ""
    missing = ranks_text(set(range(size)) - set(good))
    before = f"; {ranks_text(good)} had left with exit status 0" if good else ""
    return (
        f"mpdist: mpiexec {describe(launcher_status)}, but {missing} of {size} did not finish "
        f"(MPI_Abort, a lost host{hosts}, or a signal){before}"
    )


def shell_status(status: int) -> int:
    """128 + signal for a process that was killed by a signal."""
    return status if status >= 0 else 128 - status


def signal_name(number: int) -> str:
    """`SIGTERM`; `signal 40` for a real-time signal, most of which have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe(status: int) -> str:
    """What a process did at its end, as the rest of a sentence."""
    return f"returned {status}" if status >= 0 else f"was killed by {signal_name(-status)}"


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    text = ", ".join("-".join(map(str, span)) for span in spans)
    return f"rank {text}" if len(spans) == 1 and len(spans[0]) == 1 else f"ranks {text}"
