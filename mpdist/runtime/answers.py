"""Answers: what this rank can say of itself and of its pending operations, as records."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from mpdist.debug.lines import is_ours, short
from mpdist.errors import UsageError
from mpdist.progress import current
from mpdist.progress.collective import Collective, Place, line_of
from mpdist.progress.mailbox import ANY
from mpdist.progress.receive import Receive
from mpdist.progress.send import Send
from mpdist.progress.sendrecv import SendReceive
from mpdist.runtime import waiting
from mpdist.runtime.records import Answer, ChannelState, Kind, Operation, Posted
from mpdist.runtime.watch import snapshot

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel
    from mpdist.progress.engine import Engine
    from mpdist.progress.work import Work

# Letters are to stay small.
MOST_TEXT = 200
MOST_TAGS = 64
MOST_DAEMONS = 4

Wanted = Mapping[str, Sequence[int]]
"""Communicators by key -> sequence numbers of collectives."""


def key_of(name: str, world_ranks: Sequence[int]) -> str:
    """A communicator's name among all ranks; several may have the same plain name."""
    return f"{name}@{zlib.crc32(repr(tuple(world_ranks)).encode()):08x}"


def describe_pending() -> list[str]:
    """The program's pending operations on this rank, a line each; none where mpdist is not started."""
    try:
        engine = current.engine("describe_pending")
    except UsageError:
        return []
    return [_line(work) for work in snapshot(engine) if not _is_of_a_meeting(work, engine)]


def _is_of_a_meeting(work: Work[Any], engine: Engine) -> bool:
    """A message of ours, by which ranks meet: what they meet for is pending, too, and says more."""
    return work._channel is engine.meeting and isinstance(work, Receive | Send)


def _line(work: Work[Any]) -> str:
    site = _site_of(work, "")
    place = f", called at {site}" if site else ""
    waited = f", for {monotonic() - work.since:.1f} s" if work.since is not None else ""
    return f"{work.describe()}{place}{waited}"


def posted_collectives(engine: Engine) -> dict[str, int]:
    """For each communicator by key: number of collectives posted; of those closed last, of those begun.

    Of one in which a signal's handler has interrupted a collective: those before that one, which goes no further.
    """
    closed = {key_of(name, ranks): number for name, ranks, number in list(engine.closed)}
    posted = {key_of(each.name, each.world_ranks): each.sequence for each in list(engine.channels)}
    for work in list(engine.wrecks):
        key = key_of(work._channel.name, work._channel.world_ranks)
        if isinstance(work, Collective) and work.sequence and key in posted:
            posted[key] = min(posted[key], work.sequence - 1)
    return closed | posted


# ---------------------------------------------------------------------- this rank's operations


def operation_of(work: Work[Any], place: str = "") -> Operation:
    """A pending operation as a record.

    Args:
        place: line of whoever waits for it, where the call's line is not known, or is mpdist's own.
    """
    channel = work._channel
    kind, peers = _needs(work)
    details = work.details()[:MOST_TEXT]
    number = f" #{work.sequence}" if work.sequence else ""
    own = channel.world_ranks[channel.rank]
    return Operation(
        kind=kind,
        text=f"{work.op}{details and ' ' + details}{number} on '{channel.name}'",
        key=key_of(channel.name, channel.world_ranks),
        name=channel.name,
        members=channel.world_ranks,
        own=channel.rank,
        sequence=work.sequence,
        peers=tuple(channel.world_ranks[peer] for peer in peers if channel.world_ranks[peer] != own),
        site=_site_of(work, place),
        seconds=0.0 if work.since is None else monotonic() - work.since,
        is_moving=_is_moving(work),
        tag=_tag(work),
        advice=channel.advice,
        queued=_queued(channel, peers) if kind is Kind.RECEIVE else (),
    )


def _queued(channel: Channel, peers: Sequence[int]) -> tuple[str, ...]:
    """The messages of these members that nobody has received yet."""
    return tuple(message.describe() for message in channel.inbox.box.unclaimed() if message.src in peers)


def _site_of(work: Work[Any], place: str) -> str:
    if work.site and not is_ours(work.site):
        return short(work.site)
    return place or waiting.place_of(work) or short(work.site)


def _part(work: Work[Any]) -> Work[Any]:
    """The half of a sendrecv that it waits for."""
    if not isinstance(work, SendReceive):
        return work
    return work._send if work._receive._done else work._receive


def _tag(work: Work[Any]) -> int:
    part = _part(work)
    return part.tag if isinstance(part, Send | Receive) else ANY


def _needs(work: Work[Any]) -> tuple[Kind, list[int]]:
    """What the operation waits for: ranks of its communicator."""
    everyone = list(range(work._channel.size))
    work = _part(work)
    if isinstance(work, Receive):
        return Kind.RECEIVE, everyone if work.src == ANY else [work.src]
    if isinstance(work, Send):
        return Kind.SEND, [work.dst]
    if work.sequence:
        return Kind.COLLECTIVE, everyone
    return Kind.RECEIVE, getattr(getattr(work, "_request", None), "missing", [])[:1]  # what is made meets by messages


def _is_moving(work: Work[Any]) -> bool:
    part = work._receive if isinstance(work, SendReceive) else work
    return isinstance(part, Receive) and part.order <= 0 and not part._done


# ---------------------------------------------------------------------- what others ask


def answer(engine: Engine, asker: int, wanted: Wanted, *, is_finished: bool) -> Answer:
    """This rank's answer.

    Args:
        asker: world rank.
        wanted: communicators by key, and the collectives there that the question is about.
    """
    works = snapshot(engine)
    channels = {work._channel for work in works} | set(engine.channels)
    by_key = {key_of(each.name, each.world_ranks): each for each in channels}
    posted = posted_collectives(engine)
    closed = {key_of(name, ranks) for name, ranks, _ in list(engine.closed)} - {
        key_of(each.name, each.world_ranks) for each in list(engine.channels)
    }
    # Of a communicator that this rank never had: a signal's handler has interrupted its making, or its name differs
    # between ranks. Where some are forgotten, it may be one of those.
    of_unknown = None if len(engine.closed) == engine.closed.maxlen else 0
    return Answer(
        is_finished=is_finished,
        place=waiting.place(engine)[:MOST_TEXT],
        waits=tuple(operation_of(work).where[:MOST_TEXT] for work in waiting.awaited(engine)[:1]),
        channels={
            key: _state(posted.get(key, of_unknown), key in closed, by_key.get(key), asker, works, sequences)
            for key, sequences in wanted.items()
        },
        daemons=tuple(name[:MOST_TEXT] for name in waiting.daemons()[:MOST_DAEMONS]) if is_finished else (),
    )


def _state(
    posted: int | None,
    is_closed: bool,
    channel: Channel | None,
    asker: int,
    works: Sequence[Work[Any]],
    sequences: Sequence[int],
) -> ChannelState:
    here = [work for work in works if work._channel is channel]
    return ChannelState(
        posted=posted,
        calls=() if channel is None else _calls(channel, sequences, channel.sequence if posted is None else posted),
        sends=_tags(work.tag for work in here if isinstance(work, Send) and _world_rank(work, work.dst) == asker),
        receives=_tags(work.tag for work in here if isinstance(work, Receive) and _may_meet(work, asker)),
        is_closed=is_closed,
    )


def _tags(tags: Iterable[int]) -> tuple[int, ...]:
    """Each once; where they are too many, ANY stands for the rest."""
    different = sorted(set(tags))
    return tuple(different if len(different) <= MOST_TAGS else [ANY, *different[: MOST_TAGS - 1]])


def _world_rank(work: Work[Any], rank: int) -> int:
    return work._channel.world_ranks[rank]


def _may_meet(receive: Receive, sender: int) -> bool:
    return receive.src == ANY or _world_rank(receive, receive.src) == sender


def _calls(channel: Channel, sequences: Sequence[int], last: int) -> tuple[Posted, ...]:
    """The collectives that are asked for, as far as they are known, and the last one."""
    newest = channel.sequence
    found = {
        newest - back: Posted(newest - back, op, words[0](*words[1:])[:MOST_TEXT], _site(place), None)
        for back, (op, words, place) in enumerate(reversed(list(channel.recent)))
    }
    for work in list(channel.collectives):
        waited = None if work._done else monotonic() - (work.since or monotonic())
        details = work.details()[:MOST_TEXT]
        found[work.sequence] = Posted(work.sequence, work.op, details, short(work.site)[-MOST_TEXT:], waited)
    return tuple(found[sequence] for sequence in sorted({*sequences, last}) if sequence in found and sequence <= last)


def _site(place: Place | None) -> str:
    return short(line_of(place))[-MOST_TEXT:]
