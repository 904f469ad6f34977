"""Diagnosis: what the ranks' answers say about an operation that waits.

Records in, words and decisions out: no MPI, no threads, no clock. Answers are
kept by world rank; texts name ranks as the operation's communicator counts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from mpdist.debug.fingerprint import mismatch_error
from mpdist.errors import CollectiveMismatch
from mpdist.progress.mailbox import ANY
from mpdist.runtime.records import Answer, Answers, ChannelState, Kind, Operation

# A report tells of so many operations, of so many ranks one by one, and of so many messages.
MOST_OPERATIONS = 4
MOST_RANKS = 8
MOST_MESSAGES = 4

# Ranks begin to wait at slightly different times; so near to the limit they count as equal.
NEARLY = 0.9


# ---------------------------------------------------------------------- who is missing


def missing(operation: Operation, answers: Answers) -> list[int]:
    """World ranks that it waits for, as far as known; those that don't answer are among them."""
    if operation.kind is not Kind.COLLECTIVE:
        return list(operation.peers)
    return [rank for rank in operation.peers if rank not in answers or not _has_posted(operation, answers[rank])]


def _members(operation: Operation, answers: Answers) -> Answers:
    """Those of its communicator's members: others are asked too, where a rank waits in several communicators."""
    return {rank: answer for rank, answer in answers.items() if rank in operation.members}


def _has_posted(operation: Operation, answer: Answer) -> bool:
    posted = answer.channel(operation).posted
    return posted is not None and posted >= operation.sequence


def mismatch(operation: Operation, answers: Answers) -> CollectiveMismatch | None:
    """The calls of all ranks, where they cannot be one collective."""
    if operation.kind is not Kind.COLLECTIVE:
        return None
    posted = {operation.rank_in(rank): answer.call(operation) for rank, answer in _members(operation, answers).items()}
    calls = {rank: call.call for rank, call in posted.items() if call is not None}
    return mismatch_error(operation.name, operation.sequence, calls)


def is_spokesman(operation: Operation, rank: int, answers: Answers, report_after: float) -> bool:
    """Whether this rank reports a collective: no lower one has waited for it as long."""
    for other, answer in answers.items():
        call = answer.call(operation) if operation.kind is Kind.COLLECTIVE and other < rank else None
        if call is not None and call.seconds is not None and call.seconds >= NEARLY * report_after:
            return False
    return True


def next_lower(operations: Sequence[Operation], rank: int, asked: Set[int]) -> list[int]:
    """Lower ranks to be asked next whether they report one of these collectives; twice as many each time.

    So where a thousand ranks wait for one, nearly all of them are content with one answer.
    """
    collectives = [operation for operation in operations if operation.kind is Kind.COLLECTIVE]
    lower = sorted({peer for operation in collectives for peer in operation.peers if peer < rank} - asked)
    return lower[: max(len(asked), 1)]


# ---------------------------------------------------------------------- words


def explain(operation: Operation, answers: Answers) -> str:
    """Who has come, who has not and where they are; lines, indented."""
    lines = []
    different = mismatch(operation, answers)
    if different is not None:
        lines.append(str(different))
    late = missing(operation, answers)
    if operation.kind is Kind.COLLECTIVE:
        arrived = [rank for rank in operation.members if rank in answers and rank not in late]
        lines.append(f"arrived: {operation.ranks_text(arrived)}" if arrived else "nobody has arrived")
        if not late:
            lines += _progress(operation, answers, is_mismatch=different is not None)
    told = [rank for rank in late if rank in answers]
    lines += [
        f"{_verb(operation)}{operation.ranks_text([rank])}: {about(operation, answers[rank])}"
        for rank in told[:MOST_RANKS]
    ]
    if len(told) > MOST_RANKS:
        lines.append(f"{_verb(operation)}{operation.ranks_text(told[MOST_RANKS:])} too")
    mute = [rank for rank in late if rank not in answers]
    if mute:
        lines.append(f"no answer (dead, stopped, or cut off): {operation.ranks_text(mute)}")
    if late and operation.advice:
        lines.append(operation.advice)
    lines += _alone(operation, answers)
    if operation.queued:
        lines.append(_queued(operation))
    return "\n".join(f"    {line}" for line in "\n".join(lines).splitlines())


def _alone(operation: Operation, answers: Answers) -> list[str]:
    """Of a message in a communicator of one rank."""
    here = answers.get(operation.members[0])
    if len(operation.members) > 1 or here is None or operation.kind is Kind.COLLECTIVE:
        return []
    what = "send it" if operation.kind is Kind.RECEIVE else "receive it"
    return [f"only this rank could {what}, and it is at {here.place}"]


def _progress(operation: Operation, answers: Answers, *, is_mismatch: bool) -> list[str]:
    """How far a collective is that all ranks have called."""
    calls = {rank: answer.call(operation) for rank, answer in _members(operation, answers).items()}
    gone = [rank for rank, call in calls.items() if call is None or call.seconds is None]
    if gone:
        have = "has" if len(gone) == 1 else "have"
        return [f"all ranks have called it, and {operation.ranks_text(gone)} {have} completed it and gone on"]
    if is_mismatch:
        return []
    busy = [
        (rank, answer)
        for rank, answer in _members(operation, answers).items()
        if not (answer.waits or answer.is_finished)
    ]
    return [
        "all ranks have called it: it is being carried out",
        *(f"rank {operation.rank_in(rank)} is at {answer.place}" for rank, answer in busy[:MOST_RANKS]),
    ]


def _verb(operation: Operation) -> str:
    return "not arrived: " if operation.kind is Kind.COLLECTIVE else ""


def about(operation: Operation, answer: Answer) -> str:
    """`last collective all_reduce #2 (train.py:30), now at train.py:36 in load_batch: time.sleep(60)`."""
    state = answer.channel(operation)
    parts = [_last_collective(state)]
    if operation.kind is Kind.RECEIVE and state.sends:
        parts.append(f"its pending sends to this rank have {tags_text(state.sends)}")
    parts.append("has finished" if answer.is_finished else f"now at {answer.place}")
    if answer.waits and not answer.is_finished:
        parts.append(f"waits in {answer.waits[0]}")
    return ", ".join(parts)


def tags_text(tags: Sequence[int]) -> str:
    """`tag 3`, `tags 3, 5`, `tags 3, 5, ...`; a receive may have `any tag`."""
    if list(tags) == [ANY]:
        return "any tag"
    listed = ", ".join("..." if tag == ANY else str(tag) for tag in tags)
    return f"{'tag' if len(tags) == 1 else 'tags'} {listed}"


def _last_collective(state: ChannelState) -> str:
    if state.posted is None:
        return "has closed this communicator, or never had it"
    if state.is_closed:
        return f"has closed it after collective #{state.posted}" if state.posted else "has closed it"
    if not state.calls:
        return "no collective on it yet"
    last = state.calls[-1]
    return f"last collective {last.op} #{last.sequence} ({last.site})"


def report(host: str, rank: int, operations: Sequence[Operation], answers: Answers, more: int = 0) -> str:
    """The text for stderr."""
    parts = [f"mpdist: rank {rank} ({host}) waits for {len(operations) + more} operation(s) that take long:"]
    for operation in operations:
        parts.append(f"  {operation.where}, for {operation.seconds:.3g} s")
        parts.append(explain(operation, answers))
    if more:
        parts.append(f"  and {more} more")
    return "\n".join(parts)


def timeout_text(operation: Operation, limit: float, answers: Answers | None) -> str:
    """The text of a WorkTimeout.

    Args:
        answers: None where other ranks can't be asked.
    """
    text = f"{operation.where} is not done after {limit:g} s"
    if answers is None:
        return f"{text}; who is late is not known, because this MPI does not allow threads"
    late = missing(operation, answers)
    if late:
        text = f"{text}, waiting for {operation.ranks_text(late)}"
    return f"{text}\n{explain(operation, answers)}".rstrip()


# ---------------------------------------------------------------------- waiting for what cannot come


def doomed(operation: Operation, finished: Answers) -> list[int]:
    """World ranks that have finished and without which it can't end; empty while it may still end.

    Args:
        finished: answers of ranks that have finished.
    """
    gone = [rank for rank in operation.peers if rank in finished and operation.key in finished[rank].channels]
    if operation.is_moving or not gone:
        return []
    states = {rank: finished[rank].channel(operation) for rank in gone}
    if operation.kind is Kind.COLLECTIVE:
        posted = {rank: state.posted for rank, state in states.items()}
        return [rank for rank, number in posted.items() if number is not None and number < operation.sequence]
    if operation.kind is Kind.SEND:
        return [rank for rank, state in states.items() if not _may_meet(operation, state.receives)]
    if len(gone) == len(operation.peers) and not any(_may_meet(operation, each.sends) for each in states.values()):
        return gone
    return []


def _may_meet(operation: Operation, tags: Sequence[int]) -> bool:
    """Whether a message of this tag, or a receive of it, is among those on the other side."""
    return bool(tags) and (operation.tag == ANY or operation.tag in tags or ANY in tags)


def stuck(
    any_of: Sequence[Operation], all_of: Sequence[Operation], finished: Answers
) -> tuple[Operation, list[int]] | None:
    """An operation for which this rank waits in vain, and the finished ranks that it waits for.

    Args:
        any_of: one that is doomed is enough.
        all_of: all must be, because each of them may set the rank going again.
    """
    for operation in any_of:
        ranks = doomed(operation, finished)
        if ranks:
            return operation, ranks
    verdicts = [(operation, doomed(operation, finished)) for operation in all_of]
    if verdicts and all(ranks for _, ranks in verdicts):
        return verdicts[0]
    return None


def stuck_text(rank: int, operation: Operation, ranks: Sequence[int], finished: Answers) -> str:
    """`rank 0 waits in recv from 1, tag 4 on 'world' (train.py:12) for rank 1, which has finished (it sends tag 3)`."""
    place = f" ({operation.site})" if operation.site else ""
    have = "which has finished" if len(ranks) == 1 else "which have finished"
    instead = _instead(operation, {each: finished[each].channel(operation) for each in ranks if each in finished})
    advice = f"; {operation.advice}" if operation.advice else ""
    whom = f"{operation.ranks_text(ranks)}, {have}{instead}"
    queued = f"; {_queued(operation)}" if operation.queued else ""
    daemons = "".join(_daemons(operation.rank_in(each), finished[each]) for each in ranks if each in finished)
    return f"rank {rank} waits in {operation.text}{place} for {whom}{daemons}{queued}{advice}"


def _daemons(rank: int, answer: Answer) -> str:
    """They are stopped with the program: nobody can know whether they would have gone on."""
    names = ", ".join(map(repr, answer.daemons))
    return f"; the daemon threads of rank {rank} do not count: join {names}" if names else ""


def hint_text(rank: int, operation: Operation, ranks: Sequence[int], finished: Answers) -> str:
    """The same, where the wait may yet end."""
    return f"{stuck_text(rank, operation, ranks, finished)}; it goes on only if another of its tasks ends that wait"


def _instead(operation: Operation, states: Mapping[int, ChannelState]) -> str:
    """What the finished ranks have called, or which messages they send or receive, in place of what is waited for."""
    if operation.kind is Kind.COLLECTIVE:
        return _called(operation, states)
    is_receive = operation.kind is Kind.RECEIVE
    tags = sorted({tag for state in states.values() for tag in (state.sends if is_receive else state.receives)})
    return f" (and {'sends' if is_receive else 'receives'} {tags_text(tags)})" if tags else ""


def _called(operation: Operation, states: Mapping[int, ChannelState]) -> str:
    """` (last collective all_reduce #2, train.py:30)`; of each rank where they differ."""
    ranks_of: dict[str, list[int]] = {}
    for rank, state in states.items():
        ranks_of.setdefault(_last_collective(state), []).append(rank)
    texts = list(ranks_of)
    if len(texts) > 1:
        texts = [f"{operation.ranks_text(ranks)}: {text}" for text, ranks in list(ranks_of.items())[:MOST_RANKS]]
    return f" ({'; '.join(texts)})" if texts else ""


def _queued(operation: Operation) -> str:
    """`queued here: float32 x 3 from rank 0, tag 1`."""
    more = len(operation.queued) - MOST_MESSAGES
    return f"queued here: {', '.join(operation.queued[:MOST_MESSAGES])}{f' and {more} more' if more > 0 else ''}"
