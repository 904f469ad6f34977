"""Finish: a job is over when all ranks have agreed that it is.

A rank whose main program has ended first completes what it has posted, then goes
on making progress until all the others have come to their end, too: they may still
need it. If they wait for more than it can give, the control thread ends the job.

Daemon threads of the program, and their loops, go on meanwhile, and when MPI has been stopped: a call of it would
end the process badly. So they are refused first, and hold no request of MPI after it.
"""

from __future__ import annotations

from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from mpdist.errors import ClosedError
from mpdist.progress.engine import Engine
from mpdist.progress.receive import Receive
from mpdist.progress.work import Requested
from mpdist.runtime.last_words import write_error
from mpdist.runtime.outside import has_threads

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel
    from mpdist.progress.work import Work

# In a world of one rank nobody can complete what its main program has left.
ALONE_SECONDS = 0.2

# A thread that has begun to post has done so by then.
POSTING_SECONDS = 0.02

SHOWN = 4

_left: list[object] = []
"""Requests that were not complete at the end, and their buffers; MPI may still read them."""


class StoppedEngine(Engine):
    """The Engine when MPI is to be called no more: a thread that comes late looks at nothing."""

    def _look_at_all(self) -> bool:
        return False

    def drive_inline(self, work: Work[Any]) -> bool:
        return work._done


def drain(engine: Engine, timeout: float | None = None) -> bool:
    """Complete all sends and collectives of this rank; False if one took longer than `timeout` seconds.

    Receives may stay: nobody waits for them. So may what is pending on communicators that this rank has left, see
    `drain_left`.
    """
    return all(engine.wait(work, timeout) for work in unfinished(engine) if not _is_left(work))


def drain_left(engine: Engine) -> None:
    """Complete, once all ranks have agreed, what all have begun on communicators that they have left.

    A rank that leaves one by an exception drops what has not begun there yet, though others may have begun it, and
    receives no more: they would wait for ever. And a communicator whose making has timed out is made all the same, in
    a call of MPI that blocks until all ranks make it.
    """
    end = monotonic() + ALONE_SECONDS
    engine.drive_while(lambda: engine.creating > 0, ALONE_SECONDS)
    for work in unfinished(engine):
        engine.wait(work, max(end - monotonic(), 0.0))


def _is_left(work: Work[Any]) -> bool:
    return work._channel.is_closed and work.op != "close"


def unfinished(engine: Engine) -> list[Work[Any]]:
    """What other ranks may need of this one."""
    works = [*engine.active, *engine.later]
    works += [work for channel in engine.channels for work in list(channel.collectives)]
    return [work for work in works if not work._done and not isinstance(work, Receive)]


def agree(engine: Engine) -> None:
    """Wait until every rank of the world has called it; pending operations make progress meanwhile."""
    transport = engine.meeting.transport  # nothing else on it is a collective
    request = transport.ibarrier()
    engine.doorbell.ring_sleepers(range(transport.size))
    engine.drive_while(lambda: not request.Test())


def refuse_all(engine: Engine, why: str) -> None:
    """Refuse what other threads of the program want to post from now on."""
    for channel in list(engine.channels):
        if not channel.is_closed:
            channel.is_ending = True
            channel.give_up(why)
    if has_threads():
        sleep(POSTING_SECONDS)


def drop_all(engine: Engine, why: str) -> None:
    """End what is still pending; it is not looked at any more. Under the Engine's lock."""
    for work in unfinished(engine):
        _left.append((work, getattr(work, "_request", None)))
        work._desert(ClosedError(f"{work.describe()} ended: {why}"))
        if isinstance(work, Requested):
            work._request = None
    engine.__class__ = StoppedEngine


def close_all(engine: Engine, why: str) -> None:
    """Close every communicator, and report the messages that nobody has received; receives are withdrawn.

    Iterators over messages end as at any closing. Memory for copies of devices is given back.
    """
    for channel in list(engine.channels):
        if not channel.is_closed:
            if channel is not engine.meeting:  # where those who have left may have been heard by nobody
                _report_unclaimed(channel)
            for receive in list(channel.inbox.box.waiting()):
                if not receive.is_listener:
                    receive.cancel()
            channel.close(why, together=True)
    engine.awareness.close()
    for pinned in engine.staging.values():
        pinned.close()
    for exports in engine.exports.values():
        exports.close()
    engine.maker.free()
    engine.doorbell.close()


def _report_unclaimed(channel: Channel) -> None:
    while channel.inbox.poll():
        pass
    unclaimed = channel.inbox.unclaimed()
    if unclaimed:
        more = ", ..." if len(unclaimed) > SHOWN else ""
        write_error(
            f"mpdist: {channel.where()} ends with {len(unclaimed)} message{'s' * (len(unclaimed) > 1)} that nobody "
            f"received: {', '.join(unclaimed[:SHOWN])}{more}"
        )
