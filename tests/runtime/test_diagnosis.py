"""Diagnosis: records in, words and decisions out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mpdist.runtime.diagnosis import (
    explain,
    hint_text,
    is_spokesman,
    mismatch,
    missing,
    next_lower,
    report,
    stuck,
    stuck_text,
    timeout_text,
)
from mpdist.runtime.records import Answer, ChannelState, Kind, Operation, Posted

KEY = "world@1"
COLLECTIVE = Operation(
    kind=Kind.COLLECTIVE,
    text="all_reduce float32 x 4 sum #3 on 'world'",
    key=KEY,
    name="world",
    members=(0, 1, 2, 3),
    own=0,
    sequence=3,
    peers=(1, 2, 3),
    site="train.py:12",
    seconds=60.0,
)
RECEIVE = replace(
    COLLECTIVE, kind=Kind.RECEIVE, text="recv from 1, tag 5 on 'world'", sequence=0, peers=(1,), site="a.py:7"
)
ANY = replace(RECEIVE, text="recv from any rank, any tag on 'world'", peers=(1, 2, 3))
SEND = replace(RECEIVE, kind=Kind.SEND, text="send to 1, tag 5 on 'world'")
TAGGED = replace(RECEIVE, tag=5)
TAGGED_SEND = replace(SEND, tag=5)
ANYTHING = -1
CALL = Posted(3, "all_reduce", "float32 x 4 sum", "train.py:12", 61.0)
BEFORE = Posted(2, "all_reduce", None, "train.py:30", None)


def answered(
    posted: int | None,
    *calls: Posted,
    sends: tuple[int, ...] = (),
    receives: tuple[int, ...] = (),
    is_finished: bool = False,
    waits: tuple[str, ...] = (),
) -> Answer:
    place = "train.py:36 in load_batch: time.sleep(60)"
    return Answer(is_finished, place, waits, {KEY: ChannelState(posted, calls, sends, receives)})


def done(posted: int, **tags: tuple[int, ...]) -> Answer:
    return answered(posted, is_finished=True, **tags)  # type: ignore[arg-type]


@pytest.mark.parametrize(("operation", "verb"), [(RECEIVE, "send"), (SEND, "receive")])
def test_message_to_itself_is_told_where_this_rank_is(operation: Operation, verb: str) -> None:
    alone = replace(operation, members=(0,), peers=(), queued=("float32 x 3 from rank 0, tag 1",))
    text = explain(alone, {0: answered(0)})
    assert f"only this rank could {verb} it, and it is at train.py:36 in load_batch" in text
    assert "queued here: float32 x 3" in text


def test_an_answer_survives_its_letter() -> None:
    answer = replace(answered(3, BEFORE, CALL, sends=(2, 7), receives=(ANYTHING,)), waits=("recv from 0",))
    assert Answer.of_json(json.loads(json.dumps(answer.as_json()))) == answer


def test_the_late_and_the_mute_are_missing() -> None:
    answers = {0: answered(3, CALL), 1: answered(2, BEFORE), 2: answered(5)}
    assert missing(COLLECTIVE, answers) == [1, 3]
    assert missing(RECEIVE, answers) == [1]


def test_a_collective_is_explained() -> None:
    answers = {0: answered(3, CALL), 1: answered(2, BEFORE), 2: answered(3, CALL)}
    assert explain(COLLECTIVE, answers).splitlines() == [
        "    arrived: ranks 0, 2",
        "    not arrived: rank 1: last collective all_reduce #2 (train.py:30), "
        "now at train.py:36 in load_batch: time.sleep(60)",
        "    no answer (dead, stopped, or cut off): rank 3",
    ]


def test_a_rank_that_has_closed_the_communicator_says_so() -> None:
    for posted, words in ((0, "has closed it"), (2, "has closed it after collective #2")):
        left = Answer(False, "train.py:36", (), {KEY: ChannelState(posted, (BEFORE,) * bool(posted), is_closed=True)})
        assert f"not arrived: rank 1: {words}, now at train.py:36" in explain(COLLECTIVE, {1: left})
        assert Answer.of_json(json.loads(json.dumps(left.as_json()))) == left


def test_ranks_are_numbered_as_in_the_communicator() -> None:
    part = replace(COLLECTIVE, members=(4, 2, 9), own=1, peers=(4, 9))
    answers = {2: answered(3, CALL), 4: answered(0), 9: answered(3, CALL)}
    assert explain(part, answers).splitlines() == [
        "    arrived: ranks 1-2",
        "    not arrived: rank 0: no collective on it yet, now at train.py:36 in load_batch: time.sleep(60)",
    ]


def test_a_report_and_a_timeout_say_what_waits_and_for_whom() -> None:
    answers = {0: answered(3, CALL), 1: answered(2, BEFORE), 2: answered(3, CALL), 3: answered(3, CALL)}
    lines = report("node7", 0, [COLLECTIVE], answers, more=2).splitlines()
    assert lines[0] == "mpdist: rank 0 (node7) waits for 3 operation(s) that take long:"
    assert lines[1] == "  all_reduce float32 x 4 sum #3 on 'world' (rank 0 of 4) (train.py:12), for 60 s"
    assert lines[-1] == "  and 2 more"
    first = timeout_text(COLLECTIVE, 0.5, answers).splitlines()[0]
    assert first == (
        "all_reduce float32 x 4 sum #3 on 'world' (rank 0 of 4) (train.py:12) is not done after 0.5 s, "
        "waiting for rank 1"
    )
    assert "does not allow threads" in timeout_text(COLLECTIVE, 0.5, None)


def test_different_calls_in_one_place_are_named() -> None:
    other = Posted(3, "broadcast", "float32 x 4 from 0", "train.py:14", 3.0)
    answers = {0: answered(3, CALL), 1: answered(3, other), 2: answered(4, replace(CALL, details=None, seconds=None))}
    lines = str(mismatch(COLLECTIVE, answers)).splitlines()
    assert lines[0] == "call 3 on 'world' differs between ranks:"
    assert lines[2].split() == ["rank", "1:", "broadcast", "float32", "x", "4", "from", "0", "(train.py:14)"]
    assert mismatch(COLLECTIVE, {0: answered(3, CALL), 2: answers[2]}) is None
    assert "it is being carried out" not in explain(COLLECTIVE, answers | {3: answered(3, CALL)})


def test_ranks_that_are_no_members_have_no_part_in_it() -> None:
    """They are asked about operations of other communicators."""
    part = replace(COLLECTIVE, members=(1, 2), own=1, peers=(1,))
    elsewhere = {"world@9": ChannelState(7)}
    waiting = answered(3, CALL, waits=("all_reduce",))
    answers = {0: replace(answered(None), channels=elsewhere), 2: waiting}
    assert mismatch(part, answers) is None
    assert explain(part, answers | {1: answered(2, BEFORE)}).splitlines()[0] == "    arrived: rank 1"
    assert explain(part, answers | {1: waiting}).splitlines() == [
        "    arrived: ranks 0-1",
        "    all ranks have called it: it is being carried out",
    ]


def test_who_has_gone_on_is_told() -> None:
    waiting = {rank: answered(3, CALL, waits=("all_reduce",)) for rank in range(4)}
    carried_out = ["    arrived: ranks 0-3", "    all ranks have called it: it is being carried out"]
    assert explain(COLLECTIVE, waiting).splitlines() == carried_out
    elsewhere = "    rank 2 is at train.py:36 in load_batch: time.sleep(60)"
    assert explain(COLLECTIVE, waiting | {2: answered(3, CALL)}).splitlines() == [*carried_out, elsewhere]
    over = replace(CALL, seconds=None)
    later = Posted(20, "broadcast", "float32 x 4 from 0", "train.py:14", 3.0)
    gone = waiting | {1: answered(4, over, replace(later, sequence=4)), 2: answered(20, later)}
    last = "    all ranks have called it, and ranks 1-2 have completed it and gone on"
    assert explain(COLLECTIVE, gone).splitlines()[-1] == last
    other = gone | {1: answered(4, replace(over, details="float32 x 8 sum"))}
    lines = explain(COLLECTIVE, other).splitlines()
    assert lines[0] == "    call 3 on 'world' differs between ranks:"
    assert lines[2].split() == ["rank", "1:", "all_reduce", "float32", "x", "8", "sum", "(train.py:12)"]
    assert lines[-1] == last


def test_the_lowest_rank_that_waits_for_long_is_the_spokesman() -> None:
    waiting = answered(3, CALL)
    assert not is_spokesman(COLLECTIVE, 2, {0: waiting, 1: answered(2)}, 60)
    assert is_spokesman(COLLECTIVE, 0, {2: waiting}, 60)
    assert is_spokesman(COLLECTIVE, 2, {0: answered(3, replace(CALL, seconds=10.0))}, 60)
    assert is_spokesman(RECEIVE, 2, {0: waiting}, 60)


def test_lower_ranks_are_asked_in_batches_that_grow() -> None:
    many = replace(COLLECTIVE, members=tuple(range(12)), own=9, peers=(*range(9), 10, 11))
    asked = {9}
    batches = []
    while lower := next_lower([many, ANY], 9, asked):
        batches.append(lower)
        asked |= set(lower)
    assert batches == [[0], [1, 2], [3, 4, 5, 6], [7, 8]]
    assert next_lower([many], 0, {0}) == next_lower([ANY], 9, {9}) == []


@pytest.mark.parametrize(
    ("operation", "finished", "ranks"),
    [
        (COLLECTIVE, {}, None),
        (COLLECTIVE, {1: done(3), 2: done(4)}, None),  # both have posted it
        (COLLECTIVE, {1: done(3), 2: done(2)}, [2]),
        (COLLECTIVE, {1: Answer(is_finished=True)}, None),  # not asked for this communicator
        (COLLECTIVE, {1: answered(None, is_finished=True)}, None),  # it was closed there; how far it came is not known
        (RECEIVE, {2: done(0)}, None),
        (RECEIVE, {1: done(0)}, [1]),
        (RECEIVE, {1: done(0, sends=(5,))}, None),  # a message is on its way
        (TAGGED, {1: done(0, sends=(3, 5))}, None),
        (TAGGED, {1: done(0, sends=(ANYTHING, 3))}, None),  # too many to be listed
        (TAGGED, {1: done(0, sends=(3, 4))}, [1]),
        (replace(RECEIVE, is_moving=True), {1: done(0)}, None),
        (ANY, {1: done(0), 2: done(0)}, None),
        (ANY, {1: done(0), 2: done(0), 3: done(0)}, [1, 2, 3]),
        (ANY, {1: done(0), 2: done(0, sends=(2,)), 3: done(0)}, None),
        (SEND, {1: done(0)}, [1]),
        (SEND, {1: done(0, receives=(1,))}, None),
        (TAGGED_SEND, {1: done(0, receives=(5,))}, None),
        (TAGGED_SEND, {1: done(0, receives=(ANYTHING,))}, None),
        (TAGGED_SEND, {1: done(0, receives=(4,))}, [1]),
    ],
)
def test_what_only_finished_ranks_could_give(
    operation: Operation, finished: dict[int, Answer], ranks: list[int] | None
) -> None:
    assert stuck([operation], [], finished) == (None if ranks is None else (operation, ranks))


def test_of_waits_that_may_end_each_other_all_must_be_in_vain() -> None:
    alive = replace(RECEIVE, peers=(2,))
    assert stuck([], [RECEIVE, alive], {1: done(0)}) is None
    assert stuck([], [RECEIVE, RECEIVE], {1: done(0)}) == (RECEIVE, [1])
    assert stuck([], [], {1: done(0)}) is None


def test_the_reason_names_the_wait_and_the_finished_ranks() -> None:
    assert stuck_text(0, COLLECTIVE, [1], {1: done(0)}) == (
        "rank 0 waits in all_reduce float32 x 4 sum #3 on 'world' (train.py:12) for rank 1, which has finished "
        "(no collective on it yet)"
    )
    called = {1: done(0), 2: answered(2, BEFORE, is_finished=True), 3: done(0)}
    assert stuck_text(0, COLLECTIVE, [1, 2, 3], called).endswith(
        "for ranks 1-3, which have finished (ranks 1, 3: no collective on it yet; "
        "rank 2: last collective all_reduce #2 (train.py:30))"
    )
    assert stuck_text(0, ANY, [1, 2, 3], {}).endswith("(a.py:7) for ranks 1-3, which have finished")
    assert stuck_text(0, TAGGED, [1], {1: done(0, sends=(3, 4))}).endswith("which has finished (and sends tags 3, 4)")
    offered = {1: done(0, receives=(4,))}
    assert stuck_text(0, TAGGED_SEND, [1], offered).endswith("which has finished (and receives tag 4)")


def test_daemon_threads_that_a_finished_rank_has_left_are_told() -> None:
    left = replace(done(0), daemons=("server",))
    assert Answer.of_json(json.loads(json.dumps(left.as_json()))) == left
    assert stuck_text(0, TAGGED, [1], {1: left}).endswith(
        "for rank 1, which has finished; the daemon threads of rank 1 do not count: join 'server'"
    )


def test_messages_that_came_unasked_are_told() -> None:
    queued = tuple(f"float32 x 3 from rank 1, tag {tag}" for tag in range(6))
    assert stuck_text(0, replace(TAGGED, queued=queued[:1]), [1], {1: done(0)}).endswith(
        "which has finished; queued here: float32 x 3 from rank 1, tag 0"
    )
    assert stuck_text(0, replace(TAGGED, queued=queued), [1], {1: done(0)}).endswith("tag 3 and 2 more")
    lines = explain(replace(TAGGED, queued=queued[:1]), {0: answered(0), 1: answered(0)}).splitlines()
    assert len(lines) == 2
    assert lines[1] == "    queued here: float32 x 3 from rank 1, tag 0"


def test_advice_comes_with_ranks_that_are_missing() -> None:
    advised = replace(COLLECTIVE, advice="unequal numbers of batches?")
    assert stuck_text(0, advised, [1], {1: done(0)}).endswith("; unequal numbers of batches?")
    waiting = {rank: answered(3, CALL) for rank in range(4)}
    assert explain(advised, waiting | {1: answered(2, BEFORE)}).endswith("\n    unequal numbers of batches?")
    assert "unequal" not in explain(advised, waiting)


def test_where_another_task_may_end_the_wait_the_hint_says_so() -> None:
    assert hint_text(0, TAGGED, [1], {1: done(0)}) == (
        "rank 0 waits in recv from 1, tag 5 on 'world' (a.py:7) for rank 1, which has finished; "
        "it goes on only if another of its tasks ends that wait"
    )
